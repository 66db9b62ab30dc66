"""Cases that run under the memory and race checker, which `make sanitize` puts around them."""

import os

import pytest


def pytest_collection_modifyitems(items):
    if os.environ.get("TKV_SANITIZE", "") in ("", "0"):
        for item in items:
            if "sanitize" in item.path.parts:
                item.add_marker(pytest.mark.skip(reason="runs under the checker: make sanitize"))


@pytest.fixture(autouse=True)
def checker(request):
    """The checker's own counts. A case fails if nothing in it was launched, or if a launch was too large to be checked for races."""
    plugins = request.config.pluginmanager.get_plugins()
    states = [plugin.state for plugin in plugins if hasattr(getattr(plugin, "state", None), "races_unchecked")]
    assert len(states) == 1, "TKV_SANITIZE=1 is for runs under the checker: make sanitize"
    (state,) = states
    launches, unchecked = state.launches, state.races_unchecked
    yield state
    assert state.launches > launches, "nothing was launched under the checker"
    assert state.races_unchecked == unchecked, "a launch was too large to be checked for races"
