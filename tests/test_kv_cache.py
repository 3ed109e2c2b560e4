"""Which blocks are whose: what `Scheduler`'s traces do not tell apart."""

from __future__ import annotations

import numpy as np
import pytest

from engine.kv_cache import KVCache

SIZE = 4


def tokens(*blocks: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.repeat(np.array(blocks, np.int32), SIZE)


def computed(cache: KVCache, *content: int, salt: bytes = b"") -> tuple[list[int], list[bytes]]:
    """Blocks with that content, owned and registered, and their hashes."""
    hashes: list[bytes] = []
    cache.extend_hashes(hashes, tokens(*content), len(content), salt)
    blocks = cache.allocate(len(content))
    for block, h in zip(blocks, hashes, strict=True):
        cache.register(block, h)
    return blocks, hashes


def test_free_blocks_go_first_then_what_was_released_longest_ago() -> None:
    cache = KVCache(7, SIZE)
    (first,), _ = computed(cache, 1)
    (second,), hashes = computed(cache, 2)
    cache.release([first])
    cache.release([second])
    cache.share(cache.match(hashes))  # used again ...
    (third,), _ = computed(cache, 3)
    cache.release([third])
    cache.release([second])  # ... so it is the last to go
    free = set(range(1, 7)) - {first, second, third}
    assert set(cache.allocate(3)) == free
    assert [cache.allocate(1)[0] for _ in range(3)] == [first, third, second]
    assert cache.match(hashes) == []


def test_of_a_chain_the_end_goes_first() -> None:
    """What is left of it is a prefix, which can still be found."""
    cache = KVCache(5, SIZE)
    blocks, hashes = computed(cache, 1, 2, 3, 4)
    cache.release(blocks)
    for kept in (3, 2, 1, 0):
        assert cache.allocate(1) == [blocks[kept]]
        assert cache.match(hashes) == blocks[:kept]


def test_a_shared_block_is_neither_free_nor_cached_before_its_last_owner_has_left() -> None:
    cache = KVCache(3, SIZE)
    blocks, hashes = computed(cache, 1)
    assert cache.count_cached(blocks) == 0
    cache.share(cache.match(hashes))
    cache.release(blocks)
    assert cache.counts().owned == 1
    cache.release(blocks)
    assert (cache.counts().cached, cache.count_cached(blocks)) == (1, 1)
    with pytest.raises(ValueError, match="released more often"):
        cache.release(blocks)
    cache.check()


def test_blocks_are_freed_by_the_last_of_their_owners_only() -> None:
    cache = KVCache(9, SIZE)
    blocks, _ = computed(cache, 1, 2, 3)
    cache.share(blocks[:2])
    first, second = blocks, [*blocks[:2], *cache.allocate(1)]
    assert cache.count_freed([]) == 0
    assert cache.count_freed([first]) == cache.count_freed([second]) == 1
    assert cache.count_freed([first, second]) == 4
    assert cache.count_freed([first, second], kept=blocks[:1]) == 3
    assert cache.count_freed([first], kept=blocks[:1]) == 1


def test_a_hash_covers_all_before_it_the_salt_and_the_model() -> None:
    cache, other = KVCache(20, SIZE, identity=b"model"), KVCache(20, SIZE, identity=b"other")
    _, hashes = computed(cache, 1, 2)
    different = [
        computed(cache, 3, 2)[1],
        computed(cache, 1, 2, salt=b"salt")[1],
        computed(other, 1, 2)[1],
    ]
    assert len({hashes[1], *(each[1] for each in different)}) == 4
    again: list[bytes] = []
    cache.extend_hashes(again, tokens(1, 2), 1)
    cache.extend_hashes(again, tokens(1, 2), 2)
    assert again == hashes


def test_equal_content_is_kept_once() -> None:
    cache = KVCache(5, SIZE)
    kept, hashes = computed(cache, 1)
    private, _ = computed(cache, 1)
    assert cache.match(hashes) == kept
    cache.release(private)
    assert cache.counts().free == 3
    cache.release(kept)
    assert cache.counts().cached == 1


def test_more_than_there_is_takes_nothing() -> None:
    cache = KVCache(4, SIZE)
    with pytest.raises(MemoryError, match="4 blocks wanted, 3 available"):
        cache.allocate(4)
    assert cache.counts().free == 3


def test_without_prefix_caching_nothing_is_found() -> None:
    cache = KVCache(4, SIZE, prefix_caching=False)
    blocks, hashes = computed(cache, 1)
    cache.release(blocks)
    assert cache.match(hashes) == []
    assert cache.counts().free == 3
