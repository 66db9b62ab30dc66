"""When vLLM takes tkv's backend, and what is said where it cannot."""

import importlib.util
import logging
import os
import subprocess
import sys
import types

import pytest
from vllm.v1.attention.backends import registry
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from tkv.errors import UnsupportedError
from tkv.integrations import vllm as integration
from tkv.integrations.vllm import interface
from tkv.integrations.vllm.backend import RefusedMLABackend, TkvBackend


@pytest.fixture(autouse=True)
def no_choices(monkeypatch):
    """Nothing is registered and nothing chosen, whatever other tests did."""
    monkeypatch.setattr(registry, "_ATTN_OVERRIDES", {})
    monkeypatch.delenv("TKV_VLLM", raising=False)


PLUGINS = """
from vllm.plugins import load_general_plugins
from vllm.v1.attention.backends.registry import AttentionBackendEnum
import sys
load_general_plugins()
assert "tkv.integrations.vllm.backend" not in sys.modules
print(AttentionBackendEnum.CUSTOM.get_path(), AttentionBackendEnum.CPU_ATTN.get_path())
"""


@pytest.mark.parametrize("chosen", [None, "1"])
def test_vllm_finds_the_entry_point_and_keeps_its_own_backend_until_asked(chosen):
    env = {name: value for name, value in os.environ.items() if name != "TKV_VLLM"} | ({"TKV_VLLM": chosen} if chosen else {})
    done = subprocess.run([sys.executable, "-c", PLUGINS], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    custom, cpu = done.stdout.split()[-2:]
    assert custom == integration.BACKEND
    assert cpu == (integration.BACKEND if chosen else AttentionBackendEnum.CPU_ATTN.value)


@pytest.mark.parametrize("value, cpu", [("1", TkvBackend), ("0", None), ("", None)])
def test_the_environment_chooses_on_a_cpu_also_when_asked_twice(monkeypatch, value, cpu):
    monkeypatch.setenv("TKV_VLLM", value)
    integration.register()
    once = dict(registry._ATTN_OVERRIDES)
    integration.register()
    assert registry._ATTN_OVERRIDES == once
    assert AttentionBackendEnum.CUSTOM.get_class() is TkvBackend
    assert AttentionBackendEnum.CPU_ATTN.is_overridden() == (cpu is not None)
    if cpu is not None:
        assert AttentionBackendEnum.CPU_ATTN.get_class() is cpu
        assert AttentionBackendEnum[cpu.get_name()] is AttentionBackendEnum.CUSTOM


def test_another_plugin_keeps_the_custom_backend_until_tkv_is_asked_for(monkeypatch):
    registry.register_backend(AttentionBackendEnum.CUSTOM, "other.Backend")
    integration.register()
    assert AttentionBackendEnum.CUSTOM.get_path() == "other.Backend"
    monkeypatch.setenv("TKV_VLLM", "1")
    integration.register()
    assert AttentionBackendEnum.CUSTOM.get_path() == integration.BACKEND


def test_latent_attention_on_a_cpu_is_refused_and_not_left_to_vllm(monkeypatch):
    monkeypatch.setenv("TKV_VLLM", "1")
    integration.register()
    assert AttentionBackendEnum.CPU_MLA.get_class() is AttentionBackendEnum.AMX_MLA.get_class() is RefusedMLABackend
    with pytest.raises(UnsupportedError, match="use_mla: "):
        RefusedMLABackend.get_impl_cls()


@pytest.mark.parametrize("missing", ["module", "name"])
def test_a_vllm_without_the_registry_starts_unless_tkv_was_chosen(monkeypatch, caplog, missing):
    if missing == "module":
        monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.registry", None)
    else:
        monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.registry", types.ModuleType("registry"))
    with caplog.at_level(logging.WARNING):
        integration.register()
    assert "expected the backend registry of vLLM 0.32" in caplog.text
    monkeypatch.setenv("TKV_VLLM", "1")
    with pytest.raises(UnsupportedError, match="expected the backend registry of vLLM"):
        integration.register()


def load_interface_again():
    spec = importlib.util.spec_from_file_location("interface_again", interface.__file__)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_a_vllm_with_another_interface_is_named_with_its_version(monkeypatch):
    monkeypatch.setattr("vllm.version.__version__", "0.99.1")
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backend", types.ModuleType("backend"))
    with pytest.raises(UnsupportedError, match=r"written for vLLM 0\.32 and does not fit 0\.99\.1: cannot import name"):
        load_interface_again()


def test_another_version_with_the_same_names_is_told(monkeypatch, caplog):
    load_interface_again()
    assert not caplog.text
    monkeypatch.setattr("vllm.version.__version__", "0.99.1")
    load_interface_again()
    assert "tried with vLLM 0.32 only; this is 0.99.1" in caplog.text
