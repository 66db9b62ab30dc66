"""Page managers and served sequences, for tests."""

from tkv.pages import CacheManager, PagePool


def manage(num_pages=32, page_size=4, **options):
    return CacheManager(PagePool(num_pages), page_size, **options)


def serve(manager, prompt, **options):
    """A sequence whose whole prompt is computed, and how much of it was found."""
    seq = manager.add(prompt, **options)
    found = manager.length(seq)
    manager.step({seq: prompt[found:]})
    return seq, found


def state(manager):
    """All that a call that raises must leave as it was."""
    index = manager._ledger.index
    sequences = [(seq, manager.pages(seq).tolist(), manager.tokens(seq).tolist()) for seq in manager.seqs]
    return sequences, manager.pool.refs.tolist(), manager.pool.num_free, index.claims.tolist(), list(index._idle), manager.stats()
