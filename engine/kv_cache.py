"""Who owns which block of the key-value cache.

A block is free, owned (by one request, or shared by several that have the same prefix), or cached:
owned by nobody, kept for the next request with that prefix until its space is needed.
Nothing here knows about devices: a released block may be handed out at once, since a plan that
names it runs after every plan launched before.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from engine.plan import SCRATCH_BLOCK


@dataclass(frozen=True, slots=True)
class CacheCounts:
    """Blocks by state, the scratch block left out; they add up to `total`."""

    free: int
    cached: int
    owned: int
    total: int


class KVCache:
    """Allocation, prefix sharing, eviction and release of blocks.

    `num_blocks` counts the scratch block; `identity` (the model, say) is part of every prefix hash.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, prefix_caching: bool = True, identity: bytes = b""
    ) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks must be at least 2 (one is scratch), got {num_blocks}")
        self.block_size = block_size
        self.total = num_blocks - 1
        self.prefix_caching = prefix_caching
        self._identity = identity
        self._free = deque(range(SCRATCH_BLOCK + 1, num_blocks))
        self._owners = [0] * num_blocks
        self._hash_of: dict[int, bytes] = {}  # registered blocks, owned or cached
        self._block_of: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently released first
        self.releases = 0
        """Counts up whenever there may be more room than before."""

    @property
    def available(self) -> int:
        """Blocks that `allocate` can hand out: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    def allocate(self, n: int) -> list[int]:
        """Take n blocks, evicting cached ones where no free ones are left.

        Raises `MemoryError`, taking none, if fewer than n are available.
        """
        if n > self.available:
            raise MemoryError(f"{n} blocks wanted, {self.available} available")
        return [self._take() for _ in range(n)]

    def _take(self) -> int:
        if self._free:
            block = self._free.popleft()
        else:
            block, _ = self._cached.popitem(last=False)
            del self._block_of[self._hash_of.pop(block)]
        self._owners[block] = 1
        return block

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one owner's hold on the blocks, in order of position.

        Raises `ValueError` if one of them has no owner.
        """
        self.releases += 1
        # Last first: a prefix is worth more than what follows it, so it is evicted later.
        for block in reversed(blocks):
            if self._owners[block] <= 0:
                raise ValueError(f"block {block} released more often than it was taken")
            self._owners[block] -= 1
            if self._owners[block] == 0:
                if block in self._hash_of:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    # Prefixes

    def extend_hashes(
        self, hashes: list[bytes], tokens: npt.NDArray[np.int32], num_full: int, salt: bytes = b""
    ) -> None:
        """Lengthen a chain of block hashes to `num_full` blocks of `tokens`.

        Each hash covers its block's tokens and, through its predecessor, everything before them.
        """
        size = self.block_size
        for i in range(len(hashes), num_full):
            parent = hashes[-1] if hashes else hashlib.sha256(self._identity + b"\0" + salt).digest()
            hashes.append(hashlib.sha256(parent + tokens[i * size : (i + 1) * size].tobytes()).digest())

    def chain(
        self, hashes: list[bytes], tokens: npt.NDArray[np.int32], num_full: int, salt: bytes = b""
    ) -> Iterator[bytes]:
        """The first `num_full` hashes of the chain, lengthened one by one as they are asked for."""
        for i in range(num_full):
            self.extend_hashes(hashes, tokens, i + 1, salt)
            yield hashes[i]

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks that hold the longest known prefix of the chain. Takes no hold on them."""
        blocks: list[int] = []
        if self.prefix_caching:
            for h in hashes:
                block = self._block_of.get(h)
                if block is None:
                    break
                blocks.append(block)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Become one more owner of blocks found by `match`."""
        for block in blocks:
            if self._owners[block] == 0:
                del self._cached[block]
            self._owners[block] += 1

    def count_cached(self, blocks: Iterable[int]) -> int:
        """How many of these blocks nobody owns: `share` would take them out of `available`."""
        return sum(self._owners[block] == 0 for block in blocks)

    def count_freed(self, owners: Iterable[Sequence[int]], kept: Iterable[int] = ()) -> int:
        """How many more blocks would be available if these owners, each with its blocks, gave them up.

        Those of `kept` do not count: somebody else is about to share them.
        """
        holds = Counter(chain.from_iterable(owners))
        for block in kept:
            del holds[block]
        return sum(n == self._owners[block] for block, n in holds.items())

    def register(self, block: int, chain_hash: bytes) -> None:
        """Make an owned block shareable. Whatever reads it runs with or after the step that computes it.

        If another block holds the same content already, this one stays private.
        """
        if self.prefix_caching and chain_hash not in self._block_of:
            self._block_of[chain_hash] = block
            self._hash_of[block] = chain_hash

    # Integrity

    def counts(self) -> CacheCounts:
        free, cached = len(self._free), len(self._cached)
        return CacheCounts(free=free, cached=cached, owned=self.total - free - cached, total=self.total)

    def check(self, owned: Iterable[Sequence[int]] = ()) -> None:
        """Raise `AssertionError` unless every block is in exactly one state and owners add up.

        `owned` lists the blocks of every request that owns some.
        """
        owners = [0] * len(self._owners)
        for blocks in owned:
            assert len(set(blocks)) == len(blocks), "one request owns a block twice"
            for block in blocks:
                owners[block] += 1
        assert owners == self._owners, "owners differ from what the requests hold"
        assert owners[SCRATCH_BLOCK] == 0, "the scratch block has an owner"
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is free twice"
        held = {block for block, n in enumerate(owners) if n}
        assert not (free & cached or free & held or cached & held), "a block is in two states"
        assert len(free) + len(cached) + len(held) == self.total, "a block is lost"
        assert not any(block in self._hash_of for block in free), "a free block has a hash"
        assert {h: b for b, h in self._hash_of.items()} == self._block_of, "hash tables disagree"
