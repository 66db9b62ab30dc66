"""Caches as engines lay them out, full of poison, and the keys that a test puts into them."""

import torch

import tkv
from tkv import reference
from tkv.formats import parse_pair, supported_formats

# One of each way to store and to scale; the tests of what does not depend on the format go through these.
FORMATS = ("fp32", "fp16", "bf16", "fp8_e4m3/tensor", "fp8_e4m3/token_head", "int8/token_head")
# The others, pairs where one side needs a partner, or gains by one.
MORE_FORMATS = (
    *(kind for kind in supported_formats() if kind not in FORMATS and "page_channel" not in kind),
    ("int4/page_channel", "int4/group32"),
    ("int8/page_channel", "int8/token_head"),
    ("bf16", "int8/token_head"),
    ("int4/token_head", "fp8_e5m2/tensor"),
    ("int8/group32", "fp32"),
)
LAYOUTS = ("nhd", "hnd", "mixed", "interleaved", "layers", "wide", "inline")


def fits(kind, head_dim, page_size):
    """Whether a format or a pair can hold such heads in such pages."""
    try:
        for form in parse_pair(kind):
            form.check_geometry("head_dim", head_dim, page_size)
    except tkv.errors.UnsupportedError:
        return False
    return True


def kind_id(kind):
    """A name for a format or a pair."""
    return kind if isinstance(kind, str) else "+".join(kind)


def q_dtypes(kind):
    """The dtypes of q that a format or a pair takes, its own first."""
    native = [form.torch_dtype for form in parse_pair(kind) if form.is_native]
    if not native:
        return torch.float32, torch.float16, torch.bfloat16
    return tuple(dict.fromkeys((native[0], torch.float32)))


def static_scale(form, heads, dim, base):
    """A static scale of a format, other for each head and channel, or None where there is none."""
    if not form.is_static or isinstance(base, torch.Tensor):
        return base if form.is_static else None
    base = torch.tensor(float({"int8": 0.03}.get(form.dtype, 0.5) if base is None else base))
    if form.scale == "tensor":
        return base
    by_head = base * (1 + torch.arange(heads) * 0.375)
    return by_head if form.scale == "head" else by_head[:, None] * 2.0 ** (torch.arange(dim) % 5 - 2)


def poison_(tensor):
    """Fill with what would spoil a result: NaN, the NaN codes of fp8, -128, huge integers."""
    if tensor.dtype == torch.float8_e4m3fn:
        codes = tensor.view(torch.uint8)
        codes.fill_(0x7F)
        codes[..., 1::2].fill_(0xFF)
    elif tensor.dtype.is_floating_point:
        tensor.fill_(torch.nan)
    elif tensor.dtype == torch.bool:
        tensor.fill_(True)
    elif tensor.element_size() == 1:
        tensor.fill_(0x80 if tensor.dtype == torch.uint8 else -128)
    else:
        tensor.fill_(0x7F7F7F7F if tensor.element_size() >= 4 else 0x7F7F)
    return tensor


def bits(tensor):
    """A copy of a tensor's bytes, for comparisons in which NaN equals itself."""
    return torch.cat([tensor.reshape(-1)]).view(torch.uint8)


def data_buffer(layout, shape, dtype, side):
    """A poisoned tensor for K (side 0) or V (side 1), [pages, page_size, heads, dim]."""
    pages, page_size, heads, dim = shape
    if layout == "hnd" or (layout == "mixed" and side):
        return poison_(torch.empty(pages, heads, page_size, dim, dtype=dtype)).transpose(1, 2)
    if layout == "wide":
        return poison_(torch.empty(pages, page_size, heads, dim + 24, dtype=dtype))[..., 8 : 8 + dim]
    return poison_(torch.empty(shape, dtype=dtype))


def shared_buffers(layout, shape, dtype):
    """Poisoned tensors for K and V in one buffer."""
    pages, page_size, heads, dim = shape
    if layout == "interleaved":
        return poison_(torch.empty(pages, 2, page_size, heads, dim, dtype=dtype)).unbind(1)
    return poison_(torch.empty(2, pages, 3, page_size, heads, dim, dtype=dtype))[:, :, 1].unbind(0)


def scale_buffer(layout, shape, dtype, by_page):
    """A poisoned tensor of scales, [pages, page_size, heads, ...] or [pages, heads, ...], with strides of its own."""
    if by_page:
        return poison_(torch.empty(shape[0], shape[1] + 1, *shape[2:], dtype=dtype))[:, 1:]
    pages, page_size, heads, *inner = shape
    if layout in ("hnd", "mixed"):
        return poison_(torch.empty(pages, heads, page_size, *inner, dtype=dtype)).transpose(1, 2)
    if layout == "nhd":
        return poison_(torch.empty(shape, dtype=dtype))
    return poison_(torch.empty(pages, page_size, heads, 3, *inner, dtype=dtype))[:, :, :, 1]


