"""CacheManager with a window, against a model that keeps keys and values: whatever is called, every new token finds all that it sees."""

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test
from problems import effort

from tkv.errors import OutOfPages, RangeError
from tkv.pages import CacheManager, PagePool
from tkv.pages.prefix import root_hash

TEXTS = [[0, 1, 2, 1, 0], [0, 1, 2, 1, 0, 0, 1, 2, 2], [2, 1]]
some = st.lists(st.integers(0, 2), max_size=4)
prompts = st.builds(lambda text, length, end: (text * 20)[:length] + end, st.sampled_from(TEXTS), st.integers(0, 40), some)
which = st.integers(0, 255)


class Past:
    """What the model knows of a sequence: all its tokens, what their keys depend on, and which of its pages it still needs."""

    def __init__(self, prompt, tokens, known, pages):
        self.prompt, self.tokens, self.known, self.pages = prompt, [], known, pages
        self.keys = []
        self.extend(tokens)

    def extend(self, tokens):
        """A key is told by its position, its token, and all tokens before it."""
        for token in tokens:
            before = self.keys[-1][2] if self.keys else 0
            self.keys.append((len(self.tokens), token, hash((before, token))))
            self.tokens.append(token)

    def cut(self, length):
        del self.tokens[length:], self.keys[length:]
        self.known = min(self.known, length)

    def fork(self):
        return Past(self.prompt, self.tokens, self.known, list(self.pages))


