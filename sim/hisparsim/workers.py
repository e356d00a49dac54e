"""Pools of worker processes and Ctrl-C: the parent alone answers it, and ends its workers."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

MANAGER_S = 10.0
"""Patience with the thread that looks after a pool's workers."""


def end_pool(pool: ProcessPoolExecutor) -> None:
    """Change: end a pool's workers, those at work included, and the thread that looks after them.

    Left to itself that thread may close its pipes while the interpreter, on its way out, writes to them.
    """
    processes = list((pool._processes or {}).values())
    manager: Any = pool._executor_manager_thread
    pool.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.terminate()
    if manager is not None:
        manager.join(timeout=MANAGER_S)


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Change: a Ctrl-C in the block comes at its end, and never to a process started in it.

    Workers inherit the mask: the parent alone answers a Ctrl-C, and ends them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
