"""What tkv computes, in plain PyTorch and float64: written to be read, and what the tests believe.

Every function takes the arguments of the op of the same name. Cached numbers are decoded here independently of the kernels.
"""

from tkv.reference.attention import attention, look, merge_states, paged_decode, prefix_prefill, visible
from tkv.reference.eviction import compact_kv, rotate_keys
from tkv.reference.rope import rotate
from tkv.reference.scores import key_scores
from tkv.reference.storage import LARGEST, dequantize, encode, gather, gather_window, quantize_pages, scales_of, write_kv

__all__ = [
    "LARGEST",
    "attention",
    "compact_kv",
    "dequantize",
    "encode",
    "gather",
    "gather_window",
    "key_scores",
    "look",
    "merge_states",
    "paged_decode",
    "prefix_prefill",
    "quantize_pages",
    "rotate",
    "rotate_keys",
    "scales_of",
    "visible",
    "write_kv",
]
