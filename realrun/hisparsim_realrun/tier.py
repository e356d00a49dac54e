"""The offload tier of ordinary prefix caching: which host block holds which page's content.

The plan names stored pages by their host blocks and loaded ones by their keys, so the runner remembers which
key was stored where last. Copies are made in the order of the plans, so a block found by its key holds the
content by the time a later copy reads it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hisparsim.serving.plan import IntArray

from .errors import RunDied


class PrefixTier:
    """Key -> host block of the tier."""

    def __init__(self) -> None:
        self._block_of: dict[int, int] = {}
        self._key_of: dict[int, int] = {}

    def store(self, keys: NDArray[np.int64], host_blocks: IntArray) -> None:
        """Change: pages with these keys [n] are written to these blocks [n]."""
        for key, block in zip(keys.tolist(), host_blocks.tolist(), strict=True):
            before = self._key_of.get(block)
            if before is not None and self._block_of.get(before) == block:
                del self._block_of[before]
            self._key_of[block] = key
            self._block_of[key] = block

    def find(self, keys: NDArray[np.int64]) -> IntArray:
        """[n] blocks that hold pages with these keys.

        Raises:
            RunDied: a key was never stored, or its block was written over.
        """
        missing = [key for key in keys.tolist() if key not in self._block_of]
        if missing:
            raise RunDied(f"the offload tier is asked for page key {missing[0]}, which it does not hold")
        return np.array([self._block_of[key] for key in keys.tolist()], np.int32)
