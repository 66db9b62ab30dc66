"""tkv: Triton kernels for the key/value cache of transformers that generate text."""

from tkv import errors, reference
from tkv.cache import KVCache
from tkv.formats import KVFormat
from tkv.ops.copy import copy_pages
from tkv.ops.decode import paged_decode
from tkv.ops.merge import merge_states
from tkv.ops.write import write_kv
from tkv.pages import CacheManager, PagePool

__version__ = "0.1.0"

__all__ = [
    "CacheManager",
    "KVCache",
    "KVFormat",
    "PagePool",
    "copy_pages",
    "errors",
    "merge_states",
    "paged_decode",
    "reference",
    "write_kv",
]
