"""Finding pages by their tokens: a chain of hashes over whole pages, the tokens themselves within the last one."""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from tkv.errors import DTypeError
from tkv.pages.pool import PagePool

# What may tell two equal prompts apart: an adapter's name, a tenant's salt, and tuples of such.
ExtraKeys = bool | int | float | str | bytes | Sequence["ExtraKeys"] | None

# In place of a token's id while the manager has not been told it. Ids start at 0.
UNKNOWN = -1


def encode_keys(keys: ExtraKeys) -> bytes:
    """Bytes that no other keys have: every field carries its type and its length, so None, 0, "", "ab" + "c" and "a" + "bc" all differ.

    Raises:
        DTypeError: a field of another type.
    """
    if keys is None:
        return b"N"
    if isinstance(keys, bool | np.bool_):
        return b"T" if keys else b"F"
    if isinstance(keys, int | np.integer):
        number = int(keys)
        tag, data = b"i", number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)
    elif isinstance(keys, float):
        tag, data = b"f", struct.pack("<d", keys)
    elif isinstance(keys, str):
        tag, data = b"s", keys.encode("utf-8", "surrogatepass")
    elif isinstance(keys, bytes):
        tag, data = b"b", keys
    elif isinstance(keys, tuple | list):
        return b"(" + struct.pack("<Q", len(keys)) + b"".join(map(encode_keys, keys))
    else:
        raise DTypeError(f"extra_keys: expected None, bool, int, float, str, bytes or tuples of them, got {type(keys).__name__}")
    return tag + struct.pack("<Q", len(data)) + data


def root_hash(keys: ExtraKeys) -> bytes:
    """Where the chain of the prompts with these extra keys starts."""
    return hashlib.sha256(b"root" + encode_keys(keys)).digest()


def page_hash(parent: bytes, tokens: np.ndarray) -> bytes:
    """The name of a whole page: of its tokens (contiguous int64), of all before them and of the extra keys."""
    return hashlib.sha256(b"page" + parent + struct.pack("<Q", tokens.size) + tokens.tobytes()).digest()


