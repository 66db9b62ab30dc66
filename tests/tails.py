"""Page managers with a pool for tails, for tests."""

from served import serve, state

from tkv.pages import CacheManager, PagePool


def manage(num_pages=32, num_tail=32, page_size=4, tail_len=4, **options):
    return CacheManager(PagePool(num_pages), page_size, tail_pool=PagePool(num_tail), tail_len=tail_len, **options)


def everything(manager):
    """All that a call that raises must leave as it was."""
    tails = [manager.tail_pages(seq).tolist() for seq in manager.seqs]
    free = manager.pool._free[: manager.pool.num_free].tolist(), manager.tail_pool._free[: manager.tail_pool.num_free].tolist()
    return state(manager), tails, manager.tail_pool.refs.tolist(), free


def aged(manager, prompt, **options):
    """A sequence whose prompt is computed and converted as far as it is old enough."""
    seq, found = serve(manager, prompt, **options)
    manager.step({seq: []})
    return seq, found
