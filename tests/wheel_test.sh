#!/usr/bin/env bash
# Usage: wheel_test.sh PYTHON WHEEL
#
# Installs the wheel in a fresh environment outside of the repository and looks something up from there. The packages that tkv depends on are
# those of PYTHON, whose own tkv (an editable install of this tree) must not be what is found.
set -euo pipefail

python=$(command -v "$1")
wheel=$(realpath "$2")
# A path is made absolute without following links: the interpreter of an environment is a link to the one it was made with.
case $python in /*) ;; *) python=$PWD/$python ;; esac

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
unset PYTHONPATH

"$python" -m venv fresh
fresh/bin/python -m pip --disable-pip-version-check install -q --no-deps --no-index "$wheel"

# A folder named in a .pth file is searched, but its own .pth files are not read: an editable tkv stays out of sight.
site=$(fresh/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$python" -c 'import sys; print("\n".join(p for p in sys.path if p.endswith("-packages")))' > "$site/dependencies.pth"

fresh/bin/python - "$work" <<'PY'
import sys
from pathlib import Path

import tkv
from tkv.tune import ARCHS, arch, configs_dir

inside = Path(sys.argv[1]).resolve()
for path in (Path(tkv.__file__), configs_dir()):
    assert path.resolve().is_relative_to(inside), f"{path} does not belong to the installed wheel"
assert configs_dir().name == "_autotune_configs"
assert (Path(tkv.__file__).parent / "py.typed").is_file()
assert [arch(name).name for name in ARCHS] == list(ARCHS)
print(f"wheel: tkv of {Path(tkv.__file__).parent.relative_to(inside)}, {len(ARCHS)} architectures, sm90 has {arch('sm90').shared_per_block} bytes a block")
PY

fresh/bin/tkv --help > /dev/null
echo "wheel: ok"
