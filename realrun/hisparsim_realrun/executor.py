"""The executor: performs a step's work on one rank.

Life of a step::

    begin     the plan's actions change the block tables and hot buffers; loads start
    forward   every layer: project, write rows and index keys, select, resolve, gather or stage, attend, MLP
    mirror    new rows go to the host, where the policy says so
    finish    sampled tokens come back; write-backs that move bytes start

Every row is read from wherever the tables say that it lies: a resident page, a hot row, a host row fetched
into the hot buffer, or (prefill) a staged page. Nothing else about a policy reaches the numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from hisparsim.cost.terms import Term
from hisparsim.serving.plan import Load, Restore, WriteBack

from .clock import StepClock
from .content import Content
from .copies import CopyEngine
from .cpu_kernels import CpuKernels
from .errors import RunDied
from .geometry import Unit
from .model import Model, Projected, rope_angles
from .pools import Pools
from .recorded import RecordedSelections, SelectionRecorder
from .residency import Residency, Staging
from .selection import ProfileSelection
from .step_tokens import StepTokens, step_tokens
from .tables import TableChanges
from .tier import PrefixTier
from .work import Span, StepWork

if TYPE_CHECKING:
    from .device_decode import DeviceDecode

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class StepOutput:
    """What a step produced and moved."""

    sampled: dict[int, list[int]]
    """Tokens that each request gained, by the seeded head."""
    missed_rows: int
    """Rows of all layers fetched into hot buffers."""
    h2d_bytes: int
    """Moved inside the step, one rank: misses and staging."""
    d2h_bytes: int
    terms_ns: dict[Term, int]


@dataclass(frozen=True, slots=True)
class Mirrors:
    """Whose new rows a step copies to the host."""

    prefill: bool
    decode: bool


class Executor:
    """One rank's model, pools and tables."""

    def __init__(
        self,
        model: Model,
        pools: Pools,
        residency: Residency,
        kernels: CpuKernels,
        content: Content,
        copies: CopyEngine,
        clock: StepClock,
        *,
        mirrors: Mirrors,
        writes_host: bool,
        process: ProfileSelection | None = None,
        decoder: DeviceDecode | None = None,
    ) -> None:
        self.model = model
        self.pools = pools
        self.residency = residency
        self.kernels = kernels
        self.content = content
        self.copies = copies
        self.clock = clock
        self.mirrors = mirrors
        self.writes_host = writes_host
        """This rank fills the host pool; others only read it."""
        self.process = process
        self.decoder = decoder
        """Serves the decodes on the device from selection to rows; None = the host resolves."""
        self.tier = PrefixTier()
        self.hidden: dict[tuple[int, int], torch.Tensor] | None = None
        """(request, position) -> final hidden state, kept where a dictionary is put here."""
        self.recorder: SelectionRecorder | None = None
        self.recorded: RecordedSelections | None = None
        self._moved_h2d = 0
        self._moved_d2h = 0

    # -- a step -----------------------------------------------------------------------------------

    def run(self, work: StepWork) -> StepOutput:
        """Change: perform a step.

        Raises:
            RunDied: a row is nowhere to be read, or a result is not finite.
        """
        self._moved_h2d = self._moved_d2h = 0
        missed_before = self.residency.counts.missed
        self.clock.start()
        self._begin(work)
        sampled: dict[int, list[int]] = {}
        if work.spans:
            tokens = step_tokens(work.spans, self.residency, self.pools.num_staging_blocks, self.process)
            hidden = self._forward(tokens)
            self._mirror(tokens)
            sampled = self._sample(tokens, hidden)
            if self.decoder is not None:
                self._moved_h2d += self.decoder.count_rows() * self.pools.geometry.layout.row_bytes
        self._finish(work)
        return StepOutput(
            sampled,
            self.residency.counts.missed - missed_before,
            self._moved_h2d,
            self._moved_d2h,
            self.clock.finish(),
        )

    def _begin(self, work: StepWork) -> None:
        changes = TableChanges()
        for action in work.plan.actions:
            self.residency.tables.apply(action, changes)
            self.residency.settle(changes)
            if self.decoder is not None:
                self.decoder.settle(changes)
            changes.emptied.clear()
            changes.warmed.clear()
            if isinstance(action, Load):
                self._load(action)
            elif isinstance(action, Restore):
                blocks, host = action.resident_blocks[None], np.array([action.host_block], np.int64)
                self._moved_h2d += self.pools.copy_to_gpu(blocks, host)
        self.clock.mark(Term.LAUNCH)

    def _load(self, action: Load) -> None:
        host_blocks = self.tier.find(action.host_keys)
        blocks = action.blocks[:, None]
        self.copies.start(
            action.transfer_id, action.request_id, lambda: self.pools.copy_to_gpu(blocks, host_blocks)
        )

    def _finish(self, work: StepWork) -> None:
        for action in work.plan.actions:
            if not isinstance(action, WriteBack):
                continue
            if not self.pools.geometry.packed:
                keys = self.content.spec(action.request_id).page_keys
                assert keys is not None
                pages = slice(action.first_page, action.first_page + len(action.host_blocks))
                self.tier.store(keys[pages], action.host_blocks)
            if action.num_bytes and self.writes_host:
                blocks, host_blocks = action.resident_blocks, action.host_blocks
                self.copies.start(
                    action.transfer_id,
                    None,
                    lambda blocks=blocks, host=host_blocks: self.pools.copy_to_host(blocks, host),  # type: ignore[misc]
                )

    # -- forward ----------------------------------------------------------------------------------

    def _forward(self, tokens: StepTokens) -> torch.Tensor:
        model, device = self.model, self.pools.gpu.device
        ids = np.concatenate(
            [
                self.content.token_ids(span.request_id, span.start, span.count, span.wrong_from)
                for span in tokens.spans
            ]
        )
        x = model.embed(torch.from_numpy(ids).to(device))
        positions = torch.from_numpy(tokens.positions).to(device)
        angles = rope_angles(positions, model.spec.qk_rope_head_dim)
        main_hidden = x
        if self.decoder is not None:
            self.decoder.begin(tokens.spans[: tokens.num_decodes])
        for unit in self.pools.geometry.units:
            slots: list[Ints] = []
            counts: Ints = np.empty(0, np.int64)
            stagings: dict[int, Staging] = {}
            for layer in unit.layers:
                if layer == model.spec.num_layers:
                    main_hidden = x
                normed = model.norm(x)
                self.clock.mark(Term.NORMS)
                projected = model.project(layer, normed, angles)
                self.kernels.write_rows(layer, projected.latent, projected.rope, tokens.rows[unit.group])
                self._mark(tokens, Term.DECODE_PROJECTIONS, Term.PREFILL_PROJECTIONS)
                if layer == unit.layers[0]:
                    selections = self._select(tokens, unit, normed, projected)
                    slots, counts, stagings = self._place(tokens, unit, selections)
                attended = self._attend(tokens, layer, projected.queries, slots, counts, stagings)
                x = x + model.project_out(layer, attended)
                normed = model.norm(x)
                self.clock.mark(Term.NORMS)
                x = x + model.feed_forward(layer, normed)
        if model.num_layers == model.spec.num_layers:
            main_hidden = x
        return model.norm(main_hidden)

    def _mark(self, tokens: StepTokens, decode: Term, prefill: Term) -> None:
        self.clock.split(decode, prefill, tokens.num_decode_tokens, len(tokens.positions))

    def _select(
        self, tokens: StepTokens, unit: Unit, normed: torch.Tensor, projected: Projected
    ) -> list[Ints]:
        """Write the tokens' index keys; of each span [count, top_k] selected positions."""
        model = self.model
        index = model.weights.layers[unit.layers[0]].index
        assert index is not None
        drawn_keys = tokens.keys
        keys = model.index_keys(index, normed) if drawn_keys is None else drawn_keys[unit.index].to(normed)
        queries, weights = model.index_queries(index, projected.q_rank, normed)
        page_rows = self.residency.page_rows
        pages, places = np.divmod(tokens.positions, page_rows)
        tables = self.residency.tables
        blocks = np.concatenate(
            [
                tables[span.request_id].index[pages[part]]
                for span, part in zip(tokens.spans, tokens.parts, strict=True)
            ]
        )
        self.kernels.write_keys(unit.index, keys, blocks.astype(np.int64), places)
        selections = []
        waiting: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        for number, (span, part) in enumerate(zip(tokens.spans, tokens.parts, strict=True)):
            own, heads = queries[part], weights[part]
            keep_newest = torch.zeros(span.count, dtype=torch.bool)
            if number in tokens.queries:
                own, heads = own.clone(), heads.clone()
                drawn = tokens.queries[number][unit.index].to(own)
                first = span.count - len(drawn)
                own[first:, 0], own[first:, 1] = drawn, -drawn
                heads[first:] = 0.0
                heads[first:, 0], heads[first:, 1] = 1.0, -1.0
                keep_newest[first:] = True
            if self.decoder is not None and not span.is_prefill:
                waiting.append((own, heads, keep_newest))
                selections.append(np.empty((0, self.kernels.top_k), np.int64))
                continue
            table = tables[span.request_id].index.astype(np.int64)
            selection = self.kernels.select(unit.index, own, heads, table, span.start, keep_newest)
            if (selection[:, 0] < 0).any():  # a token sees itself, so there is always something to select
                raise RunDied(f"request {span.request_id}: its index logits are not finite (NaN)")
            selections.append(self._noted(span, unit, selection))
            self.clock.mark(Term.PREFILL_INDEXER if span.is_prefill else Term.DECODE_INDEXER)
        tokens.placed = None
        if self.decoder is not None and waiting:
            own, heads, keep_newest = (torch.cat(parts) for parts in zip(*waiting, strict=True))
            spans, new_rows = tokens.spans[: len(waiting)], tokens.rows[unit.group]
            tokens.placed = self.decoder.place(spans, unit, own, heads, keep_newest, new_rows)
            self.clock.mark(Term.DECODE_INDEXER)
        return selections

    def _noted(self, span: Span, unit: Unit, selection: Ints) -> Ints:
        """A selection as it will be read: from the recording, if there is one, and put on record."""
        prompt = self.content.spec(span.request_id).prompt_tokens
        if self.recorded is not None:
            selection = self.recorded.replace(span, unit, selection, prompt)
        if self.recorder is not None and not span.is_prefill:
            self.recorder.note(span, unit, selection, prompt)
        return selection

    def close(self) -> None:
        """Change: finish copies and files."""
        self.copies.close()
        if self.recorder is not None:
            self.recorder.close()

    def _place(
        self, tokens: StepTokens, unit: Unit, selections: list[Ints]
    ) -> tuple[list[Ints], Ints, dict[int, Staging]]:
        """Flat rows of every selection, with missed rows fetched for all layers of the unit."""
        residency = self.residency
        slots: list[Ints] = []
        stagings: dict[int, Staging] = {}
        host_rows: list[Ints] = []
        rows: list[Ints] = []
        for span, selection in zip(tokens.spans, selections, strict=True):
            if span.is_prefill or tokens.placed is not None:
                slots.append(np.empty(0, np.int64))
                continue
            residency.place_direct(span, unit)
            resolved = residency.resolve(span, unit, selection)
            slots.append(resolved.rows)
            host_rows.append(resolved.miss_host_rows)
            rows.append(resolved.miss_rows)
        self.clock.mark(Term.RESOLVE)
        if host_rows and sum(map(len, host_rows)):
            sources, targets = np.concatenate(host_rows), np.concatenate(rows)
            for layer in unit.layers:
                self.kernels.copy_from_host(layer, sources, targets)
            self._moved_h2d += len(sources) * len(unit.layers) * self.pools.geometry.layout.row_bytes
        self.clock.mark(Term.HOT_GATHER)
        for numbers in tokens.passes:
            first_block = 0
            for number in numbers:
                span, selection = tokens.spans[number], selections[number]
                if not span.is_prefill:
                    continue
                staging = residency.stage(span, unit.group, first_block)
                stagings[number] = staging
                first_block += len(staging.staged_rows) // residency.page_rows
                pages, places = np.divmod(np.maximum(selection, 0), residency.page_rows)
                slots[number] = np.where(selection >= 0, staging.rows[pages] + places, 0)
        self.clock.mark(Term.STAGING)
        counts = np.concatenate([np.count_nonzero(selection >= 0, 1) for selection in selections])
        return slots, counts, stagings

    def _attend(
        self,
        tokens: StepTokens,
        layer: int,
        queries: torch.Tensor,
        slots: list[Ints],
        counts: Ints,
        stagings: dict[int, Staging],
    ) -> torch.Tensor:
        num_shards = len(self.model.weights.layers[layer].shards)
        scale, outs, before = self.model.scale, [], 0
        if tokens.placed is not None:
            assert self.decoder is not None
            before = tokens.num_decode_tokens
            outs.append(self.decoder.attend(layer, queries[:before], tokens.placed, scale))
        for batch in tokens.passes:
            numbers = [number for number in batch if not before or tokens.spans[number].is_prefill]
            if not numbers:
                continue
            for number in numbers:
                staging = stagings.get(number)
                if staging is not None and len(staging.staged_rows):
                    self.kernels.copy_from_host(layer, staging.host_rows, staging.staged_rows)
                    self._moved_h2d += len(staging.host_rows) * self.pools.geometry.layout.row_bytes
            self.clock.mark(Term.STAGING)
            part = slice(tokens.parts[numbers[0]].start, tokens.parts[numbers[-1]].stop)
            rows = np.concatenate([slots[number] for number in numbers])
            own_counts = counts[part.start - before : part.stop - before]
            outs.append(self.kernels.attend(layer, queries[part], rows, own_counts, scale, num_shards))
        self._mark(tokens, Term.DECODE_SPARSE, Term.PREFILL_SPARSE)
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    # -- after the layers -------------------------------------------------------------------------

    def _mirror(self, tokens: StepTokens) -> None:
        chosen = [
            number
            for number, span in enumerate(tokens.spans)
            if (self.mirrors.prefill if span.is_prefill else self.mirrors.decode)
        ]
        if not chosen:
            return
        host_rows = np.concatenate([self.residency.host_rows(tokens.spans[number]) for number in chosen])
        self._moved_d2h += len(host_rows) * self.model.num_layers * self.pools.geometry.layout.row_bytes
        if self.writes_host:
            for layer in range(self.model.num_layers):
                own = tokens.rows[self.pools.geometry.group_of(layer)]
                rows = np.concatenate([own[tokens.parts[number]] for number in chosen])
                self.kernels.copy_to_host(layer, rows, host_rows)
        self.clock.mark(Term.MIRROR)

    def _sample(self, tokens: StepTokens, hidden: torch.Tensor) -> dict[int, list[int]]:
        if self.hidden is not None:
            for span, part in zip(tokens.spans, tokens.parts, strict=True):
                for position, state in zip(range(span.start, span.end), hidden[part], strict=True):
                    if position < span.wrong_from:
                        self.hidden[span.request_id, position] = state.clone()
        wanted = [
            part.start + span.first_yield + i
            for span, part in zip(tokens.spans, tokens.parts, strict=True)
            for i in range(span.num_yields)
        ]
        if not wanted:
            return {}
        chosen = hidden[torch.tensor(wanted, device=hidden.device)]
        if not bool(torch.isfinite(chosen).all()):
            owners = [span.request_id for span in tokens.spans for _ in range(span.num_yields)]
            bad = owners[int((~torch.isfinite(chosen)).any(1).nonzero()[0])]
            raise RunDied(f"request {bad}: its hidden state is not finite (NaN or infinity)")
        drawn = iter(self.model.sample(chosen).tolist())
        self.clock.mark(Term.SAMPLING)
        return {span.request_id: [next(drawn) for _ in range(span.num_yields)] for span in tokens.spans}
