"""Operators: torch.library, torch.compile and fake tensors."""

import shutil
import subprocess
import sys
import sysconfig
import warnings
from pathlib import Path

import pytest
import torch
from operator_calls import CALLS, CONFIG, DIM, HEADS, LENS, PAGE_SIZE, PAGES, Inputs, filled, interleaved, latent, tensors_of
from torch._subclasses.fake_tensor import FakeTensorMode

import tkv
from tkv.ops import launch, library

KINDS = ("fp32", "fp8_e4m3/token_head", "int4/token_head", "int8/head")
# merge_states has no cache, rotate_keys takes native ones alone.
CASES = [(name, kind) for name in CALLS for kind in (KINDS if name not in ("merge_states", "rotate_keys") else KINDS[:1])]


@pytest.fixture(autouse=True)
def poisoned_scratch():
    """What is traced calls torch.empty itself."""


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield


def operator_of(name, x):
    """The operator of a call and its arguments, the outputs among them."""
    function, arguments = CALLS[name]
    args, options = arguments(x)
    calls = []

    class Recorded(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "tkv":
                calls.append((func, args))
            return func(*args, **kwargs or {})

    with Recorded():
        function(*args, **options)
    return calls[0]


def test_operators_are_registered_at_import_without_triton():
    names = sorted(CALLS)
    code = f"import sys, torch, tkv; [getattr(torch.ops.tkv, name).default for name in {names}]; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_function_that_launches_is_an_operator():
    public = {name for name in tkv.__all__ if hasattr(getattr(tkv, name), "__wrapped__")} | {"kivi_decode", "kivi_prefill"}
    assert public == set(CALLS)


def test_an_operators_schema_declares_what_it_writes_to():
    def written(name):
        return {arg.name for arg in getattr(torch.ops.tkv, name).default._schema.arguments if arg.alias_info and arg.alias_info.is_write}

    cache = {"cache_k", "cache_v", "cache_k_scale", "cache_v_scale"}
    expected = {name: {"out", "lse", "workspace"} for name in CALLS if "decode" in name or "prefill" in name}
    expected |= {"write_kv": cache, "rotate_keys": cache, "compact_kv": cache | {"scores"}, "key_scores": {"out"}}
    expected |= {name: {"dst_k", "dst_v", "dst_k_scale", "dst_v_scale"} for name in ("copy_pages", "quantize_pages")}
    assert {name: written(name) for name in CALLS} == {"merge_states": set(), "gather_window": set()} | expected


@pytest.mark.parametrize("name, kind", CASES)
def test_opcheck(name, kind, device):
    # opcheck compares tensors by what torch does not have for float8.
    func, args = operator_of(name, Inputs(device, kind.replace("fp8_e4m3", "int8")))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.library.opcheck(func, args)


@pytest.mark.parametrize("make", [interleaved, latent])
@pytest.mark.parametrize("name", ["write_kv", "paged_decode", "gather_window"])
def test_opcheck_of_caches_that_share_memory(name, make, device):
    func, args = operator_of(name, Inputs(device, make=make))
    torch.library.opcheck(func, args)


@pytest.mark.parametrize("name", CALLS)
def test_an_operator_is_the_function(name, device):
    (function, arguments), x, y = CALLS[name], Inputs(device, "int4/token_head"), Inputs(device, "int4/token_head")
    given, by_operator = arguments(x), arguments(y)
    results = tensors_of(function(*given[0], **given[1]))
    with torch.utils._python_dispatch._disable_current_modes(), Through() as used:
        traced = tensors_of(function(*by_operator[0], **by_operator[1]))
    assert used.names == [name]
    assert len(results) == len(traced)
    for one, other in zip(results + tensors_of(given), traced + tensors_of(by_operator), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


class Through(torch.utils._python_dispatch.TorchDispatchMode):
    """Runs what it sees, and remembers tkv's operators."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "tkv":
            self.names.append(func._schema.name.removeprefix("tkv::"))
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("name, kind", CASES)
def test_nothing_is_read_back_from_the_device(name, kind, device, monkeypatch):
    """A fake tensor has no numbers: whatever decided by them, or waited for them, would raise."""
    (function, arguments), x = CALLS[name], Inputs(device, kind)
    args, options = arguments(x)
    launched = []
    monkeypatch.setattr(library, "tracing", lambda: False)
    monkeypatch.setattr(launch.Launch, "run", lambda self, device: launched.append(self.kernel))
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        results = function(*faked(args, mode), **faked(options, mode))
    assert launched
    monkeypatch.undo()
    for fake, real in zip(tensors_of(results), tensors_of(function(*args, **options)), strict=True):
        assert (fake.shape, fake.dtype, fake.stride(), fake.device) == (real.shape, real.dtype, real.stride(), real.device)


def test_policies_read_nothing_back_from_the_device():
    policies = tkv.policies
    with FakeTensorMode():
        lens, table, paged = torch.tensor([21, 30]), torch.tensor([[3, 1], [0, 5]]), torch.empty(PAGES, PAGE_SIZE, HEADS)
        scores = policies.dense_scores(paged, table, lens)
        kept = (
            policies.h2o(scores, lens, heavy=4, recent=4),
            policies.snapkv(scores, lens, budget=8, window=4),
            policies.tova(scores, lens, budget=8),
            policies.key_norm(torch.empty(2, 32, HEADS, DIM), lens, budget=8),
            policies.streaming(lens, HEADS, 32, sinks=3, window=5),
            policies.random(lens, HEADS, 32, 8, 2),
        )
    assert scores.shape == (2, HEADS, 32)
    assert [(keep.shape, keep_lens.shape) for keep, keep_lens in kept] == [((2, HEADS, 8), (2,))] * 6


@pytest.mark.parametrize("name", CALLS)
def test_fake_tensors_give_what_the_function_gives(name, device):
    (function, arguments), x = CALLS[name], Inputs(device, "int8/token_head")
    args, options = arguments(x)
    with FakeTensorMode() as mode:
        results = function(*faked(args, mode), **faked(options, mode))
    for fake, real in zip(tensors_of(results), tensors_of(function(*args, **options)), strict=True):
        assert (fake.shape, fake.dtype, fake.stride(), fake.device) == (real.shape, real.dtype, real.stride(), real.device)


def faked(value, mode):
    """The same without numbers."""
    if isinstance(value, torch.Tensor):
        return mode.from_tensor(value)
    if isinstance(value, tkv.KVCache):
        k, v, k_scale, v_scale = (None if t is None else mode.from_tensor(t) for t in (value.k, value.v, value.k_scale, value.v_scale))
        return tkv.KVCache(k, v, k_scale, v_scale, (value.k_format, value.v_format))
    if isinstance(value, tkv.Rope):
        return tkv.Rope(mode.from_tensor(value.cos), mode.from_tensor(value.sin))
    if isinstance(value, tkv.SharedLevel):
        return tkv.SharedLevel(**{name: faked(field, mode) for name, field in vars(value).items()})
    if isinstance(value, dict):
        return {name: faked(item, mode) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(faked(item, mode) for item in value)
    return value


class Layer(torch.nn.Module):
    """A layer's attention as engines write it."""

    def __init__(self, cache):
        super().__init__()
        torch.manual_seed(0)
        self.project = torch.nn.Linear(DIM, (2 + 1 + 1) * HEADS * DIM, bias=False)
        self.cache = cache

    def forward(self, x, page_table, seq_lens, slot_mapping, max_seq_len):
        q, k, v = (part.unflatten(-1, (-1, DIM)) for part in self.project(x).split([2 * HEADS * DIM, HEADS * DIM, HEADS * DIM], -1))
        tkv.write_kv(k, v[..., : self.cache.v_head_dim], self.cache, slot_mapping)
        out, lse = tkv.paged_decode(q, self.cache, page_table, seq_lens, max_seq_len=max_seq_len, return_lse=True, config=CONFIG)
        return (out * lse.sigmoid()[..., None]).flatten(1) + 1


def steps(device, count=3, seqs=2):
    """Batches of a growing length."""
    generator = torch.Generator().manual_seed(7)
    for i in range(count):
        lens = torch.tensor([*LENS, 9][:seqs], dtype=torch.int32) + i % 2
        table = torch.tensor([[3, 1], [0, 5], [6, 7]], dtype=torch.int32)[:seqs]
        slots = table[torch.arange(seqs), (lens - 1) // PAGE_SIZE] * PAGE_SIZE + (lens - 1) % PAGE_SIZE
        x = torch.randn(seqs, DIM, generator=generator)
        yield *(tensor.to(device) for tensor in (x, table, lens, slots)), int(lens.max())


# Inductor compiles C++ against Python's headers.
CAN_COMPILE = shutil.which("g++") is not None and Path(sysconfig.get_path("include"), "Python.h").exists()
has_compiler = pytest.mark.skipif(not CAN_COMPILE, reason="needs a C++ compiler and Python's headers")
MAKES = [*((make, "aot_eager") for make in (*KINDS, interleaved, latent)), pytest.param("int8/head", "inductor", marks=has_compiler)]


@pytest.mark.parametrize("make, backend", MAKES)
def test_a_decode_step_compiles_whole(make, backend, device):
    caches = [filled(make, device) if isinstance(make, str) else make(device) for _ in range(2)]
    eager, layer = (Layer(cache).to(device) for cache in caches)
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    with torch.no_grad():
        for step in steps(device):
            torch.testing.assert_close(compiled(*step), eager(*step), rtol=1e-5, atol=1e-5)
    # A number beside the border of two codes may fall to either side.
    for one, other in zip(tensors_of(caches[0]), tensors_of(caches[1])):
        assert (one.float() != other.float()).float().mean() < 0.01


def test_other_lengths_and_batches_do_not_compile_again(device):
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    layer = torch.compile(Layer(filled("fp32", device)).to(device), fullgraph=True, backend=counter)
    with torch.no_grad():
        for seqs in (2, 3):
            for step in steps(device, 2, seqs):
                layer(*step)
        before = counter.frame_count
        for seqs in (2, 3):
            for x, table, lens, slots, longest in steps(device, 1, seqs):
                layer(x, table, lens - 3, slots, longest + 17)
    assert counter.frame_count == before <= 3


@has_compiler
def test_a_cache_is_written_in_place_by_compiled_code(device):
    """The compiler makes no copy of a cache to keep what an operator changes from what was there."""
    from torch._inductor.utils import run_and_get_code

    layer = Layer(interleaved(device)).to(device)
    with torch.no_grad():
        _, (code,) = run_and_get_code(torch.compile(layer, fullgraph=True), *next(steps(device)))
    assert "torch.ops.tkv.write_kv" in code and "torch.ops.tkv.paged_decode" in code
    made = [line for line in code.splitlines() if "= empty_strided" in line and "((" in line]
    assert made and not any(f"(({PAGES}, " in line for line in made)


def test_a_cache_can_be_made_in_compiled_code(device):
    x = Inputs(device)
    data = interleaved(device).k

    def step(q, data, scale):
        k = data.to(torch.float8_e4m3fn)
        cache = tkv.KVCache(k, k.clone(), scale, 0.25)
        return tkv.paged_decode(q, cache, x.table, x.lens, config=CONFIG)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x.q, data, 0.5), step(x.q, data, 0.5), rtol=0, atol=0)


def test_a_view_of_k_made_in_compiled_code_is_seen(device):
    """Both would be written to the same place, V last."""
    k = torch.zeros(PAGES, PAGE_SIZE, HEADS, DIM, device=device)

    def step(keys, values, k, slots):
        cache = tkv.KVCache(k, k[..., :16])
        tkv.write_kv(keys, values, cache, slots)
        return cache.k.sum()

    x = Inputs(device)
    torch.compile(step, fullgraph=True, backend="aot_eager")(x.k, x.v[..., :16], k, x.slots)
    torch.testing.assert_close(k.flatten(0, 1)[x.slots.long()], x.k, rtol=0, atol=0)


def test_eviction_compiles_whole(device):
    def step(x, lse):
        scores = tkv.key_scores(x.q, x.cache, x.table, x.lens, lse)
        dense = tkv.policies.dense_scores(scores, x.table, x.lens)
        keep, keep_lens = tkv.policies.h2o(dense, x.lens, heavy=4, recent=4)
        tkv.compact_kv(x.cache, x.table, keep, keep_lens, scores=scores)
        return scores

    x, y = Inputs(device), Inputs(device)
    lse = tkv.paged_decode(x.q, x.cache, x.table, x.lens, return_lse=True)[1]
    expected = step(x, lse)
    torch.testing.assert_close(torch.compile(step, fullgraph=True, backend="aot_eager")(y, lse), expected, rtol=0, atol=0)
    torch.testing.assert_close(y.cache.k, x.cache.k, rtol=0, atol=0)


def test_export_keeps_the_operators(device):
    layer = Layer(filled("fp32", device)).to(device)
    with torch.no_grad():
        program = torch.export.export(layer, (*list(next(steps(device)))[:4], 64), strict=True)
    names = [str(node.target) for node in program.graph.nodes]
    assert any("tkv.paged_decode" in name or "tkv.write_kv" in name for name in names)


@pytest.mark.parametrize("call", ["unknown", "missing", "too many", "no cache"])
def test_a_wrong_call_says_so_in_a_trace_too(call, device):
    x = Inputs(device)
    with FakeTensorMode(), pytest.raises((TypeError, tkv.errors.DTypeError)):
        if call == "unknown":
            tkv.paged_decode(x.q, x.cache, x.table, x.lens, windows=3)
        elif call == "missing":
            tkv.paged_decode(x.q, x.cache, x.table)
        elif call == "too many":
            tkv.copy_pages(x.cache, x.cache, x.table, x.table, x.table)
        else:
            tkv.gather_window(x.q, x.table, x.lens, window=None)


def test_lse_is_written_where_the_caller_says(device):
    x = Inputs(device)
    lse = tkv.paged_decode(x.q, x.cache, x.table, x.lens, return_lse=True)[1]
    buffer = torch.full((3, 2 * HEADS, 2), torch.nan, device=device)
    mine = buffer[:2, :, 1]
    assert tkv.paged_decode(x.q, x.cache, x.table, x.lens, lse=mine)[1] is mine
    torch.testing.assert_close(mine, lse, rtol=0, atol=0)
    assert buffer[..., 0].isnan().all() and buffer[2].isnan().all()
    for wrong in (lse.double(), lse[:1], lse[:, :1].expand(-1, 2 * HEADS)):
        with pytest.raises(tkv.errors.TkvError, match="lse: "):
            tkv.paged_decode(x.q, x.cache, x.table, x.lens, lse=wrong)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bf16", "fp8_e4m3/token_head"])
def test_a_captured_graph_serves_other_lengths(kind, device):
    """One capture, replayed with the numbers of later steps in the same tensors."""
    caches = [filled(kind, device) for _ in range(2)]
    eager, layer = (Layer(cache).to(device, torch.bfloat16) for cache in caches)
    fixed = [tensor.clone() for tensor in next(steps(device))[:4]]
    fixed[0] = fixed[0].bfloat16()
    with torch.no_grad():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            layer(*fixed, 32)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer(*fixed, 32)
        for x, *batch, _ in steps(device, 4):
            for buffer, tensor in zip(fixed, (x.bfloat16(), *batch)):
                buffer.copy_(tensor)
            graph.replay()
            expected = eager(*fixed, 32)
            torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
