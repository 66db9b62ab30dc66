"""CacheManager against a model that keeps keys and values: after any calls in any order, every sequence reads back its own past."""

import itertools

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test
from problems import effort

from tkv.errors import OutOfPages
from tkv.pages import CacheManager, PagePool
from tkv.pages.prefix import root_hash

# Texts that part at different places, so that prompts agree in part more often than by chance.
TEXTS = [[0, 1, 0, 0, 2, 1, *end] for end in ([1, 0, 2, 2, 0, 1, 0], [1, 0, 2, 2, 1, 1, 1], [2, 1, 0, 0, 1, 1, 2])] + [[0, 2, 1] * 4]
some = st.lists(st.integers(0, 2), max_size=3)
prompts = st.builds(lambda text, length, end: text[:length] + end, st.sampled_from(TEXTS), st.integers(0, 13), some)
keys = st.sampled_from([None] * 9 + ["", 0, (None,)])
ROOTS = {root_hash(key) for key in (None, "", 0, (None,))}
which = st.integers(0, 255)


class Injected(Exception):
    """What a broken pool raises."""


class BreakablePool(PagePool):
    """A pool whose `allocate` can be told to fail."""

    broken = False

    def allocate(self, count=1):
        if self.broken:
            raise Injected
        return super().allocate(count)


class Past:
    """What the model knows of a sequence: its tokens, for whom they are, and how many of their ids the manager has been told."""

    def __init__(self, prompt, key, tokens, known, findable):
        self.prompt, self.key, self.tokens, self.known, self.findable = prompt, key, list(tokens), known, findable

    def kv(self, position):
        """K and V of a token: they depend on it, its position and all before it."""
        return (self.key, *self.tokens[: position + 1])


