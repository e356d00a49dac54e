import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_block_pool import SlowPool

from hisparsim.serving.blocks import BlockPool, LawBroken
from hisparsim.serving.frames import PageFrames

GROUPS = 3


@dataclass(eq=False)
class SlowFrame:
    blocks: list[int]
    holders: int = 1
    loose: list[tuple[int, int]] = field(default_factory=list)
    key: int | None = None


class Twins:
    """Page frames and a slow model of them, both told the same; requests are plain page tables."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, "test pool")
        self.lost: list[tuple[int, int]] = []
        self.frames = PageFrames(self.pool, GROUPS, self._on_lost)
        self.slow = SlowPool(num_blocks)
        self.slow_lost: list[tuple[int, int]] = []
        self.alive: dict[int, SlowFrame] = {}
        self.copies: dict[int, int] = {}
        self.tables: dict[int, dict[int, int]] = {}  # request -> page -> frame
        self.loose: set[tuple[int, int]] = set()
        self.transfers: list[list[int]] = []
        self.next_request = 0
        self.next_key = 0

    def _on_lost(self, request_ids: np.ndarray, pages: np.ndarray) -> None:
        self.lost.extend(zip(request_ids.tolist(), pages.tolist(), strict=True))

    def _slow_take(self, count: int) -> list[int]:
        self.slow.reused.clear()
        blocks = self.slow.take(count)
        for block in self.slow.reused:
            for number, frame in list(self.alive.items()):
                if block in frame.blocks:
                    self.slow_lost.extend(frame.loose)
                    if frame.key is not None:
                        del self.copies[frame.key]
                    del self.alive[number]
        return blocks

    def _array(self, numbers: list[int]) -> np.ndarray:
        return np.array(numbers, np.int64)

    def _bury(self, numbers: list[int]) -> None:
        for number in numbers:
            frame = self.alive.get(number)
            if frame is not None and not frame.holders and not frame.loose and frame.key is None:
                del self.alive[number]

    def grow(self, draw: random.Random) -> None:
        room = min(len(self.slow.free) // GROUPS, 3)
        if not room:
            return
        count = draw.randint(1, room)
        if self.tables and draw.random() < 0.6:
            request = draw.choice(sorted(self.tables))
        else:
            request = self.next_request
            self.next_request += 1
            self.tables[request] = {}
        blocks = self._slow_take(count * GROUPS)
        numbers = self.frames.allocate(count).tolist()
        self._settle()
        table = self.tables[request]
        first = max(table, default=-1) + 1
        for i, number in enumerate(numbers):
            self.alive[number] = SlowFrame([blocks[group * count + i] for group in range(GROUPS)])
            table[first + i] = number

    def take_for_others(self, draw: random.Random) -> None:
        count = draw.randint(0, len(self.slow.free))
        blocks = self._slow_take(count)
        assert self.pool.take(count).tolist() == blocks
        self._settle()
        back = draw.sample(blocks, draw.randint(0, count))
        self.pool.release(self._array(back))
        self.slow.release(back)
        self.others = [block for block in blocks if block not in back]
        self.pool.release(self._array(self.others))
        self.slow.release(self.others)

    def write_back(self, draw: random.Random) -> None:
        held = [f for r, table in self.tables.items() for p, f in table.items() if (r, p) not in self.loose]
        busy = {f for transfer in self.transfers for f in transfer}
        unwritten = [f for f in sorted(set(held) - busy) if self.alive[f].key is None]
        chosen = [f for f in unwritten if draw.random() < 0.5]
        if chosen:
            self.frames.add_shared_pin(self._array(chosen))
            for number in chosen:
                self.alive[number].holders += 1
                self.slow.touch(self.alive[number].blocks)
            self.transfers.append(chosen)

    def finish_transfer(self, draw: random.Random) -> None:
        if not self.transfers:
            return
        chosen = self.transfers.pop(draw.randrange(len(self.transfers)))
        last = [n for n in chosen if self.alive[n].holders == 1]
        shared = [n for n in chosen if self.alive[n].holders > 1]
        self.frames.release(self._array(last), group_major=False)
        self.frames.drop_shared_pin(self._array(shared))
        for number in [*last, *shared]:
            self.alive[number].holders -= 1
            for block in self.alive[number].blocks:
                self.slow.release([block])
        self._bury(last)

    def let_go(self, draw: random.Random) -> None:
        """A request stops holding some of its pages and goes on reading them."""
        if not self.tables:
            return
        request = draw.choice(sorted(self.tables))
        busy = {f for transfer in self.transfers for f in transfer}
        pages = [
            page
            for page, number in sorted(self.tables[request].items(), reverse=True)
            if (request, page) not in self.loose and number not in busy and draw.random() < 0.7
        ]
        numbers = [self.tables[request][page] for page in pages]
        self.frames.read_loose(self._array(numbers), request, self._array(pages))
        self.frames.unpin(self._array(numbers))
        for page, number in zip(pages, numbers, strict=True):
            self.loose.add((request, page))
            self.alive[number].loose.append((request, page))
            self.alive[number].holders -= 1
            self.slow.unpin(self.alive[number].blocks)

    def publish(self, draw: random.Random) -> None:
        """Pages become copies once nothing is on its way from them; from then on they are clean."""
        busy = {f for transfer in self.transfers for f in transfer}
        numbers = sorted({f for table in self.tables.values() for f in table.values()} - busy)
        chosen = [n for n in numbers if self.alive[n].key is None and draw.random() < 0.5]
        keys = []
        for _ in chosen:
            key = self.next_key if draw.random() < 0.7 or not self.next_key else draw.randrange(self.next_key)
            if key in keys:
                key = self.next_key
            self.next_key = max(self.next_key, key + 1)
            keys.append(key)
        self.frames.record_copies(self._array(chosen), np.array(keys, np.int64))
        for number, key in zip(chosen, keys, strict=True):
            older = self.copies.get(key)
            if older is not None:
                self.alive[older].key = None
                self._bury([older])
            self.copies[key] = number
            self.alive[number].key = key

    def adopt(self, draw: random.Random) -> None:
        wanted = [key for key in sorted(self.copies) if draw.random() < 0.4]
        if not wanted:
            return
        request = self.next_request
        self.next_request += 1
        numbers = [self.copies[key] for key in wanted]
        self.frames.pin(self._array(numbers))
        self.frames.readers[self._array(numbers)] += 1
        self.tables[request] = dict(enumerate(numbers))
        for number in numbers:
            self.alive[number].holders += 1
            self.slow.touch(self.alive[number].blocks)

    def leave(self, draw: random.Random) -> None:
        if not self.tables:
            return
        request = draw.choice(sorted(self.tables))
        table = self.tables.pop(request)
        pages = sorted(table, reverse=True)
        busy = {f for transfer in self.transfers for f in transfer}
        loose = [page for page in pages if (request, page) in self.loose]
        idle = [p for p in pages if p not in loose and table[p] not in busy]
        clean = [p for p in idle if self.alive[table[p]].key is not None or draw.random() < 0.6]
        dirty = [p for p in pages if p not in loose and p not in clean]
        clean_frames = self._array([table[p] for p in clean])
        self.frames.unpin(clean_frames, group_major=True)
        self.frames.stop_reading(self._array([table[p] for p in pages]), request, self._array(pages))
        self.frames.retire_dead(clean_frames)
        self.frames.release(self._array([table[p] for p in dirty]), group_major=True)
        for group in range(GROUPS):
            for page in clean:
                self.slow.unpin([self.alive[table[page]].blocks[group]])
        for group in range(GROUPS):
            self.slow.release([self.alive[table[page]].blocks[group] for page in dirty])
        for page in [*clean, *dirty]:
            self.alive[table[page]].holders -= 1
        for page in loose:
            self.loose.discard((request, page))
            self.alive[table[page]].loose.remove((request, page))
        self._bury([table[page] for page in pages])

    def _settle(self) -> None:
        """Both lost the same pages; the tables forget them."""
        assert sorted(self.lost) == sorted(self.slow_lost)
        for request, page in self.lost:
            del self.tables[request][page]
            self.loose.discard((request, page))
        self.lost.clear()
        self.slow_lost.clear()

    def compare(self) -> None:
        self.pool.check()
        self.frames.check()
        assert self.pool.free_order().tolist() == list(self.slow.free)
        assert self.frames.copies == self.copies
        held = {n for n, frame in self.alive.items() if frame.holders}
        read = {n for table in self.tables.values() for n in table.values()}
        assert self.frames.num_read_blocks() == (GROUPS * len(held & read), GROUPS * len(read - held))
        for number, frame in self.alive.items():
            assert self.frames.blocks[number].tolist() == frame.blocks
            assert self.frames.ref[number] == frame.holders


OPERATIONS = (
    *("grow", "grow", "grow", "take_for_others", "write_back"),
    *("finish_transfer", "let_go", "publish", "adopt", "leave"),
)


@settings(deadline=None, max_examples=150)
@given(
    num_blocks=st.integers(GROUPS + 2, 40),
    operations=st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 2**32 - 1)), max_size=40),
)
def test_frames_agree_with_a_slow_model_over_random_operations(
    num_blocks: int, operations: list[tuple[str, int]]
) -> None:
    twins = Twins(num_blocks)
    for name, seed in operations:
        getattr(twins, name)(random.Random(seed))
        twins.compare()


def test_a_page_is_lost_by_all_its_readers_when_one_of_its_blocks_is_taken() -> None:
    twins = Twins(GROUPS + 1)
    table = twins.frames.allocate(1)
    twins.frames.pin(table)
    twins.frames.readers[table] += 1
    for request, page in ((7, 0), (9, 4)):
        twins.frames.read_loose(table, request, np.array([page], np.int64))
        twins.frames.unpin(table)
    twins.pool.take(1)
    assert sorted(twins.lost) == [(7, 0), (9, 4)]
    twins.frames.check()


@pytest.mark.parametrize("damage", ["holders", "readers", "copy", "block"])
def test_the_law_notices_each_kind_of_damage(damage: str) -> None:
    twins = Twins(20)
    table = twins.frames.allocate(2)
    twins.frames.record_copies(table[:1], np.array([3], np.int64))
    if damage == "holders":
        twins.frames.ref[table[0]] = 2
    elif damage == "readers":
        twins.frames.readers[table[1]] = 5
    elif damage == "copy":
        twins.frames.copies[3] = int(table[1])
    else:
        twins.frames.blocks[table[0], 1] = twins.frames.blocks[table[1], 1]
    with pytest.raises(LawBroken):
        twins.frames.check()
