"""Which replica has computed which prefix, as far as this Router knows.

A prompt is a chain of blocks, each block's hash covering its tokens and, through its predecessor,
everything before them, as in `engine/kv_cache.py`. The index need not be right: a replica may have
evicted what is listed here, and then computes it again. So Python's own hash does, which takes ten
nanoseconds a token and is the same in every process for numbers; and blocks are larger than the
engine's.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Sequence

BLOCK = 64
"""Tokens; shorter prompts are not worth a detour."""


def chain_of(tokens: Sequence[int], identity: bytes = b"") -> list[int]:
    """The hashes of the full blocks of `tokens`, alike in all processes.

    `identity` is part of every hash: the model, and what else keeps caches apart.
    """
    parent, hashes = zlib.crc32(identity), []
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        parent = hash((parent, *tokens[start : start + BLOCK]))
        hashes.append(parent)
    return hashes


class PrefixIndex:
    """Chains of blocks, and the replicas that hold them as the bits of an integer.

    At most `capacity` blocks, the least recently used forgotten first. Not thread-safe.
    """

    def __init__(self, capacity: int = 1 << 17) -> None:
        self._capacity = capacity
        self._holders: OrderedDict[int, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def match(self, chain: Sequence[int]) -> list[tuple[int, int]]:
        """Replicas by how much of the chain they hold: (bits, tokens), each replica in one pair at most."""
        found: list[tuple[int, int]] = []
        held = -1
        for depth, key in enumerate(chain):
            deeper = self._holders.get(key, 0) & held
            if deeper != held:
                if depth and held != deeper:
                    found.append((held & ~deeper, depth * BLOCK))
                held = deeper
                if not held:
                    return found
        if chain:
            found.append((held, len(chain) * BLOCK))
        return found

    def add(self, chain: Sequence[int], replica: int) -> None:
        """From now on the replica with this number holds the whole chain."""
        bit = 1 << replica
        holders = self._holders
        get, renew = holders.get, holders.move_to_end
        for key in reversed(chain):  # the first block is worth most: it becomes the most recent
            held = get(key, 0)
            if held & bit == 0:
                holders[key] = held | bit
            renew(key)
        while len(holders) > self._capacity:
            holders.popitem(last=False)

    def forget(self, replicas: int) -> None:
        """The replicas whose bits are set hold nothing any more."""
        keep = ~replicas
        for key, held in list(self._holders.items()):
            if left := held & keep:
                self._holders[key] = left
            else:
                del self._holders[key]
