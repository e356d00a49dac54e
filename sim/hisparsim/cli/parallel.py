"""The same function over several items, in processes of their own, with the results in the items' order."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, MutableSequence, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import TypeAlias, TypeVar

from hisparsim.workers import end_pool, interrupts_held

Item = TypeVar("Item")
Result = TypeVar("Result")
Report: TypeAlias = Callable[[int], None]
"""Told how much of an item is done, in units of the function's choice."""

POLL_S = 0.1


class WorkerDiedError(RuntimeError):
    """A worker process is gone before its item was done."""


_board: MutableSequence[int] = []
"""In a worker: the memory shared with the parent, one number an item."""


def run_each(
    function: Callable[[Item, Report], Result],
    items: Sequence[Item],
    num_workers: int,
    on_progress: Callable[[int, int], None],
    on_done: Callable[[int, Result], None],
) -> list[Result]:
    """Query: ``function(item, report)`` of each item, in the items' order.

    ``on_progress`` hears of (index, what was reported) and ``on_done`` of (index, result) as they come. With
    one worker everything runs in this process. Otherwise each worker is a fresh process (``spawn``), so
    function, items and results must pickle. The first error ends the other workers and is raised; so does an
    interrupt.

    Raises:
        WorkerDiedError: a worker was killed, or ran out of memory.
    """
    num_workers = min(num_workers, len(items))
    if num_workers <= 1:
        results = []
        for i, item in enumerate(items):
            results.append(function(item, partial(on_progress, i)))
            on_done(i, results[-1])
        return results
    context = multiprocessing.get_context("spawn")
    board = context.Array("q", len(items), lock=False)
    done: dict[int, Result] = {}
    with ProcessPoolExecutor(num_workers, context, _start_worker, (board,)) as pool:
        waiting: dict[Future[Result], int] = {}
        try:
            with interrupts_held():
                waiting |= {pool.submit(_call, function, i, item): i for i, item in enumerate(items)}
            while waiting:
                finished, _ = wait(waiting, POLL_S, FIRST_COMPLETED)
                for i in waiting.values():
                    on_progress(i, board[i])
                for future in finished:
                    i = waiting.pop(future)
                    done[i] = future.result()
                    on_done(i, done[i])
        except BaseException as error:
            with interrupts_held():
                end_pool(pool)
            if isinstance(error, BrokenProcessPool):
                raise WorkerDiedError(
                    "a worker process ended before its run was done (killed, or out of memory); --jobs 1 "
                    "runs one at a time"
                ) from None
            raise
    return [done[i] for i in range(len(items))]


def _start_worker(board: MutableSequence[int]) -> None:
    """Change: keep the memory that is shared with the parent."""
    global _board
    _board = board


def _call(function: Callable[[Item, Report], Result], i: int, item: Item) -> Result:
    return function(item, partial(_board.__setitem__, i))
