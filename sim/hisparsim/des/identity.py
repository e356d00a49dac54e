"""Content keys of pages: which pages of different requests hold the same tokens after the same prefix.

A page is identified by the trace's own hash block that covers it, by its place in a conversation, or by
nothing but its request. Only pages filled completely have a key.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hisparsim_traces import Trace

_PRIVATE = 1 << 62
_ROW_SHIFT = 20  # pages of one request: 2**20 x 64 tokens
Keys = NDArray[np.int64]
_NO_KEYS: Keys = np.empty(0, np.int64)


class PageIdentity:
    """Keys of the pages of a trace's requests, made when a request is submitted.

    A turn's context extends its parent's: the parent's output pages and the child's prompt pages have the
    same keys as far as the trace says that they hold the same tokens.
    """

    def __init__(self, trace: Trace, page_tokens: int = 64) -> None:
        self.trace = trace
        self.page_tokens = page_tokens
        self._input_tokens: list[int] = trace.input_tokens.tolist()
        self._output_tokens: list[int] = trace.output_tokens.tolist()
        self._parent: list[int] = trace.parent.tolist()
        self._first_child: dict[int, int] = {}
        for row, parent in enumerate(self._parent):
            if parent >= 0:
                self._first_child.setdefault(parent, row)
        self._kept: dict[int, Keys] = {}

    def keys(self, row: int, prompt_tokens: int | None = None) -> Keys:
        """[pages] keys of a request's full pages, prompt and output; children must ask after their parents.

        ``prompt_tokens`` are given where the prompt was cut shorter than the trace's: what follows them is
        nobody else's.
        """
        declared, output = self._input_tokens[row], self._output_tokens[row]
        prompt = declared if prompt_tokens is None else prompt_tokens
        num_pages = (prompt + output) // self.page_tokens
        own = _PRIVATE + (row << _ROW_SHIFT)
        keys = np.arange(own, own + num_pages, dtype=np.int64)
        hashed = self._hashed(row)[: prompt // self.page_tokens]
        keys[: len(hashed)] = hashed
        parent = self._parent[row]
        if not len(hashed) and parent in self._kept:
            shared = min(int(self.trace.shared_prefix_tokens[row]), prompt) // self.page_tokens
            kept = self._kept[parent][:shared]
            keys[: len(kept)] = kept
        child = self._first_child.get(row)
        if child is not None and prompt < declared:
            self._kept[row] = keys[: prompt // self.page_tokens]
        elif child is not None:
            self._extend_into_child(keys, len(hashed), child)
            self._kept[row] = keys
        if parent in self._kept and self._first_child.get(parent) == row:
            del self._kept[parent]
        return keys

    def _hashed(self, row: int) -> Keys:
        """[full prompt pages] keys by the trace's hash blocks; [0] where it has none that fit pages."""
        block_tokens, page = self.trace.block_tokens, self.page_tokens
        if block_tokens is None:
            return _NO_KEYS
        blocks = self.trace.blocks(row)
        if not len(blocks):
            return _NO_KEYS
        if block_tokens % page == 0:
            per_block = block_tokens // page
            keys = (blocks[:, None] * per_block + np.arange(per_block)).ravel()
        elif page % block_tokens == 0:
            per_page = (
                page // block_tokens
            )  # a block's id implies all before it: the page's last one names it
            keys = blocks[per_page - 1 :: per_page]
        else:
            return _NO_KEYS
        return keys[: self._input_tokens[row] // page].astype(np.int64)

    def _extend_into_child(self, keys: Keys, num_hashed: int, child: int) -> None:
        """Where hash blocks say that the next turn repeats this one, its output pages carry their keys."""
        of_child = self._hashed(child)
        if (
            num_hashed
            and len(of_child) > num_hashed
            and np.array_equal(of_child[:num_hashed], keys[:num_hashed])
        ):
            end = min(len(of_child), len(keys))
            keys[num_hashed:end] = of_child[num_hashed:end]
