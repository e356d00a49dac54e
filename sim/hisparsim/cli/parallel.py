"""The same function over several items, in processes of their own, with the results in the items' order."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def run_each(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    num_workers: int,
    on_done: Callable[[int, Result], None],
) -> list[Result]:
    """Query: ``function`` of each item; ``on_done`` hears of each (index, result) as it comes.

    With one worker everything runs in this process. Otherwise each worker is a fresh process (``spawn``), so
    function, items and results must pickle. The first error ends the other workers and is raised; so does an
    interrupt.
    """
    num_workers = min(num_workers, len(items))
    if num_workers <= 1:
        results = []
        for i, item in enumerate(items):
            results.append(function(item))
            on_done(i, results[-1])
        return results
    context = multiprocessing.get_context("spawn")
    done: dict[int, Result] = {}
    with ProcessPoolExecutor(num_workers, mp_context=context, initializer=_leave_interrupts) as pool:
        futures = {pool.submit(function, item): i for i, item in enumerate(items)}
        try:
            for future in as_completed(futures):
                i = futures[future]
                done[i] = future.result()
                on_done(i, done[i])
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
            raise
    return [done[i] for i in range(len(items))]


def _leave_interrupts() -> None:
    """Change: let Ctrl-C reach the parent alone, which then ends the workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
