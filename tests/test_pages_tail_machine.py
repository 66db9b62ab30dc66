"""CacheManager with tails against a model that keeps keys and values in two caches, as they were written and as they were converted."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule, run_state_machine_as_test
from problems import effort
from test_pages_machine import ROOTS, BreakablePool, Injected, Machine, keys, prompts, some, which

from tkv.errors import OutOfPages, RangeError
from tkv.pages import CacheManager


class TailMachine(Machine):
    """`slots` is the cache of whole pages, which only conversions change; `tail` changes by the copies and writes of steps alone."""

    seqs = Machine.seqs

    @initialize(
        num_pages=st.integers(1, 20), num_tail=st.integers(4, 20), page_size=st.integers(1, 4), tail_len=st.integers(1, 5),
        prefix_cache=st.sampled_from([True] * 9 + [False]), partial=st.sampled_from([1, 2, None]),
    )  # fmt: skip
    def start(self, num_pages, num_tail, page_size, tail_len, prefix_cache, partial):
        super().start(num_pages, page_size, prefix_cache, partial)
        self.tail_pool, self.tail_len = BreakablePool(num_tail), tail_len
        self.manager = CacheManager(
            self.pool, page_size, tail_pool=self.tail_pool, tail_len=tail_len, prefix_cache=prefix_cache, partial_tokens=partial
        )
        self.tail = [[None] * page_size for _ in range(num_tail)]

    @rule(target=seqs, prompt=prompts, key=keys, chunk=st.integers(1, 14))
    def serve(self, prompt, key, chunk=14):
        """A prompt as engines take it, in chunks, others preempted for it."""
        seq = self.add(prompt, key)
        while self.manager.length(seq) < len(prompt):
            length = self.manager.length(seq)
            if self.step_with({seq: prompt[length : length + chunk]}):
                continue
            if len(self.past) == 1:
                # Alone, a sequence needs room for its chunk, its newest tokens and a page, and for the pages before them.
                most = -(-min(len(prompt), self.tail_len + 2 * self.size - 2 + chunk) // self.size)
                assert most > self.tail_pool.num_pages or -(-len(prompt) // self.size) > self.pool.num_pages
                break
            self.let_go(next(iter(self.past)))
        return seq

    @precondition(lambda self: self.past)
    @rule(choice=which, cut=st.integers(0, 13), more=some)
    def truncate(self, choice, cut, more):
        """Drafts are rejected, and others follow; or whole pages are dropped."""
        seq = self.pick(choice)
        past, old = self.past[seq], self.cut(seq)
        length = max(0, len(past.tokens) - cut)
        if length < old and length % self.size:
            before = self.snapshot()
            with pytest.raises(RangeError, match="cannot be written on"):
                self.manager.truncate(seq, length)
            assert self.snapshot() == before
            length -= length % self.size
        self.manager.truncate(seq, length)
        assert self.cut(seq) == min(old, length)
        del past.tokens[length:]
        past.known = min(past.known, length)
        self.step_with({seq: more}, told=past.known == length)

    @precondition(lambda self: self.past)
    @rule(more=st.lists(st.integers(0, 2), min_size=1, max_size=5), choice=which)
    def sample(self, more, choice):
        """Tokens whose ids come later, for a sequence and its forks."""
        first = self.past[self.pick(choice)].tokens
        while not self.step_with({seq: more for seq, past in self.past.items() if past.tokens == first}, told=False):
            self.let_go(next(iter(self.past)))

    @precondition(lambda self: self.past)
    @rule(target=seqs, choice=which, told=st.booleans())
    def branch(self, choice, told):
        """A sequence goes on in two ways."""
        seq = self.pick(choice)
        twin = self.fork(choice)
        told &= self.past[seq].known == len(self.past[seq].tokens)
        self.step_with({seq: [0], twin: [1]}, told)
        return twin

    def step_with(self, new, told=True, broken=False):
        before, cuts = self.snapshot(), {seq: self.cut(seq) for seq in new}
        due, made, missing, tail_missing = self.needed(new)
        # One pool or the other, which does not matter for what has to be the same.
        (self.pool if len(new) % 2 else self.tail_pool).broken = broken
        try:
            if told:
                batch = self.manager.step(new)
            else:
                batch = self.manager.step(list(new), counts=[len(more) for more in new.values()])
        except OutOfPages as error:
            assert (missing > 0 and str(error).startswith("pool")) or (tail_missing > 0 and str(error).startswith("tail_pool"))
            assert self.snapshot() == before
            return False
        except Injected:
            assert max(missing, tail_missing) <= 0 and self.snapshot()[:2] == before[:2]
            assert self.manager.num_available == before[-1]
            return False
        finally:
            self.pool.broken = self.tail_pool.broken = False
        assert max(missing, tail_missing) <= 0 and len(batch.conversions) == made
        for i, seq in enumerate(new):
            assert batch.seq_lens[i] == cuts[seq] + due[seq] * self.size
        self.run(batch, new, told)
        return True

    def run(self, batch, new, told):
        """What an engine does with a batch, in the order that is documented."""
        size = self.size
        sources, targets = batch.conversions.T.tolist()
        assert len(set(sources)) == len(sources) and len(set(targets)) == len(targets)
        assert not set(targets) & {page for seq in self.past if seq not in new for page in self.manager.pages(seq).tolist()}
        for source, target in zip(sources, targets):
            assert None not in self.tail[source] and "stale" not in self.tail[source]
            self.slots[target] = [("converted", kv) for kv in self.tail[source]]

        others = {page for seq in self.past if seq not in new for page in self.manager.tail_pages(seq).tolist()}
        copied = [target for _, target in batch.copies.tolist()]
        assert len(set(copied)) == len(copied) and not set(copied) & {source for source, _ in batch.copies.tolist()}
        for (source, target), count in zip(batch.copies.tolist(), batch.copy_lens.tolist()):
            assert 0 < count < size and None not in self.tail[source][:count]
            self.tail[target] = self.tail[source][:count] + ["stale"] * (size - count)

        written, filled, named = [], [], {}
        for i, (seq, more) in enumerate(new.items()):
            past = self.past[seq]
            first, count, cut = len(past.tokens), len(more), int(batch.seq_lens[i])
            past.tokens += more
            past.known += count if told else 0
            begin, end = batch.cu_seqlens[i : i + 2]
            assert (batch.prefix_lens[i], batch.tail_lens[i], end - begin) == (first, first + count - cut, count)
            row, tail_row = batch.page_table[i].tolist(), batch.tail_page_table[i].tolist()
            assert cut % size == 0 and -1 not in row[: cut // size] and set(row[cut // size :]) <= {-1}
            used = -(-(first + count - cut) // size)
            assert -1 not in tail_row[:used] and set(tail_row[used:]) <= {-1}
            owners = others | {page for j in range(len(new)) if j != i for page in batch.tail_page_table[j].tolist()}
            assert batch.positions[begin:end].tolist() == list(range(first, first + count))
            for position, slot in zip(range(first, first + count), batch.slot_mapping[begin:end].tolist()):
                page, offset = divmod(slot, size)
                assert page == tail_row[(position - cut) // size] and offset == position % size and page not in owners
                self.tail[page][offset] = past.kv(position)
                written.append(slot)
                filled += [page] * (offset == size - 1)
            # Attention reads the tables as they were handed out.
            assert self.read_parts(past, row, tail_row, cut) == [past.kv(position) for position in range(len(past.tokens))]
            if past.findable:
                # What has the same tokens and the same history is in one page.
                for at in range(0, min(cut, past.known) - size + 1, size):
                    assert named.setdefault(past.kv(at + size - 1), row[at // size]) == row[at // size]
        assert len(set(written)) == len(written) and sorted(filled) == sorted(batch.filled.tolist())
        assert batch.seqs.tolist() == list(new) and batch.kv_start is batch.seq_lens
        assert batch.max_q_len == max(map(len, new.values()), default=0)
        assert batch.max_seq_len == max(batch.seq_lens, default=0) and batch.page_table.shape == (len(new), batch.max_seq_len // size)
        assert batch.max_tail_len == max(batch.tail_lens, default=0)
        assert batch.tail_page_table.shape == (len(new), -(-batch.max_tail_len // size))

    def needed(self, new):
        """How many pages of each sequence leave its tail in a step, how many are converted, and how many either pool lacks for the step."""
        size, due, made, adopted, chosen = self.size, {}, 0, set(), set()
        leaving, grown, writers, owners = {}, 0, {}, {}
        for seq in self.past:
            for page in self.manager.tail_pages(seq).tolist():
                owners[page] = owners.get(page, 0) + 1
        held = {slots[-1]: page for page, slots in enumerate(self.slots) if self.index.claims[page]}
        for seq, more in new.items():
            past, cut, pages = self.past[seq], self.cut(seq), self.manager.tail_pages(seq).tolist()
            length = len(past.tokens)
            # The first new token sees `tail_len` keys that are not converted, itself included.
            due[seq] = max(0, (length + bool(more) - self.tail_len) // size - cut // size)
            for i, page in enumerate(pages[: due[seq]]):
                leaving[page] = leaving.get(page, 0) + 1
                end = cut + (i + 1) * size
                name = past.kv(end - 1) if past.findable and end <= past.known else None
                if page not in chosen and name not in chosen:
                    if ("converted", name) in held:
                        adopted.add(held[("converted", name)])
                    else:
                        made += 1
                chosen |= {page} if name is None else {page, name}
            grown += -(-(length + len(more) - cut) // size) + -(length - cut) // size
            if more and length % size:
                writers[pages[-1]] = writers.get(pages[-1], 0) + 1
        idle = sum(page in self.index._idle for page in adopted)
        spare = sum(owners[page] == count for page, count in leaving.items())
        copies = sum(min(count, owners[page] - 1) for page, count in writers.items())
        return due, made, made - (self.manager.num_available - idle), grown + copies - spare - self.tail_pool.num_free

    def cut(self, seq):
        return self.manager.pages(seq).size * self.size

    def read_parts(self, past, row, tail_row, cut):
        size = self.size
        old = [self.slots[row[position // size]][position % size] for position in range(cut)]
        assert all(tag == "converted" for tag, _ in old)
        new = [self.tail[tail_row[position // size]][position % size] for position in range(len(past.tokens) - cut)]
        return [kv for _, kv in old] + new

    def longest_match(self, prompt, key):
        """How many tokens of a prompt a chain of indexed pages has; what lives is found as far as it is converted."""
        if not self.prefix_cache:
            return 0
        size, limit, best = self.size, max(0, len(prompt) - 1), 0
        held = {slots[-1] for page, slots in enumerate(self.slots) if self.index.claims[page]}
        while best + size <= limit and ("converted", (key, *prompt[: best + size])) in held:
            best += size
        for seq, past in self.past.items():
            if past.findable and past.key == key:
                end = min(self.cut(seq), past.known, limit)
                same = next((i for i in range(end) if past.tokens[i] != prompt[i]), end)
                assert best >= same - same % size
        return best

    def snapshot(self):
        manager = self.manager
        of = manager.pages, manager.tail_pages, manager.tokens
        sequences = [(seq, *(each(seq).tolist() for each in of)) for seq in manager.seqs]
        pages = self.pool.refs.tolist(), self.index.claims.tolist(), list(self.index._idle), self.pool.num_free
        return sequences, self.tail_pool.refs.tolist(), *pages, self.manager.stats(), self.manager.num_available

    @invariant()
    def every_sequence_reads_its_own_past(self):
        if not hasattr(self, "tail"):
            return
        assert self.manager.seqs == list(self.past)
        for seq, past in self.past.items():
            assert self.manager.length(seq) == len(past.tokens)
            assert self.manager.tokens(seq).tolist() == past.tokens[: past.known] + [-1] * (len(past.tokens) - past.known)
            read = self.read_parts(past, self.manager.pages(seq).tolist(), self.manager.tail_pages(seq).tolist(), self.cut(seq))
            assert read == [past.kv(position) for position in range(len(past.tokens))]

    @invariant()
    def every_page_has_its_owners_and_no_others(self):
        if not hasattr(self, "tail"):
            return
        owners, tail_owners = np.zeros(self.pool.num_pages, int), np.zeros(self.tail_pool.num_pages, int)
        fill = np.zeros(self.tail_pool.num_pages, int)
        for seq in self.past:
            pages, tail_pages = self.manager.pages(seq), self.manager.tail_pages(seq)
            assert len(set(pages.tolist())) == len(pages) and len(set(tail_pages.tolist())) == len(tail_pages)
            owners[pages] += 1
            tail_owners[tail_pages] += 1
            for i, page in enumerate(tail_pages):
                fill[page] = max(fill[page], min(self.size, self.manager.length(seq) - self.cut(seq) - i * self.size))
        assert self.tail_pool.refs.tolist() == tail_owners.tolist()
        assert self.pool.refs.tolist() == (owners + (self.index.claims > 0)).tolist()
        assert set(self.index.claims.tolist()) <= {0, self.size}
        for pool in (self.pool, self.tail_pool):
            assert sorted(pool._free[: pool.num_free].tolist()) == np.flatnonzero(pool.refs == 0).tolist()
        idle = list(self.index._idle)
        assert sorted(idle) == np.flatnonzero((owners == 0) & (self.index.claims > 0)).tolist()
        # Evicted in this order, no page goes before one that follows on it.
        place = {self.index._hash[page]: i for i, page in enumerate(idle)}
        assert all(place.get(self.index._parent[page], len(idle)) > i for i, page in enumerate(idle))
        stats = self.manager.stats()
        assert stats.pages_used == np.count_nonzero(owners) and stats.pages_shared == np.count_nonzero(owners > 1)
        assert stats.pages_used + stats.pages_cached + stats.pages_free == self.pool.num_pages
        assert stats.waste == int((self.size - fill[tail_owners > 0]).sum())

    @invariant()
    def the_index_promises_what_is_there(self):
        if not hasattr(self, "tail"):
            return
        for page in np.flatnonzero(self.index.claims).tolist():
            assert {tag for tag, _ in self.slots[page]} == {"converted"}
            assert [kv[-1] for _, kv in self.slots[page]] == self.index.tokens[page].tolist()
            assert self.index._parent[page] in ROOTS or self.index.find(self.index._parent[page]) is not None


def test_any_order_of_calls_leaves_every_sequence_its_own_keys_and_values_in_either_cache():
    run_state_machine_as_test(TailMachine, settings=settings(effort(150), stateful_step_count=50))