class Machine(RuleBasedStateMachine):
    """`slots` holds keys and values as an engine's cache would: it changes by the copies and writes of steps, and in no other way."""

    seqs = Bundle("seqs")

    @initialize(
        num_pages=st.integers(1, 24), page_size=st.integers(1, 4), prefix_cache=st.sampled_from([True] * 9 + [False]),
        partial=st.sampled_from([1, 1, 1, 2, None]),
    )  # fmt: skip
    def start(self, num_pages, page_size, prefix_cache, partial):
        self.pool = BreakablePool(num_pages)
        self.manager = CacheManager(self.pool, page_size, prefix_cache=prefix_cache, partial_tokens=partial)
        self.size, self.partial, self.prefix_cache = page_size, partial, prefix_cache
        self.slots = [[None] * page_size for _ in range(num_pages)]
        self.past: dict[int, Past] = {}
        self.gone: dict[int, Past] = {}
        self.asked = self.saved = self.prompts = 0

    @rule(target=seqs, prompt=prompts, key=keys)
    def add(self, prompt, key):
        found = self.manager.match(prompt, extra_keys=key)
        seq = self.manager.add(prompt, extra_keys=key)
        length = self.manager.length(seq)
        assert length == found <= max(0, len(prompt) - 1)
        assert length == self.longest_match(prompt, key)
        self.past[seq] = Past(prompt, key, prompt[:length], length, self.prefix_cache)
        self.asked, self.saved, self.prompts = self.asked + len(prompt), self.saved + length, self.prompts + 1
        return seq

    @rule(target=seqs, prompt=prompts, key=keys)
    def serve(self, prompt, key):
        """A prompt as engines take it: found as far as possible, the rest computed at once, others preempted for it."""
        seq = self.add(prompt, key)
        while not self.step_with({seq: prompt[self.manager.length(seq) :]}):
            if len(self.past) == 1:
                # Alone, a sequence needs no more pages than its tokens fill, whatever it was matched with.
                assert -(-len(prompt) // self.size) > self.pool.num_pages
                break
            self.let_go(next(iter(self.past)))
        return seq

    @rule(target=seqs, other=seqs, length=st.integers(0, 20), end=some)
    def serve_like(self, other, length, end):
        """A prompt that begins as a sequence of now or before."""
        past = self.past.get(other) or self.gone[other]
        return self.serve(past.tokens[:length] + end, past.key)

    @precondition(lambda self: self.past)
    @rule(target=seqs, choice=which)
    def fork(self, choice):
        seq = self.pick(choice)
        twin, past = self.manager.fork(seq), self.past[seq]
        self.past[twin] = Past(past.prompt, past.key, past.tokens, past.known, past.findable)
        return twin

    @precondition(lambda self: self.past)
    @rule(choice=which)
    def free(self, choice):
        self.let_go(self.pick(choice))

    @precondition(lambda self: self.past)
    @rule(choice=which, cut=st.integers(0, 9), more=some)
    def truncate(self, choice, cut, more):
        """Drafts are rejected, and others follow."""
        seq = self.pick(choice)
        past = self.past[seq]
        length = max(0, len(past.tokens) - cut)
        self.manager.truncate(seq, length)
        del past.tokens[length:]
        past.known = min(past.known, length)
        self.step_with({seq: more}, told=past.known == length)

    @precondition(lambda self: any(past.known < len(past.tokens) for past in self.past.values()))
    @rule(choice=which, leave=st.sampled_from([0, 0, 0, 1, 3]))
    def identify(self, choice, leave):
        late = [seq for seq, past in self.past.items() if past.known < len(past.tokens)]
        seq = late[choice % len(late)]
        past = self.past[seq]
        count = max(0, len(past.tokens) - past.known - leave)
        self.manager.identify(seq, past.tokens[past.known : past.known + count])
        past.known += count

    @precondition(lambda self: self.past)
    @rule(more=some, told=st.sampled_from([True] * 5 + [False]), broken=st.sampled_from([False] * 5 + [True]), chosen=which)
    def step(self, more, told, broken, chosen):
        """Chunks of prompts that are not computed yet, and `more` for the others of a batch."""
        new = {}
        for i, (seq, past) in enumerate(self.past.items()):
            if chosen >> i % 8 & 1:
                rest = past.prompt[len(past.tokens) :] if past.tokens == past.prompt[: len(past.tokens)] else []
                new[seq] = [] if told and past.known < len(past.tokens) else rest[: 2 * self.size] or more
        self.step_with(new, told, broken)

    @precondition(lambda self: self.past)
    @rule(token=st.integers(0, 2))
    def decode(self, token):
        """A token more for each sequence, as many of them as there is room for."""
        while True:
            new = {seq: [token] for seq, past in self.past.items() if past.known == len(past.tokens)}
            if self.step_with(new):
                break
            self.let_go(next(iter(new)))

    def step_with(self, new, told=True, broken=False):
        before = self.snapshot()
        grown, forced = self.pages_needed(new)
        room, claims = self.manager.num_available - grown - forced, self.index.claims.copy()
        tails = {seq: int(self.manager.pages(seq)[-1]) if self.manager.length(seq) else None for seq in new}
        self.pool.broken = broken
        try:
            if told:
                batch = self.manager.step(new)
            else:
                batch = self.manager.step(list(new), counts=[len(more) for more in new.values()])
        except OutOfPages:
            assert room < 0 and self.snapshot() == before
            return False
        except Injected:
            assert room >= 0 and self.snapshot()[0] == before[0] and self.manager.num_available == before[-1]
            return False
        finally:
            self.pool.broken = False
        assert room >= 0
        # What the index has of a page that goes on differently is given up only where there is no room for a copy.
        given_up = []
        for row, (seq, more) in zip(batch.page_table, new.items()):
            first, offset = divmod(len(self.past[seq].tokens), self.size)
            if more and offset and claims[tails[seq]] > offset and tails[seq] == row[first]:
                given_up.append(seq)
        assert not given_up or room == len(batch.copies) - forced
        self.run(batch, new, told)
        return True

    @rule(choice=which)
    def clear(self, choice):
        if choice > 40:
            return
        self.manager.clear()
        assert self.manager.stats().pages_cached == 0
        for past in self.past.values():
            past.findable = False

    def run(self, batch, new, told):
        """What an engine does with a batch, and whether it is told the right thing."""
        size, others = self.size, {page for seq in self.past if seq not in new for page in self.manager.pages(seq).tolist()}
        targets = [target for _, target in batch.copies.tolist()]
        assert len(set(targets)) == len(targets) and not set(targets) & {source for source, _ in batch.copies.tolist()}
        for (source, target), count in zip(batch.copies.tolist(), batch.copy_lens.tolist()):
            assert 0 < count < size and None not in self.slots[source][:count]
            self.slots[target] = self.slots[source][:count] + ["stale"] * (size - count)

        assert batch.seqs.tolist() == list(new) and batch.page_table.shape[0] == len(new) == len(batch.cu_seqlens) - 1
        written, filled = [], []
        for i, (seq, more) in enumerate(new.items()):
            past = self.past[seq]
            first, count = len(past.tokens), len(more)
            past.tokens += more
            past.known += count if told else 0
            begin, end = batch.cu_seqlens[i : i + 2]
            assert (batch.prefix_lens[i], batch.seq_lens[i], end - begin) == (first, first + count, count)
            row = batch.page_table[i].tolist()
            assert -1 not in row[: -(-len(past.tokens) // size)] and set(row[-(-len(past.tokens) // size) :]) <= {-1}
            owners = others | {page for j in range(len(new)) if j != i for page in batch.page_table[j].tolist()}
            assert batch.positions[begin:end].tolist() == list(range(first, first + count))
            for position, slot in zip(range(first, first + count), batch.slot_mapping[begin:end].tolist()):
                page, offset = divmod(slot, size)
                assert page == row[position // size] and offset == position % size and page not in owners
                self.slots[page][offset] = past.kv(position)
                written.append(slot)
                filled += [page] * (offset == size - 1)
            assert self.read(past, row) == [past.kv(position) for position in range(len(past.tokens))]
        assert len(set(written)) == len(written) and sorted(filled) == sorted(batch.filled.tolist())
        assert batch.max_q_len == max(map(len, new.values()), default=0)
        assert batch.max_seq_len == max((len(self.past[seq].tokens) for seq in new), default=0)
        assert batch.page_table.shape[1] == -(-batch.max_seq_len // size)

    def let_go(self, seq):
        self.manager.free(seq)
        self.gone[seq] = self.past.pop(seq)

    def pick(self, choice):
        """A living sequence."""
        return list(self.past)[choice % len(self.past)]

    def read(self, past, row):
        return [self.slots[row[position // self.size]][position % self.size] for position in range(len(past.tokens))]

    def longest_match(self, prompt, key):
        """How many tokens of a prompt a chain of indexed pages, and for the last page a living sequence, has in the cache."""
        if not self.prefix_cache:
            return 0
        size, limit = self.size, max(0, len(prompt) - 1)
        claimed = [(int(claim), self.slots[page]) for page, claim in enumerate(self.index.claims) if claim]
        living = [past.tokens[: past.known] for past in self.past.values() if past.findable and past.key == key]
        whole = 0
        while whole + size <= limit and any(
            claim == size and slots[-1] == (key, *prompt[: whole + size]) for claim, slots in claimed
        ):
            whole += size
        best = whole
        for part in range(whole + 1, min(whole + size - 1, limit) + 1):
            if part - whole < (self.partial or size):
                continue
            there = any(
                claim >= part - whole and slots[part - whole - 1] == (key, *prompt[:part]) for claim, slots in claimed
            )
            if there or any(tokens[:part] == prompt[:part] for tokens in living):
                best = part
        # What lives is found, whatever the index has.
        for tokens in living:
            same = next((i for i, (a, b) in enumerate(zip(tokens, prompt)) if a != b), min(len(tokens), len(prompt)))
            same = min(same, limit)
            if same % size < (self.partial or size):
                same -= same % size
            assert best >= same
        return best

    def pages_needed(self, new):
        """Pages that a step cannot do without: new ones, and copies of pages that several have, for all writers but the last."""
        size, grown, writers, owners = self.size, 0, {}, {}
        for seq in self.past:
            for page in self.manager.pages(seq).tolist():
                owners[page] = owners.get(page, 0) + 1
        for seq, more in new.items():
            length = len(self.past[seq].tokens)
            grown += -(-(length + len(more)) // size) + -length // size
            if more and length % size:
                page = int(self.manager.pages(seq)[-1])
                writers[page] = writers.get(page, 0) + 1
        return grown, sum(min(count, owners[page] - 1) for page, count in writers.items())

    def snapshot(self):
        sequences = [(seq, self.manager.pages(seq).tolist(), self.manager.tokens(seq).tolist()) for seq in self.manager.seqs]
        pages = self.pool.refs.tolist(), self.index.claims.tolist(), list(self.index._idle)
        return sequences, *pages, self.manager.stats(), self.manager.num_available

    @property
    def index(self):
        return self.manager._ledger.index

    @invariant()
    def every_sequence_reads_its_own_past(self):
        if not hasattr(self, "past"):
            return
        assert self.manager.seqs == list(self.past)
        for seq, past in self.past.items():
            assert self.manager.length(seq) == len(past.tokens)
            assert self.manager.tokens(seq).tolist() == past.tokens[: past.known] + [-1] * (len(past.tokens) - past.known)
            read = self.read(past, self.manager.pages(seq).tolist())
            assert read == [past.kv(position) for position in range(len(past.tokens))]

    @invariant()
    def every_page_has_its_owners_and_no_others(self):
        if not hasattr(self, "past"):
            return
        owners = np.zeros(self.pool.num_pages, int)
        for seq in self.past:
            pages = self.manager.pages(seq)
            assert len(set(pages.tolist())) == len(pages)
            owners[pages] += 1
        claims, refs = self.index.claims, self.pool.refs
        assert refs.tolist() == (owners + (claims > 0)).tolist()
        free = self.pool._free[: self.pool.num_free].tolist()
        assert sorted(free) == np.flatnonzero(refs == 0).tolist()
        idle = list(self.index._idle)
        assert sorted(idle) == np.flatnonzero((owners == 0) & (claims > 0)).tolist()
        # Evicted in this order, no page goes before one that follows on it.
        place = {self.index._hash[page]: i for i, page in enumerate(idle) if page in self.index._hash}
        assert all(place.get(self.index._parent[page], len(idle)) > i for i, page in enumerate(idle))
        stats = self.manager.stats()
        assert stats.pages_used == np.count_nonzero(owners) and stats.pages_shared == np.count_nonzero(owners > 1)
        assert stats.pages_used + stats.pages_cached + stats.pages_free == self.pool.num_pages
        assert (stats.prompts, stats.tokens_asked, stats.tokens_saved) == (self.prompts, self.asked, self.saved)
        fill = np.zeros(self.pool.num_pages, int)
        for seq in self.past:
            for i, page in enumerate(self.manager.pages(seq)):
                fill[page] = max(fill[page], min(self.size, self.manager.length(seq) - i * self.size))
        assert stats.waste == int((self.size - fill[owners > 0]).sum())

    @invariant()
    def the_index_promises_what_is_there(self):
        if not hasattr(self, "past"):
            return
        for page, claim in enumerate(self.index.claims.tolist()):
            held = self.slots[page][:claim]
            assert None not in held and "stale" not in held
            assert [kv[-1] for kv in held] == self.index.tokens[page, :claim].tolist()
            assert all(b[:-1] == a for a, b in itertools.pairwise(held))
            assert not claim or self.index._parent[page] in ROOTS or self.index.find(self.index._parent[page]) is not None


def test_any_order_of_calls_leaves_every_sequence_its_own_keys_and_values():
    run_state_machine_as_test(Machine, settings=settings(effort(150), stateful_step_count=50))
