"""Caches over many GPUs, on the process groups of ``torch.distributed``.

**Context parallelism**: every rank of a group holds a run of each sequence's keys, in pages of its own. `context_parallel_decode` and
`context_parallel_prefill` attend to what the rank has and join the partial results of all ranks by their LSE: one collective a call, no
host synchronisation, fixed shapes, so that CUDA graphs can capture it. :class:`Partition` says on the host which rank holds what. What
attends to a part in another way, `tkv.shared_prefix_decode`, or a quantised cache and its native tail, is joined by `merge_ranks`.

**Tensor parallelism**: every rank holds some heads. `shard_heads` gives a rank's view of a cache, `q_heads` and `kv_heads` its slices.

Both at once, where ranks of a tensor-parallel group have the same KV heads (more ranks than KV heads, MLA): these ranks hold different
runs of the keys instead of copies of all. They gather the heads of q with `gather_heads`, attend with ``scatter_heads=True``, and each
gets its own heads back.

An argument that is refused is refused before the collective: ranks that were given good ones wait for the others until the group's timeout.
Under ``TKV_CHECK=1`` ranks compare their calls before they join results, and all raise what one of them finds.
"""

from tkv.integrations.distributed.context import context_parallel_decode, context_parallel_prefill, gather_heads, merge_ranks
from tkv.integrations.distributed.heads import kv_heads, q_heads, shard_heads
from tkv.integrations.distributed.partition import Partition

__all__ = [
    "Partition",
    "context_parallel_decode",
    "context_parallel_prefill",
    "gather_heads",
    "kv_heads",
    "merge_ranks",
    "q_heads",
    "shard_heads",
]