class Machine(RuleBasedStateMachine):
    """`slots` holds keys as an engine's cache would: it changes by the copies and writes of steps, and in no other way."""

    seqs = Bundle("seqs")

    @initialize(
        page_size=st.sampled_from([1, 3, 3, 16]), window=st.sampled_from([1, 2, 5, 7, 16]), sinks=st.sampled_from([0, 0, 1, 4, 17]),
        rooms=st.sampled_from([1.0, 2.0, 2.5, 4.0]), chunk=st.integers(1, 9), prefix_cache=st.sampled_from([True] * 5 + [False]),
        partial=st.sampled_from([1, 1, 2, None]),
    )  # fmt: skip
    def start(self, page_size, window, sinks, rooms, chunk, prefix_cache, partial):
        self.size, self.window, self.sinks, self.chunk = page_size, window, sinks, chunk
        self.pinned = -(-sinks // page_size)
        self.pool = PagePool(int(rooms * self.bound(chunk)))
        self.partial, self.prefix_cache = partial, prefix_cache
        self.manager = CacheManager(self.pool, page_size, window=window, sinks=sinks, prefix_cache=prefix_cache, partial_tokens=partial)
        self.slots = [[None] * page_size for _ in range(self.pool.num_pages)]
        self.past: dict[int, Past] = {}

    def bound(self, new):
        return -(-(self.sinks + self.window + new - 1) // self.size) + 2

    def sees(self, position, length):
        """Whether the token at `length` sees a position."""
        return position < self.sinks or length - self.window < position <= length

    def reach(self, pages, length):
        """Those of a sequence's pages that a token at `length` or later can see, and the pinned ones; the last one may not be whole."""
        return [
            i for i in pages
            if i < self.pinned or (i + 1) * self.size > length
            or any(self.sees(p, length) for p in range(i * self.size, (i + 1) * self.size))
        ]  # fmt: skip

    @rule(target=seqs, prompt=prompts)
    def add(self, prompt):
        found, expected = self.manager.match(prompt), self.longest_match(prompt)
        seq = self.manager.add(prompt)
        assert self.manager.length(seq) == found == expected
        self.past[seq] = Past(prompt, prompt[:found], found, self.reach(range(-(-found // self.size)), found))
        assert self.manager.pages(seq).size <= self.bound(0)
        return seq

    @rule(target=seqs, prompt=prompts)
    def serve(self, prompt):
        """A prompt as engines take it: in chunks, others preempted for it."""
        seq = self.add(prompt)
        while rest := prompt[self.manager.length(seq) :]:
            # Alone, a sequence runs in as many pages as the bound says, for ever.
            if not self.step_with({seq: rest[: self.chunk]}):
                assert len(self.past) > 1
                self.let_go(next(iter(self.past)))
        return seq

    @precondition(lambda self: self.past)
    @rule(target=seqs, choice=which)
    def fork(self, choice):
        seq = self.pick(choice)
        twin = self.manager.fork(seq)
        self.past[twin] = self.past[seq].fork()
        return twin

    @precondition(lambda self: self.past)
    @rule(choice=which)
    def free(self, choice):
        self.let_go(self.pick(choice))

    @precondition(lambda self: self.past)
    @rule(choice=which, cut=st.integers(0, 9), far=st.sampled_from([False] * 4 + [True]), more=some)
    def truncate(self, choice, cut, far, more):
        """Drafts are rejected, and others follow; or all is computed anew."""
        seq = self.pick(choice)
        past = self.past[seq]
        old = len(past.tokens)
        length = min(cut, old) if far else max(0, old - cut)
        # A cut is not in the middle of what was dropped, also where a window of 1 sees nothing of it.
        needed = {i // self.size for i in range(length + 1) if self.sees(i, length) or i < self.pinned * self.size}
        if length == self.pinned * self.size:
            needed -= {length // self.size}
        if length == old or needed <= set(past.pages):
            self.manager.truncate(seq, length)
            past.cut(length)
            past.pages = [i for i in past.pages if i * self.size < length]
            self.step_with({seq: more}, told=past.known == length)
        else:
            before = self.snapshot()
            with pytest.raises(RangeError, match="left the window"):
                self.manager.truncate(seq, length)
            assert self.snapshot() == before

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
    @rule(more=st.lists(st.integers(0, 2), max_size=20), told=st.sampled_from([True] * 5 + [False]), chosen=which)
    def step(self, more, told, chosen):
        """Chunks of prompts that are not computed yet, and uneven numbers of tokens for the others of a batch."""
        new = {}
        for i, (seq, past) in enumerate(self.past.items()):
            if chosen >> i % 8 & 1:
                rest = past.prompt[len(past.tokens) :] if past.tokens == past.prompt[: len(past.tokens)] else []
                new[seq] = [] if told and past.known < len(past.tokens) else rest[: 2 * self.size] or more[: 1 + i % 4 * 7]
        self.step_with(new, told)

    @precondition(lambda self: self.past)
    @rule(token=st.integers(0, 2), times=st.integers(1, 20))
    def decode(self, token, times):
        """Tokens one at a time for each sequence, as many of them as there is room for."""
        for i in range(times):
            while True:
                new = {seq: [(token + i) % 3] for seq, past in self.past.items() if past.known == len(past.tokens)}
                if self.step_with(new):
                    break
                self.let_go(next(iter(new)))

    def step_with(self, new, told=True):
        before = self.snapshot()
        room = self.room(new)
        try:
            if told:
                batch = self.manager.step(new)
            else:
                batch = self.manager.step(list(new), counts=[len(more) for more in new.values()])
        except OutOfPages:
            assert room < 0 and self.snapshot() == before
            return False
        assert room >= 0
        self.run(batch, new, told)
        return True

    def room(self, new):
        """Pages to be had, with those that the step drops, less those that it cannot do without."""
        grown, dropped, owners, writers = 0, set(), {}, {}
        for seq, past in self.past.items():
            pages, length = self.manager.pages(seq).tolist(), len(past.tokens)
            kept = self.reach(past.pages, length) if seq in new else past.pages
            for i, page in zip(past.pages, pages):
                if i in kept:
                    owners[page] = owners.get(page, 0) + 1
                else:
                    dropped.add(page)
            if seq in new:
                grown += -(-(length + len(new[seq])) // self.size) + -length // self.size
                if new[seq] and length % self.size:
                    writers[pages[-1]] = writers.get(pages[-1], 0) + 1
        forced = sum(min(count, owners[page] - 1) for page, count in writers.items())
        return self.manager.num_available + len(dropped - set(owners)) - grown - forced

    def run(self, batch, new, told):
        """What an engine does with a batch, and whether it is told the right thing."""
        size, pinned = self.size, self.pinned * self.size
        others = {page for seq in self.past if seq not in new for page in self.manager.pages(seq).tolist()}
        targets = [target for _, target in batch.copies.tolist()]
        assert len(set(targets)) == len(targets) and not set(targets) & {source for source, _ in batch.copies.tolist()}
        for (source, target), count in zip(batch.copies.tolist(), batch.copy_lens.tolist()):
            assert 0 < count < size and None not in self.slots[source][:count]
            self.slots[target] = self.slots[source][:count] + ["stale"] * (size - count)
        assert batch.pinned == pinned and batch.seqs.tolist() == list(new)
        for i, (seq, more) in enumerate(new.items()):
            past, (begin, end) = self.past[seq], batch.cu_seqlens[i : i + 2]
            first = len(past.tokens)
            last = first + len(more)
            past.pages = self.reach(past.pages, first) + list(range(-(-first // size), -(-last // size)))
            past.extend(more)
            past.known += len(more) if told else 0
            row = [page for page in batch.page_table[i].tolist() if page >= 0]
            assert len(row) == len(past.pages) <= self.bound(len(more)) and batch.page_table[i, : len(row)].tolist() == row
            owners = others | {page for j in range(len(new)) if j != i for page in batch.page_table[j].tolist()}
            assert batch.positions[begin:end].tolist() == list(range(first, last))
            for position, slot in zip(range(first, last), batch.slot_mapping[begin:end].tolist()):
                assert slot // size == row[past.pages.index(position // size)] not in owners
                self.slots[slot // size][slot % size] = past.keys[position]
        for i, seq in enumerate(new):
            past, start, row = self.past[seq], int(batch.kv_start[i]), batch.page_table[i].tolist()
            logical = range(batch.seq_lens[i])
            positions = [j if j < pinned else j + start for j in logical]
            assert [self.slots[row[j // size]][j % size] for j in logical] == [past.keys[p] for p in positions]
            first, last = batch.positions[batch.cu_seqlens[i]] if new[seq] else len(past.tokens), len(past.tokens)
            assert {p for at in range(first, last) for p in range(at + 1) if self.sees(p, at)} <= set(positions)
            assert batch.seq_lens[i] - batch.prefix_lens[i] == len(new[seq])
        assert batch.max_seq_len == max(batch.seq_lens, default=0)

    def let_go(self, seq):
        self.manager.free(seq)
        del self.past[seq]

    def pick(self, choice):
        """A living sequence."""
        return list(self.past)[choice % len(self.past)]

    def longest_match(self, prompt):
        """How many tokens of a prompt are in indexed pages, and for the last page in a living sequence that goes on there."""
        if not self.prefix_cache:
            return 0
        keys, size, limit = Past([], prompt, 0, []).keys, self.size, max(0, len(prompt) - 1)
        claimed = [(int(claim), self.slots[page]) for page, claim in enumerate(self.index.claims) if claim]
        whole = 0
        while whole + size <= limit and any(claim == size and slots[-1] == keys[whole + size - 1] for claim, slots in claimed):
            whole += size
        living = [
            past for seq, past in self.past.items()
            if self.ledger.chains[self.ledger.row(seq)] is not None and past.known // size * size == whole
        ]  # fmt: skip
        best = whole
        for part in range(whole + (self.partial or size), min(whole + size - 1, limit) + 1):
            there = any(claim >= part - whole and slots[part - whole - 1] == keys[part - 1] for claim, slots in claimed)
            if there or any(past.known >= part and past.keys[part - 1] == keys[part - 1] for past in living):
                best = part
        return best

    def snapshot(self):
        ledger = self.ledger
        rows = ledger.rows
        sequences = [(seq, self.manager.pages(seq).tolist(), self.manager.tokens(seq).tolist()) for seq in self.manager.seqs]
        numbers = [array[rows].tolist() for array in (ledger.lens, ledger.gone, ledger.first, ledger.known)]
        chains = [ledger.chains[row] and list(ledger.chains[row]) for row in rows]
        return sequences, numbers, chains, self.pool.refs.tolist(), self.index.claims.tolist(), list(self.index._idle), self.manager.stats()

    @property
    def ledger(self):
        return self.manager._ledger

    @property
    def index(self):
        return self.ledger.index

    @invariant()
    def every_sequence_has_its_own_past(self):
        for seq, past in getattr(self, "past", {}).items():
            positions = [p for i in past.pages for p in range(i * self.size, (i + 1) * self.size) if p < len(past.tokens)]
            pages = self.manager.pages(seq).tolist()
            assert (self.manager.length(seq), self.manager.held(seq), len(pages)) == (len(past.tokens), len(positions), len(past.pages))
            assert [key for page in pages for key in self.slots[page]][: len(positions)] == [past.keys[p] for p in positions]
            assert self.manager.tokens(seq).tolist() == [past.tokens[p] if p < past.known else -1 for p in positions]

    @invariant()
    def every_page_has_its_owners_and_no_others(self):
        if not hasattr(self, "past"):
            return
        owners = np.zeros(self.pool.num_pages, int)
        for seq in self.past:
            owners[self.manager.pages(seq)] += 1
        claims, refs = self.index.claims, self.pool.refs
        assert refs.tolist() == (owners + (claims > 0)).tolist()
        assert sorted(self.pool._free[: self.pool.num_free].tolist()) == np.flatnonzero(refs == 0).tolist()
        assert sorted(self.index._idle) == np.flatnonzero((owners == 0) & (claims > 0)).tolist()

    @invariant()
    def the_index_promises_what_is_there(self):
        if not hasattr(self, "past"):
            return
        for page, claim in enumerate(self.index.claims.tolist()):
            if not claim:
                continue
            held, parent = self.slots[page][:claim], self.index._parent[page]
            before = (-1, None, 0) if parent == root_hash(None) else self.slots[self.index.find(parent)][-1]
            for position, (key, token) in enumerate(zip(held, self.index.tokens[page].tolist()), before[0] + 1):
                assert key == (position, token, hash((before[2], token)))
                before = key

    def teardown(self):
        for seq in list(getattr(self, "past", ())):
            self.let_go(seq)
        if hasattr(self, "past"):
            self.manager.clear()
            assert self.pool.num_free == self.pool.num_pages


def test_any_order_of_calls_leaves_every_new_token_what_it_sees():
    run_state_machine_as_test(Machine, settings=effort(120))
