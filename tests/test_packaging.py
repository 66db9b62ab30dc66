"""The built wheel holds what an installed tkv needs, and nothing else."""

import importlib.util
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.packaging

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    for module in ("pip", "hatchling"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed, so no wheel can be built without the network")
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-index", "--no-build-isolation", "-w", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = out.glob("tkv-*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_wheel_is_pure(wheel):
    assert Path(wheel.filename).name.endswith("-py3-none-any.whl")


def test_wheel_has_every_module_and_the_marker_of_types(wheel):
    names = set(wheel.namelist())
    assert "tkv/py.typed" in names
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "tkv").rglob("*.py")} <= names


def test_wheel_has_the_tables(wheel):
    names = set(wheel.namelist())
    tables = ROOT / "autotune_configs"
    assert {f"tkv/_autotune_configs/{path.relative_to(tables)}" for path in tables.rglob("*.json")} <= names
    facts = json.loads(wheel.read("tkv/_autotune_configs/gpus.json"))
    assert facts["archs"]["sm90"]["shared_per_block"] == 232448


def test_wheel_has_nothing_else(wheel):
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert tops == {"tkv", next(top for top in tops if top.endswith(".dist-info"))}
    parts = {part for name in wheel.namelist() for part in name.split("/")}
    assert not [part for part in parts if part in ("tests", "__pycache__", "conftest.py") or part.startswith("test_")]


def test_wheel_states_its_terms(wheel):
    (metadata,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    text = wheel.read(metadata).decode()
    required = [line.split(":")[1].strip() for line in text.splitlines() if line.startswith("Requires-Dist") and "extra ==" not in line]
    assert sorted(required) == ["numpy", "tabulate", "torch", "triton>=3.6"]
    assert "License-Expression: Apache-2.0" in text
    assert [name for name in wheel.namelist() if name.endswith("/LICENSE")]
    (scripts,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert "tkv = tkv.cli:main" in wheel.read(scripts).decode()
