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
        self._blocks_of: dict[int, list[int]] = {}
        self._key_of: dict[int, int] = {}

    def store(self, keys: NDArray[np.int64], host_blocks: IntArray) -> None:
        """Change: pages with these keys [n] are written to these blocks [n]."""
        for key, block in zip(keys.tolist(), host_blocks.tolist(), strict=True):
            before = self._key_of.get(block)
            if before is not None:
                self._blocks_of[before].remove(block)
            self._key_of[block] = key
            self._blocks_of.setdefault(key, []).append(block)

    def find(self, keys: NDArray[np.int64]) -> IntArray:
        """[n] blocks that hold pages with these keys, the one stored first among equals.

        Raises:
            RunDied: a key was never stored, or its block was written over.
        """
        blocks = []
        for key in keys.tolist():
            found = self._blocks_of.get(key)
            if not found:
                raise RunDied(f"the offload tier is asked for page key {key}, which it does not hold")
            blocks.append(found[0])
        return np.array(blocks, np.int64)
