"""Where index queries and keys come from: the model's own projections, or a locality profile's process.

Under a profile the score of position i at a decode is the product of a query and a key, as ever:

    key_i = (u_i, v_i)          96 + 32 normal numbers, a function of the token's content and the indexer
    query(t) = (sqrt((1 - F) / 96) x(t), sqrt(F / 32) y(t))

x and y are AR(1) sequences of vectors in the steps t of a request's output, x slow and y fast, with the
profile's F and correlations (:mod:`hisparsim.locality.process`). So the score of a position is a Gaussian
sequence with the profile's autocorrelation, and hot buffers see the profile's misses. Two heads of weight +1
and -1 carry query and -query, since relu(s) - relu(-s) = s. The newest token is always selected. A unit that
the profile calls incoherent draws its query anew at every step. Prompt tokens use the model's queries.
"""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

from hisparsim.locality.profile import LocalityProfile
from hisparsim.specs.kv_layout import PAGE_TOKENS

from .content import Content
from .errors import RealRunError
from .geometry import INDEX_DIM
from .work import Span

SLOW_DIM = 96
FAST_DIM = INDEX_DIM - SLOW_DIM
REMEMBERED_STEPS = 16
"""Steps back to which a query can be asked again: rejected drafts, at most MAX_QUERY_LEN of them."""


@dataclass
class _Sequence:
    """The queries of one request: state after step ``step``, and the last queries by step."""

    slow: torch.Tensor
    fast: torch.Tensor
    step: int
    recent: deque[tuple[int, torch.Tensor]]


class ProfileSelection:
    """Index keys and decode queries that follow a locality profile."""

    def __init__(self, profile: LocalityProfile, content: Content, num_units: int, seed: int) -> None:
        if profile.process is None:
            raise RealRunError(
                f"locality profile {profile.name!r} is known by its misses only and generates no selections: "
                "use glm-5.1, or --selection model"
            )
        self.process = profile.process
        self.num_incoherent = round(profile.incoherent_share * num_units)
        self.num_units = num_units
        self.content = content
        self.seed = seed
        self._sequences: dict[int, _Sequence] = {}
        self._pages: dict[int, tuple[int, torch.Tensor]] = {}

    # -- keys -------------------------------------------------------------------------------------

    def keys(self, spans: tuple[Span, ...]) -> torch.Tensor:
        """[units, tokens, 128] index keys of a step's tokens, by their content."""
        parts = []
        for span in spans:
            for page in range(span.start // PAGE_TOKENS, (span.end - 1) // PAGE_TOKENS + 1):
                first = page * PAGE_TOKENS
                whole = self._page_keys(span.request_id, page)
                parts.append(whole[:, max(span.start - first, 0) : span.end - first])
        return torch.cat(parts, 1)

    def _page_keys(self, request_id: int, page: int) -> torch.Tensor:
        known = self._pages.get(request_id)
        if known is not None and known[0] == page:
            return known[1]
        content = int(self.content.page_hashes(request_id, np.array([page]))[0])
        keys = self._normal(f"{content}", self.num_units, PAGE_TOKENS, INDEX_DIM)
        self._pages[request_id] = (page, keys)
        return keys

    # -- queries ----------------------------------------------------------------------------------

    def num_model_queries(self, span: Span) -> int:
        """Leading tokens of a span that are prompt and use the model's queries."""
        prompt = self.content.spec(span.request_id).prompt_tokens
        return min(max(prompt - span.start, 0), span.count)

    def queries(self, span: Span) -> torch.Tensor:
        """Change: [units, n, 128] queries of a span's output tokens; moves the request's sequence on."""
        first = span.start - self.content.spec(span.request_id).prompt_tokens
        steps = range(first + self.num_model_queries(span), first + span.count)
        return torch.stack([self._query(span.request_id, step) for step in steps], 1)

    def _query(self, request_id: int, step: int) -> torch.Tensor:
        sequence = self._sequences.get(request_id)
        if sequence is None or step <= sequence.step - REMEMBERED_STEPS:
            slow, fast = self._noise(f"{request_id}/start")
            sequence = _Sequence(slow, fast, -2, deque(maxlen=REMEMBERED_STEPS))
            self._sequences[request_id] = sequence
        while sequence.step < step:
            self._advance(request_id, sequence)
        return next(query for at, query in sequence.recent if at == step)

    def _advance(self, request_id: int, sequence: _Sequence) -> None:
        process = self.process
        sequence.step += 1
        slow_noise, fast_noise = self._noise(f"{request_id}/{sequence.step}")
        slow, fast = process.slow_correlation, process.fast_correlation
        sequence.slow = slow * sequence.slow + (1 - slow**2) ** 0.5 * slow_noise
        sequence.fast = fast * sequence.fast + (1 - fast**2) ** 0.5 * fast_noise
        slow_weight = ((1 - process.fast_share) / SLOW_DIM) ** 0.5
        fast_weight = (process.fast_share / FAST_DIM) ** 0.5
        query = torch.cat([slow_weight * sequence.slow, fast_weight * sequence.fast], 1)
        anew = slice(0, self.num_incoherent)
        query[anew] = torch.cat([slow_noise[anew], fast_noise[anew]], 1)
        sequence.recent.append((sequence.step, query))

    def forget(self, request_id: int) -> None:
        """Change: a request has left for good."""
        self._sequences.pop(request_id, None)
        self._pages.pop(request_id, None)

    def _noise(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        noise = self._normal(name, self.num_units, INDEX_DIM)
        return noise[:, :SLOW_DIM], noise[:, SLOW_DIM:]

    def _normal(self, name: str, *shape: int) -> torch.Tensor:
        digest = hashlib.blake2b(f"{self.seed}/{name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        return torch.randn(*shape, generator=generator)
