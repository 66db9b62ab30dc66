"""The host side of a paged cache: which page belongs to whom. Pages and tokens; and attention over sequences that it keeps in two parts."""

from tkv.ops.kivi import kivi_decode, kivi_prefill
from tkv.pages.batch import Batch, BatchTensors, CacheStats, TailBatch, TailBatchTensors
from tkv.pages.eviction import Eviction, EvictionTensors
from tkv.pages.manager import CacheManager
from tkv.pages.pool import PagePool

__all__ = [
    "Batch",
    "BatchTensors",
    "CacheManager",
    "CacheStats",
    "Eviction",
    "EvictionTensors",
    "PagePool",
    "TailBatch",
    "TailBatchTensors",
    "kivi_decode",
    "kivi_prefill",
]
