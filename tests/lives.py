"""Page managers after lives by chance, and all that they know, for tests."""

import random

from served import manage, serve
from tails import manage as manage_tails

from tkv.errors import OutOfPages, RangeError

KINDS = {
    "plain": lambda size: manage(40, size),
    "no prefixes": lambda size: manage(40, size, prefix_cache=False),
    "window": lambda size: manage(40, size, window=5, sinks=1),
    "window without sinks": lambda size: manage(40, size, window=2 * size),
    "tail": lambda size: manage_tails(40, 40, size, 3),
}


def everything(manager):
    """All that a manager knows, but for the order in which free pages are handed out."""
    parts = [manager._ledger.old, manager._ledger.tail] if manager.tail_pool else [manager._ledger]
    found = [manager.stats()]
    for part in parts:
        index = part.index
        rows = [(part.lens[row], part.gone[row], part.first[row], part.known[row]) for row in part.rows]
        ids = [part.ids_of(row).tolist() for row in part.rows.tolist()]
        chains = [part.chains[row] for row in part.rows]
        opened = {name: sorted(at) for name, at in part._open.items()}
        free = sorted(index.pool._free[: index.pool.num_free].tolist())
        found += [part.names, part.table.tolist(), rows, ids, chains, opened, index.pool.refs.tolist(), free, index.claims.tolist()]
        found += [list(index._idle), index._page_of, index._parent, index._hash, index._children]
    return found


def lived(kind, size, seed):
    """A manager after a life of prompts that begin alike, forks, drafts and frees, by chance: equal ones of equal seeds."""
    dice, manager = random.Random(seed), KINDS[kind](size)
    text = [dice.randrange(3) for _ in range(30)]
    for _ in range(dice.randrange(4, 30)):
        living = manager.seqs
        what = dice.randrange(6) if living else 0
        try:
            if what == 0:
                serve(manager, text[: dice.randrange(1, 30)] + [dice.randrange(3) for _ in range(dice.randrange(4))])
            elif what == 1:
                manager.fork(dice.choice(living))
            elif what == 2 and len(living) > 2:
                manager.free(dice.choice(living))
            elif what == 3 and kind == "plain":
                manager.evict(living[:1], [manager.held(living[0]) // 2])
            else:
                some = [seq for seq in living if dice.random() < 0.7]
                is_told = dice.random() < 0.8
                manager.step({seq: [dice.randrange(2)] * dice.randrange(5) for seq in some}) if is_told else manager.step(
                    some, counts=[dice.randrange(5) for _ in some]
                )
        except (OutOfPages, RangeError):
            pass
    return manager
