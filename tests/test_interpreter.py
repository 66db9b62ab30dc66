"""The quick interpreter: the same results, and Triton as it was afterwards."""

import pytest
import torch
from problems import build

from tkv.demo.interpreter import quick_interpreter

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled")


@pytest.fixture
def interpreter():
    return pytest.importorskip("triton.runtime.interpreter")


def test_results_have_the_same_bits_with_far_fewer_patches(interpreter, monkeypatch):
    problem = build("int8/token_head", [37, 5], 16, 1, 2, 16, torch.float16, spike=6.0, window=20, softcap=5.0)
    patched = []
    patch = interpreter._patch_lang
    monkeypatch.setattr(interpreter, "_patch_lang", lambda fn: patched.append(fn) or patch(fn))
    expected = problem.run()
    plainly = len(patched)
    patched.clear()
    with quick_interpreter():
        for _ in range(2):
            for got, right in zip(problem.run(), expected):
                assert torch.equal(got, right)
    assert 0 < len(patched) < plainly / 3
    patched.clear()
    problem.run()
    assert len(patched) == plainly, "as before"


def test_triton_is_as_before_after_an_error(interpreter):
    builder = interpreter.interpreter_builder
    before = interpreter._patch_lang, builder.options
    with pytest.raises(KeyError), quick_interpreter():
        assert interpreter._patch_lang is not before[0] and not builder.options.sanitize_overflow
        raise KeyError
    assert (interpreter._patch_lang, builder.options) == before
    build("fp32", [5], dim=16).check()


def test_an_error_in_a_kernel_does_not_spoil_the_next_launch(interpreter, monkeypatch):
    from tkv.kernels.tiles import load

    problem = build("fp32", [20], dim=16)
    with quick_interpreter():
        with monkeypatch.context() as broken:
            broken.setattr(load, "load_columns", None)
            with pytest.raises(interpreter.InterpreterError):
                problem.run()
        problem.check()
    problem.check()


def test_an_unknown_triton_is_left_alone(interpreter, monkeypatch):
    with monkeypatch.context() as unknown:
        unknown.delattr(interpreter, "_patch_lang")
        unknown.delattr(interpreter.interpreter_builder, "options")
        with quick_interpreter():
            pass
        assert not hasattr(interpreter, "_patch_lang") and not hasattr(interpreter.interpreter_builder, "options")
    build("fp32", [5], dim=16).check()