def common_length(rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """How many leading columns of each row equal the tokens."""
    same = rows[:, : tokens.size] == tokens
    return np.where(same.all(1), tokens.size, same.argmin(1))


class PrefixIndex:
    """The pages whose keys and values may be used again, and the token in every slot of the pool.

    An indexed page has a *parent*, the hash of all before it, and a *claim*: so many of its leading slots may be matched, and so must not
    be written. A claim on the whole page gives it a hash of its own, under which its children are found. The index owns one reference
    of each indexed page. Pages that nobody else owns are *idle*: they stay until they are evicted, least recently used first, and those
    that follow on a page before it. What follows on an idle page may be owned, by sequences that let go of it as it left their window;
    once it is evicted they own those pages alone.
    """

    def __init__(self, pool: PagePool, page_size: int) -> None:
        self.pool = pool
        self.page_size = page_size
        self.tokens = np.zeros((pool.num_pages, page_size), np.int64)
        self.claims = np.zeros(pool.num_pages, np.int32)
        self.num_evicted = 0
        self._page_of: dict[bytes, int] = {}
        self._parent: dict[int, bytes] = {}
        self._hash: dict[int, bytes] = {}
        # Sorted by the bytes of the claimed tokens, so that what agrees longest with a prompt is next to it.
        self._children: dict[bytes, list[int]] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_idle(self) -> int:
        """Indexed pages that no sequence uses."""
        return len(self._idle)

    @property
    def num_available(self) -> int:
        """Pages that can be had: free ones and idle ones."""
        return self.pool.num_free + self.num_idle

    def holders(self, pages: np.ndarray) -> np.ndarray:
        """References of pages other than the index's own."""
        return self.pool.refs[pages] - (self.claims[pages] > 0)

    def find(self, name: bytes) -> int | None:
        """The whole page of that hash."""
        return self._page_of.get(name)

    def nearest(self, parent: bytes, tokens: np.ndarray) -> list[int]:
        """Of the pages that follow on the page of that hash, those of which one agrees longest with the tokens."""
        siblings = self._children.get(parent, [])
        at = self._place(siblings, tokens.tobytes())
        near = siblings[max(0, at - 1) : at + 1]
        if not near:
            return near
        # A page that ends where the agreement ends is better than one that goes on.
        longest = int(np.minimum(common_length(self.tokens[near], tokens), self.claims[near]).max())
        at = self._place(siblings, tokens[:longest].tobytes())
        return siblings[at : at + 1] + near

    def has_children(self, page: int) -> bool:
        """Whether an indexed page follows on this one."""
        return self._hash.get(page) in self._children

    def hold(self, pages: np.ndarray) -> None:
        """Add an owner to each page."""
        self.pool.share(pages)
        for page in pages.tolist():
            self._idle.pop(page, None)

    def release(self, pages: np.ndarray) -> None:
        """Take an owner from each page, in the order in which those that stay idle are to be evicted, all before the pages before them."""
        for page in self._release(pages):
            # A page that a sequence had under other parents than the index (it was identified late) may come after them.
            found: int | None = page
            while found is not None and (found in self._idle or found == page):
                self._idle[found] = None
                self._idle.move_to_end(found)
                found = self._page_of.get(self._parent[found])

    def let_go(self, pages: np.ndarray) -> None:
        """:meth:`release`, without a look at the pages before each, so that the cost does not depend on how many there are."""
        for page in self._release(pages):
            self._idle[page] = None

    def touch(self, pages: np.ndarray) -> None:
        """Idle ones of these pages are used now, the last one most recently."""
        for page in pages.tolist():
            if page in self._idle:
                self._idle.move_to_end(page)

    def publish(self, chain: list[bytes], pages: np.ndarray) -> np.ndarray:
        """Index owned pages that are whole and follow on the chain of hashes, which is extended.

        Returns:
            The pages as the index has them: another one where one with the same tokens and history was there before.
        """
        canonical, added = pages.copy(), []
        for i, page in enumerate(pages.tolist()):
            name = page_hash(chain[-1], self.tokens[page])
            found = self._page_of.get(name)
            if found is None:
                if self.claims[page]:
                    self.forget(page)
                self._put(chain[-1], page, self.page_size)
                self._page_of[name] = page
                self._hash[page] = name
                added.append(page)
            else:
                canonical[i] = found
            chain.append(name)
        if added:
            self.pool.share(added)
        return canonical

    def keep_part(self, parent: bytes, page: int, count: int) -> None:
        """Index the first tokens of an owned page that is not whole, if the index has no page that begins with them."""
        if count <= self.claims[page]:
            return
        siblings, tokens = self._children.get(parent, []), self.tokens[page, :count].tobytes()
        at = self._place(siblings, tokens)
        if at < len(siblings) and self._key(siblings[at]).startswith(tokens):
            return
        if self.claims[page]:
            self.forget(page)
        self._put(parent, page, count)
        self.pool.share(page)

    def forget(self, page: int) -> None:
        """Take a page and all that follow on it out of the index. Idle ones are free then, the others their owners' alone."""
        found, dropped = [page], []
        while found:
            page = found.pop()
            parent, name = self._parent.pop(page), self._hash.pop(page, None)
            siblings = self._children.get(parent)
            if siblings is not None:
                del siblings[self._place(siblings, self._key(page))]
                if not siblings:
                    del self._children[parent]
            if name is not None:
                del self._page_of[name]
                found += self._children.pop(name, ())
            self.claims[page] = 0
            self._idle.pop(page, None)
            dropped.append(page)
        self.pool.release(dropped)

    def take(self, count: int) -> np.ndarray:
        """Allocate pages that are available, idle ones where free ones are too few."""
        self.evict(count - self.pool.num_free)
        return self.pool.allocate(count)

    def evict(self, count: int) -> None:
        """Free at least so many idle pages, or all."""
        goal = self.pool.num_free + count
        while self._idle and self.pool.num_free < goal:
            before, page = self.pool.num_free, next(iter(self._idle))
            if self.has_children(page):
                self._put_followers_first(page)
            self.forget(next(iter(self._idle)))
            self.num_evicted += self.pool.num_free - before

    def clear(self) -> None:
        """Take every page out of the index."""
        indexed = list(self._parent)
        for table in (self._page_of, self._parent, self._hash, self._children, self._idle):
            table.clear()
        self.claims[indexed] = 0
        self.pool.release(indexed)

    def _release(self, pages: np.ndarray) -> list[int]:
        """Take an owner from each page: those that are idle then."""
        self.pool.release(pages)
        return pages[(self.claims[pages] > 0) & (self.pool.refs[pages] == 1)].tolist()

    def _put_followers_first(self, page: int) -> None:
        """Evict the idle ones of the pages that follow on this one next, the last of a chain before those before it."""
        found = [page]
        while found:
            for page in self._children.get(self._hash.get(found.pop(), b""), ()):
                if page in self._idle:
                    self._idle.move_to_end(page, last=False)
                found.append(page)

    def _put(self, parent: bytes, page: int, claim: int) -> None:
        self._parent[page] = parent
        self.claims[page] = claim
        siblings = self._children.setdefault(parent, [])
        siblings.insert(self._place(siblings, self._key(page)), page)

    def _key(self, page: int) -> bytes:
        return self.tokens[page, : self.claims[page]].tobytes()

    def _place(self, siblings: list[int], tokens: bytes) -> int:
        return bisect_left(siblings, tokens, key=self._key)
