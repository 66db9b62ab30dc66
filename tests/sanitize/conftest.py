"""Cases that run under the memory and race checker, which `make sanitize` puts around them."""

import os

import pytest


def pytest_collection_modifyitems(items):
    if os.environ.get("TKV_SANITIZE", "") in ("", "0"):
        for item in items:
            if "sanitize" in item.path.parts:
                item.add_marker(pytest.mark.skip(reason="runs under the checker: make sanitize"))
