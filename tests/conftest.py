"""What all tests share: the interpreter where there is no GPU, profiles of effort, poisoned scratch."""

import os
import sys
from contextlib import nullcontext

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

# Under the sanitiser kernels go through Triton's real frontend, on tensors that pretend to be on a GPU.
SANITIZING = os.environ.get("TKV_SANITIZE", "") not in ("", "0")
if not SANITIZING and not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

PROFILE = os.environ.get("TKV_PROFILE", "ci")
_PATIENT = settings(
    deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
)
# A failure is reported as it was found: to shrink it takes minutes.
_QUICK = settings(_PATIENT, derandomize=True, database=None, phases=(Phase.explicit, Phase.generate))
settings.register_profile("ci", _QUICK)
settings.register_profile("gpu", _QUICK)
settings.register_profile("deep", _PATIENT, print_blob=True)
settings.load_profile(PROFILE)


def pytest_ignore_collect(collection_path, config):
    """The sanitiser's cases need it around them: only a run that names them collects them."""
    if collection_path.name == "sanitize" and not SANITIZING and not any("sanitize" in arg for arg in config.args):
        return True
    return None


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("deep") and PROFILE != "deep":
            item.add_marker(pytest.mark.skip(reason="a long search: TKV_PROFILE=deep"))
        if item.get_closest_marker("gpu") and (SANITIZING or not torch.cuda.is_available()):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture
def device():
    """Where kernels run: the CPU in the interpreter, else the GPU, or what the sanitiser takes for one."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@pytest.fixture(autouse=True)
def quick(request):
    """The interpreter without what only takes time; tests/test_interpreter.py shows, without this, that it computes the same."""
    from tkv.demo.interpreter import quick_interpreter

    plain = SANITIZING or torch.cuda.is_available() or request.module.__name__ == "test_interpreter"
    with nullcontext() if plain else quick_interpreter():
        yield


@pytest.fixture(autouse=True)
def poisoned_scratch(monkeypatch):
    """Memory that tkv allocates without initialising it is full of what would spoil a result, instead of zeros by chance."""
    from caches import poison_

    empty = torch.empty

    def poisoned_empty(*args, **kwargs):
        tensor = empty(*args, **kwargs)
        inside = sys._getframe(1).f_globals.get("__name__", "").startswith("tkv.")
        return poison_(tensor) if inside and tensor.device.type != "meta" else tensor

    monkeypatch.setattr(torch, "empty", poisoned_empty)


@pytest.fixture
def no_gpu(monkeypatch):
    """A machine where torch sees no GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def refused(capsys):
    """Runs the ``tkv`` command with arguments that it has to refuse, and gives the one line that it says."""
    from tkv.cli import main

    def run(*argv):
        with pytest.raises(SystemExit) as ended:
            main(list(argv))
        assert ended.value.code == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        return error

    return run
