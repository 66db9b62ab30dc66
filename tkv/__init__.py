"""tkv: Triton kernels for the key/value cache of transformers that generate text."""

from tkv import errors, policies, reference
from tkv.cache import KVCache
from tkv.calibration import Calibrator, calibrate, load_scales, save_scales
from tkv.formats import KVFormat
from tkv.levels import SharedLevel, find_shared_levels
from tkv.ops.cascade import shared_prefix_decode
from tkv.ops.compact import compact_kv
from tkv.ops.copy import copy_pages
from tkv.ops.decode import paged_decode
from tkv.ops.gather import gather_window
from tkv.ops.merge import merge_states
from tkv.ops.prefill import prefix_prefill
from tkv.ops.quantize import quantize_pages
from tkv.ops.rotate import rotate_keys
from tkv.ops.scores import key_scores
from tkv.ops.write import write_kv
from tkv.pages import CacheManager, PagePool
from tkv.rope import Rope

__version__ = "0.1.0"

__all__ = [
    "CacheManager",
    "Calibrator",
    "KVCache",
    "KVFormat",
    "PagePool",
    "Rope",
    "SharedLevel",
    "calibrate",
    "compact_kv",
    "copy_pages",
    "errors",
    "find_shared_levels",
    "gather_window",
    "key_scores",
    "load_scales",
    "merge_states",
    "paged_decode",
    "policies",
    "prefix_prefill",
    "quantize_pages",
    "reference",
    "rotate_keys",
    "save_scales",
    "shared_prefix_decode",
    "write_kv",
]
