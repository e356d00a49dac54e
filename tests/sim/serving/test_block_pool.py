from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparsim.serving.blocks import NO_KEY, BlockPool, LawBroken


class SlowPool:
    """The same pool with a deque, dictionaries and one block at a time."""

    def __init__(self, num_blocks: int) -> None:
        self.free = deque(range(1, num_blocks))
        self.holders = dict.fromkeys(range(num_blocks), 0)
        self.key_of: dict[int, int] = {}
        self.blocks_of: dict[int, list[int]] = {}
        self.watched: set[int] = set()
        self.reused: list[int] = []

    def take(self, count: int) -> list[int]:
        blocks = [self.free.popleft() for _ in range(count)]
        for block in blocks:
            if block in self.watched:
                self.watched.discard(block)
                self.reused.append(block)
            self.forget(block)
            self.holders[block] = 1
        return blocks

    def forget(self, block: int) -> None:
        key = self.key_of.pop(block, None)
        if key is not None:
            self.blocks_of[key].remove(block)

    def touch(self, blocks: list[int]) -> None:
        for block in blocks:
            if self.holders[block] == 0:
                self.free.remove(block)
            self.holders[block] += 1

    def release(self, blocks: list[int]) -> None:
        unkeyed = []
        for block in blocks:
            self.holders[block] -= 1
            if self.holders[block] == 0:
                if block in self.key_of:
                    self.free.append(block)
                else:
                    unkeyed.append(block)
        self.free.extendleft(reversed(unkeyed))

    def unpin(self, blocks: list[int]) -> None:
        for block in blocks:
            self.holders[block] -= 1
            self.watched.add(block)
            if self.holders[block] == 0:
                self.free.append(block)

    def cache(self, blocks: list[int], keys: list[int]) -> None:
        for block, key in zip(blocks, keys, strict=True):
            if self.key_of.get(block) != key:
                self.forget(block)
                self.key_of[block] = key
                self.blocks_of.setdefault(key, []).append(block)


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["take", "touch", "release", "release_one_by_one", "unpin", "cache"]),
        st.integers(0, 2**32 - 1),
    ),
    max_size=60,
)


@settings(deadline=None, max_examples=150)
@given(num_blocks=st.integers(2, 24), operations=OPERATIONS)
def test_pool_agrees_with_a_slow_one_over_random_operations(
    num_blocks: int, operations: list[tuple[str, int]]
) -> None:
    pool, slow = BlockPool(num_blocks, "test pool"), SlowPool(num_blocks)
    reused: list[int] = []
    pool.on_reuse = lambda blocks: reused.extend(blocks.tolist())
    for name, seed in operations:
        draw = np.random.default_rng(seed)
        held = [block for block, count in slow.holders.items() if count]
        if name == "take":
            count = int(draw.integers(0, len(slow.free) + 1))
            assert pool.take(count).tolist() == slow.take(count)
        else:
            candidates = held + (list(slow.free) if name == "touch" else [])
            count = int(draw.integers(0, len(candidates) + 1))
            chosen = draw.permutation(np.array(candidates, np.int64))[:count].tolist()
            blocks = np.array(chosen, np.int64)
            if name == "cache":
                keys = draw.integers(0, 6, count).tolist()
                pool.cache(blocks, np.array(keys, np.int64))
                slow.cache(chosen, keys)
            elif name == "release_one_by_one":
                pool.release_one_by_one(blocks)
                for block in chosen:
                    slow.release([block])
            else:
                getattr(pool, name)(blocks)
                getattr(slow, name)(chosen)
        pool.check()
        assert pool.free_order().tolist() == list(slow.free)
        assert pool.ref.tolist() == [slow.holders[block] for block in range(num_blocks)]
        assert [int(k) for k in pool.key] == [slow.key_of.get(b, int(NO_KEY)) for b in range(num_blocks)]
        assert reused == slow.reused
        assert pool.num_watched_free == sum(block in slow.watched for block in slow.free)
        assert pool.num_keyed_free == sum(block in slow.key_of for block in slow.free)
        for key in range(6):
            first = next(iter(slow.blocks_of.get(key, [])), None)
            assert pool.find(key) == first
        prefix = pool.find_prefix(list(range(6)))
        run = [slow.blocks_of.get(key, []) for key in range(6)]
        length = next((i for i, blocks in enumerate(run) if not blocks), 6)
        assert prefix == [blocks[0] for blocks in run[:length]]


def test_the_queue_survives_far_more_operations_than_it_has_room_for() -> None:
    pool = BlockPool(5, "test pool")
    for round_number in range(200):
        blocks = pool.take(4)
        if round_number % 2:
            pool.cache(blocks, np.arange(4, dtype=np.int64))
        pool.release(blocks)
        pool.check()
    assert sorted(pool.free_order().tolist()) == [1, 2, 3, 4]


def test_asking_for_more_than_is_free_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match="GPU pool: 4 blocks asked for, 3 are free"):
        BlockPool(4, "GPU pool").take(4)


def test_a_pool_without_blocks_besides_the_null_block_is_refused() -> None:
    with pytest.raises(ValueError, match="holds nothing besides the null block"):
        BlockPool(1, "GPU pool")


@pytest.mark.parametrize("damage", ["holder", "queue", "key", "watched"])
def test_the_law_notices_each_kind_of_damage(damage: str) -> None:
    pool = BlockPool(6, "test pool")
    held = pool.take(2)
    pool.cache(held, np.array([7, 8], np.int64))
    if damage == "holder":
        pool.ref[int(pool.free_order()[0])] = 1
    elif damage == "queue":
        pool.num_free -= 1
    elif damage == "key":
        pool.key[held[0]] = 9
    else:
        pool.num_watched_free = 1
    with pytest.raises((LawBroken, KeyError)):
        pool.check()