def inline_buffers(form, shape, scale_shape):
    """Numbers and scales of one side, each row's scales behind its numbers."""
    *rows, dim = shape
    inner = scale_shape[3:]
    width = form.torch_dtype.itemsize * dim
    behind = -(-torch.Size(inner).numel() * form.scale_dtype.itemsize // 8) * 8
    buffer = poison_(torch.empty(*rows, width + behind, dtype=torch.uint8))
    scales = buffer[..., width:].view(form.scale_dtype)
    scales.fill_(torch.nan)
    scales = scales[..., : torch.Size(inner).numel()].unflatten(-1, inner) if inner else scales[..., 0]
    return buffer[..., :width].view(form.torch_dtype), scales


def empty_cache(kind, layout, pages, page_size, heads, dim, k_scale=None, v_scale=None, device="cpu", v_dim=None):
    """A cache that holds nothing but poison. `k_scale` and `v_scale` are static scales, for the formats that have them."""
    forms, dims = parse_pair(kind), (dim, v_dim or dim)
    if layout in ("interleaved", "layers") and (forms[0].torch_dtype != forms[1].torch_dtype or dims[0] != dims[1]):
        layout = "nhd"
    shapes = [(pages, page_size, heads, form.stored_dim(d)) for form, d in zip(forms, dims)]
    data, scales = [], []
    if layout in ("interleaved", "layers"):
        data = list(shared_buffers(layout, shapes[0], forms[0].torch_dtype))
    for side, (form, shape, d, given) in enumerate(zip(forms, shapes, dims, (k_scale, v_scale))):
        scale_shape = form.scale_shape(pages, page_size, heads, d)
        if layout == "inline" and form.scale in ("token_head", "group"):
            numbers, scale = inline_buffers(form, shape, scale_shape)
        else:
            numbers = data[side] if len(data) == 2 else data_buffer("wide" if layout == "inline" else layout, shape, form.torch_dtype, side)
            scale = static_scale(form, heads, d, given)
            if form.is_dynamic:
                scale = scale_buffer(layout, scale_shape, form.scale_dtype, form.scale == "page_channel")
        if len(data) == 2 and layout in ("interleaved", "layers"):
            data[side] = numbers
        else:
            data.append(numbers)
        scales.append(scale)
    return on_device(tkv.KVCache(*data, *scales, format=forms), device)


def on_device(cache, device):
    """The cache on a device, with the strides that its tensors had."""
    if torch.device(device).type == "cpu":
        return cache
    tensors = _on([cache.k, cache.v], device)
    scales = [None if scale is None else _on([scale], device)[0] for scale in (cache.k_scale, cache.v_scale)]
    return tkv.KVCache(*tensors, *scales, format=(cache.k_format, cache.v_format))


def _on(tensors, device):
    """The tensors on a device with the strides that they had: `to` would make dense copies of views."""
    moved = []
    for tensor in tensors:
        if torch.device(device).type == "cpu":
            moved.append(tensor)
            continue
        storage = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0).to(device)
        moved.append(storage.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()))
    return moved


def encode_rows(x, form, scale):
    """(stored numbers, dynamic scales or None) of float32 rows [tokens, heads, dim]; `scale` is the static one."""
    dynamic = reference.scales_of(x, form) if form.is_dynamic else None
    return reference.encode(x, form, scale if dynamic is None else dynamic), dynamic


def store(cache, pages, seen, k, v):
    """Put those keys and values [keys, heads, dim] that are seen into the pages of a sequence."""
    keys = seen.nonzero()[:, 0]
    page, row = pages.long()[keys // cache.page_size], keys % cache.page_size
    sides = ((k, cache.k, cache.k_scale, cache.k_format), (v, cache.v, cache.v_scale, cache.v_format))
    for x, data, scales, form in sides:
        if form.scale == "page_channel":
            whole = torch.full((len(pages) * cache.page_size, *x.shape[1:]), torch.nan)
            whole[keys] = x[keys]
            whole = whole.unflatten(0, (len(pages), cache.page_size))
            of_pages = reference.scales_of(whole, form)
            used = (keys // cache.page_size).unique()
            scales[pages.long()[used]] = of_pages[used].to(scales.device)
            data[page, row] = reference.encode(whole, form, of_pages).flatten(0, 1)[keys].to(data.device)
        else:
            codes, dynamic = encode_rows(x[keys], form, None if scales is None else scales.cpu())
            data[page, row] = codes.to(data.device)
            if dynamic is not None:
                scales[page, row] = dynamic.to(scales.device)
