"""What the tokens are: ids as a function of a page's content key and a token's place in it.

Equal keys mean equal content after an equal prefix, so requests that share a prefix by their keys compute the
same rows, whichever of them comes first. Ids are fed as they are, also where a step sampled something else:
the arg-max of the seeded head is what a request answers, not what it reads next.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hisparsim.serving.request import RequestSpec
from hisparsim.specs.kv_layout import PAGE_TOKENS

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_REJECTED = np.uint64(0xD1B54A32D192ED03)
_PRIVATE = np.uint64(0x8CB92BA72F3D8DD7)


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser, element by element."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class Content:
    """Token ids of every request of a run."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self.vocab_size = vocab_size
        self._seed = np.uint64(seed)
        self._specs: dict[int, RequestSpec] = {}

    def register(self, spec: RequestSpec) -> None:
        """Change: a request was submitted."""
        self._specs[spec.request_id] = spec

    def spec(self, request_id: int) -> RequestSpec:
        return self._specs[request_id]

    def page_hashes(self, request_id: int, pages: NDArray[np.int64]) -> NDArray[np.uint64]:
        """[n] a hash of what each page holds: of its key, or of request and page where it has none."""
        keys = self._specs[request_id].page_keys
        owner = np.array([request_id + 1], np.uint64) * _PRIVATE  # arrays wrap around in silence
        private = mix(owner) + pages.astype(np.uint64) * _GOLDEN
        if keys is None or not len(keys):
            return mix(private)
        keyed = pages < len(keys)
        content = keys[np.minimum(pages, len(keys) - 1)].astype(np.uint64) * _GOLDEN
        return mix(np.where(keyed, content, private))

    def token_ids(self, request_id: int, start: int, count: int, wrong_from: int) -> NDArray[np.int64]:
        """[count] ids of tokens ``start`` on; those from ``wrong_from`` on are drafts that are not theirs."""
        positions = np.arange(start, start + count, dtype=np.int64)
        places = (positions % PAGE_TOKENS).astype(np.uint64)
        hashes = self.page_hashes(request_id, positions // PAGE_TOKENS)
        hashes = hashes + places * _GOLDEN + self._seed
        hashes = np.where(positions >= wrong_from, hashes ^ _REJECTED, hashes)
        return (mix(hashes) % np.uint64(self.vocab_size)).astype(np.int64)
