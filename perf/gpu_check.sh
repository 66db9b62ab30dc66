#!/usr/bin/env bash
# Ten minutes on a machine with a GPU: what it can run, whether kernels are right there, tables for it, and how fast it is.
#
# bash perf/gpu_check.sh FOLDER
#
# FOLDER gets a log and an exit status of each step, tables/ (for `tkv merge` or TKV_CONFIG_DIR) and bench/. Called again with it, only steps
# run that have not passed. Variables: PYTHON, an interpreter with tkv's packages (python3); TUNE_BUDGET (170s); TUNE_ARGS, TEST_ARGS,
# BENCH_ARGS; LIMIT_DOCTOR, LIMIT_TESTS, LIMIT_TUNE, LIMIT_BENCH in seconds. The exit status is 0 if all steps have passed, 1 if not,
# 130 after Ctrl-C.
set -uo pipefail
# Steps have process groups of their own, which a limit or Ctrl-C ends whole.
set -m

if [ $# -ne 1 ] || [ "${1#-}" != "$1" ]; then
    echo "usage: bash perf/gpu_check.sh FOLDER" >&2
    exit 2
fi
mkdir -p "$1" || exit 2
out=$(cd "$1" && pwd)
cd "$(dirname "$0")/.." || exit 2
python=${PYTHON:-python3}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
steps=()
pid=

# step NAME SECONDS COMMAND...
step() {
    local name=$1 limit=$2 status start=$SECONDS
    shift 2
    steps+=("$name")
    if [ "$(cat "$out/$name.status" 2>/dev/null)" = 0 ]; then
        echo "==> $name: passed before"
        return
    fi
    rm -f "$out/$name.status"
    echo "==> $name: at most $limit s, $out/$name.log"
    # Interrupted first, so that what is measured can be written; then killed.
    timeout --signal=INT --kill-after=15 "$limit" "$@" >"$out/$name.log" 2>&1 </dev/null &
    pid=$!
    wait "$pid"
    status=$?
    pid=
    tail -n 12 "$out/$name.log" | sed 's/^/    /'
    echo "$status" >"$out/$name.status"
    echo "==> $name: $(verdict "$name"), $((SECONDS - start)) s"
}

verdict() {
    local status
    status=$(cat "$out/$1.status" 2>/dev/null) || { echo "not finished"; return; }
    case $status in
        0) echo passed ;;
        124 | 137) echo "FAILED: its time was over" ;;
        *) echo "FAILED with $status" ;;
    esac
}

# Says which steps have passed, and whether all have.
summary() {
    local name passed=0
    {
        for name in doctor tests tune bench; do
            printf '%-8s%s\n' "$name" "$(verdict "$name")"
        done
    } | tee "$out/summary.txt"
    for name in doctor tests tune bench; do
        [ "$(cat "$out/$name.status" 2>/dev/null)" = 0 ] && passed=$((passed + 1))
    done
    [ "$passed" = 4 ]
}

stopped() {
    trap '' INT TERM
    [ -n "$pid" ] && kill -INT -- "-$pid" 2>/dev/null
    [ -n "$pid" ] && wait "$pid"
    echo "==> stopped; the same command goes on from here"
    summary
    exit 130
}
trap stopped INT TERM

step doctor "${LIMIT_DOCTOR:-40}" "$python" -m tkv.cli doctor --gpu
# Compiling for other architectures, and building a wheel, need no GPU: their tests run elsewhere.
step tests "${LIMIT_TESTS:-260}" make test VENV=none PYTHON="$python" ARGS="${TEST_ARGS:--m 'not compile and not packaging'}"
# shellcheck disable=SC2086
step tune "${LIMIT_TUNE:-200}" "$python" -m tkv.cli tune --budget "${TUNE_BUDGET:-170s}" --out "$out/tables" --resume ${TUNE_ARGS:-}
# shellcheck disable=SC2086
TKV_CONFIG_DIR="$out/tables" step bench "${LIMIT_BENCH:-90}" "$python" perf/bench_ops.py --budget 70 --out "$out/bench" ${BENCH_ARGS:-}

echo
summary || exit 1
