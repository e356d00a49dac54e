"""The C library's heap on a CPU: keep freed memory, so that a step's time is the step's and not the kernel's.

By default glibc maps large blocks on demand and gives them back at once. A step of the CPU's model frees and
asks again for tens of megabytes, and each round costs thousands of page faults, more in one step than in its
twin: their number correlated by 0.95 with how much longer than usual a step took. A serving engine allocates
before it serves; on a GPU torch's caching allocator does the same.
"""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD = -1
M_TOP_PAD = -2
M_MMAP_MAX = -4
"""Parameters of mallopt(3)."""
TOP_PAD_BYTES = 64 << 20
"""What the heap grows by at a time."""


def keep_memory() -> bool:
    """Change: this process never gives heap memory back; returns whether its C library can be told so."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        return False
    never, none = -1, 0
    settings = ((M_TRIM_THRESHOLD, never), (M_TOP_PAD, TOP_PAD_BYTES), (M_MMAP_MAX, none))
    return all(mallopt(parameter, value) == 1 for parameter, value in settings)
