"""The torch engine: any strategy on any device, without a loop over requests and without waiting for the device.

Scalars of every drafted position come first, in float64; then the decision; then one draw per request at its stopping
row. From probabilities only the drafted entries and two rows per request are read, unless a rule asks for more. Rows
are taken in chunks of bounded size, so that scratch memory stays in the cache and does not grow with B. On the CPU,
where looking at values costs nothing, rows that have to be processed are read only as far as chains reach, and drawn
from while they are held. Greedy requests are left to `chains` if they are few or have long rows, and a single request
with a short chain is left to `single`.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import torch

from acceptlib import ops
from acceptlib.arrays import Array, all_so_far, arange, as_array, as_tensor, float64, full, library, log2, maybe_any
from acceptlib.engine import chains, decide, single
from acceptlib.engine.constants import (
    MAGNITUDE_LIMIT,
    MAGNITUDE_SCALE,
    ROW_SUM_LIMIT,
    ROW_TOLERANCE,
    SUM_SCALE,
    WEIGHT_SCALE,
)
from acceptlib.engine.draw import draw, weigh
from acceptlib.engine.plan import Plan, evaluate
from acceptlib.engine.rows import KEPT_BYTES, Layout, RowReader, cleaned
from acceptlib.engine.scratch import SCRATCH_BYTES, fours, in_use, scratch, to_fixed
from acceptlib.errors import AcceptlibError
from acceptlib.inputs import Inputs
from acceptlib.result import (
    INVALID_ROW,
    INVALID_TOKEN_ID,
    OK,
    PLACEHOLDER_TOKEN_ID,
    UNNORMALIZED_ROW,
    VerifyResult,
)
from acceptlib.rng import Root

PROBS: Final = frozenset({"target_prob", "draft_prob"})
"""Quantities that are one entry of a row."""

DEVICE_SCRATCH_BYTES: Final = 64 << 20
"""Size of one chunk of float32 rows on a GPU, where every chunk takes some dozens of launches."""

ENTROPY_GRID: Final = 1.5 * 2.0**8
"""Adding and subtracting it rounds a small float64 to a multiple of 2^-44. Sums of these are exact up to 2^9."""


def verify(plan: Plan, inputs: Inputs) -> VerifyResult:
    """Run `plan` on validated inputs; see `AcceptanceStrategy.verify`."""
    # Results are made outside of inference mode, so that the caller may use them like any tensor.
    most = inputs.max_num_draft_tokens
    out = inputs.out or VerifyResult.empty(inputs.num_requests, most, inputs.device, logprobs=inputs.logprobs)
    if inputs.num_requests:
        with torch.inference_mode(), np.errstate(all="ignore"), in_use():
            try:
                _run(plan, inputs, out)
            except BaseException as error:
                if not isinstance(error, AcceptlibError):
                    # If an interrupt left a guard of inference mode in a frame, it would be undone after ours is.
                    traceback.clear_frames(error.__traceback__)
                raise
    return out


def _run(plan: Plan, inputs: Inputs, out: VerifyResult) -> None:
    if chains.can_walk(plan, inputs):
        chains.walk(inputs, out)
    elif single.can_step(plan, inputs):
        single.step(plan, inputs, out)
    else:
        _Step(plan, inputs).run(out)


class _Step:
    """One call, with what every stage of it needs."""

    def __init__(self, plan: Plan, inputs: Inputs) -> None:
        self.plan = plan
        self.inputs = inputs
        size = SCRATCH_BYTES if inputs.target.data.is_cpu else DEVICE_SCRATCH_BYTES
        self.chunk = max(1, size // (4 * inputs.vocab_size))
        self.layout = Layout(inputs, reads_draft=plan.reads_draft)
        common = (self.layout, inputs.vocab_size, self.chunk)
        self.target = RowReader(inputs.target, *common, "target")
        self.draft = None
        if inputs.max_num_draft_tokens and inputs.draft is not None and plan.reads_draft and inputs.draft.data.numel():
            self.draft = RowReader(inputs.draft, *common, "draft")
        state = {name: as_array(value) for name, value in inputs.state.items()}
        most = inputs.max_num_draft_tokens
        self.values = decide.positional(plan, self.layout.num_draft_tokens, most, state)
        self.wanted = plan.scalars | {"target_prob"} if inputs.logprobs else plan.scalars
        self.flat: decide.Values = {}
        # Found by `run`, as far as positions have been read: what passes between them, and which are accepted.
        self.carry: Any = None
        self.accepted: Any = None
        self.walks = self._walks()
        # Whether rows of some requests are held at a time: those that stop there draw before the next take their place.
        self.holds = self.walks and inputs.num_requests > 1
        # Which requests have nothing kept yet, and the token, `Status` and probability of the others: see `_keep`.
        self.missing = np.ones(inputs.num_requests, bool)
        self.emitted = [np.zeros(inputs.num_requests, dtype) for dtype in (np.int64, np.int64, np.float32)]

    def run(self, out: VerifyResult) -> None:
        """Decide, draw and write."""
        plan, layout = self.plan, self.layout
        accept_uniforms, emit_bits = self._uniforms()
        for some in self._passes():
            self._read(some)
            faults = self._position_faults()
            self.carry = decide.run_carry(plan, self.values, layout.ids)
            h = decide.acceptance(plan, self.values, self.carry, self._next_residual_mass)
            sound = layout.valid if faults is None else all_so_far((faults == OK) & layout.valid)
            self.accepted = (accept_uniforms < h) & sound
            if self.holds:
                self._emit_ended(some, emit_bits)
        if out.num_passed is not None:
            passed = self.accepted.sum(1)
            as_array(out.num_passed)[:] = passed if layout.faults is None else passed * (layout.faults == OK)
        may_stand = decide.forgiven(plan, self.values, self.carry)
        if may_stand is not None:
            may_stand = may_stand & sound
        stop = decide.stop_position(plan, self.accepted, may_stand, layout.num_draft_tokens)
        status: Array | int = OK
        if layout.faults is not None:
            stop = stop * (layout.faults == OK)
        if faults is not None:
            status = (faults * (layout.position == stop[:, None])).sum(1)
        if layout.faults is not None:
            status = ops.where(layout.faults == OK, status, layout.faults)
        self._write(out, stop, status, *self._emit(stop, emit_bits))

    def _walks(self) -> bool:
        """Return whether positions are read one after the other, only for requests whose chains go on.

        That pays where whole rows are needed and the host may look at the decisions.
        """
        plan, layout = self.plan, self.layout
        whole_rows = not self.wanted <= PROBS or self.target.is_logits or (self.draft and self.draft.is_logits)
        size = 4 * len(layout.flat_position) * self.inputs.vocab_size
        return (
            isinstance(layout.flat_position, np.ndarray)
            and plan.traits.stop == "first_rejection"
            and plan.reads.isdisjoint({"is_target_argmax", "next_residual_mass"})
            and not self.inputs.counts_passed
            and bool(self.wanted and whole_rows)
            and size > (SCRATCH_BYTES if layout.shape[0] == 1 else KEPT_BYTES)
        )

    def _passes(self) -> Iterator[slice | Array]:
        """Yield the flat positions to read at a time: all of them, unless rows may be read in vain."""
        layout = self.layout
        num_requests, most = layout.shape
        # A softmax gives each thread a row, so a single request advances by as many positions as there are threads.
        step = torch.get_num_threads() if num_requests == 1 else 1
        if not self.walks or (step >= most and not self.holds):
            yield slice(None)
            return
        for start in range(0, most, step):
            reached = (layout.flat_position >= start) & (layout.flat_position < start + step)
            if start:
                reached &= self.accepted[:, :start].all(1)[layout.flat_request]
            found = np.flatnonzero(reached)
            if not len(found):
                return
            each = max(1, KEPT_BYTES // (4 * self.inputs.vocab_size)) if self.holds else len(found)
            for first in range(0, len(found), each):
                yield found[first : first + each]

    def _uniforms(self) -> tuple[Array, torch.Tensor]:
        uniforms = self.inputs.uniforms
        rng = self.inputs.rng
        if isinstance(rng, Root):
            rng = rng.streams(self.inputs.num_requests, self.inputs.device)
        if rng is not None:
            uniforms = rng.uniforms(self.inputs.max_num_draft_tokens)
            if rng.advances:
                rng.offsets.add_(1)
        assert uniforms is not None  # noqa: S101 - `prepare` gives one of the two
        accept = as_array(uniforms.accept)
        return (self.layout.to_grid(accept) if accept.ndim == 1 else accept), uniforms.emit

    def _read(self, some: slice | Array) -> None:
        """Fill in what rules read of the rows at some flat positions."""
        layout = self.layout
        flat = (layout.flat_request[some], layout.flat_position[some], layout.flat_ids[some])
        if self.holds:
            for name, reader in (("target_prob", self.target), ("draft_prob", self.draft)):
                if reader is not None and (name in self.wanted or not self.wanted <= PROBS):
                    reader.hold(*flat[:2])
        for name, value in self._row_scalars(*flat).items():
            if isinstance(some, slice):
                self.flat[name] = value
            else:
                if name not in self.flat:
                    self.flat[name] = full(layout.flat_position.shape, 0.0, value)
                self.flat[name][some] = value
            self.values[name] = layout.to_grid(self.flat[name])

    def _row_scalars(self, request: Array, position: Array, ids: Array) -> decide.Values:
        """Return what rules read of the rows at some positions and drafted tokens: [n] by name."""
        values: decide.Values = {}
        if "is_target_argmax" in self.plan.reads:
            best, values["has_law"] = self.target.argmax(request, position, every_row=True)
            values["is_target_argmax"] = best == ids
        if "draft_token_id" in self.plan.reads:
            values["draft_token_id"] = float64(ids)
        if not len(ids):
            values |= {name: float64(ids) for name in self.wanted}
        elif self.wanted:
            entries_only = self.wanted <= PROBS
            by_entry = {
                name: reader
                for name, reader in (("target_prob", self.target), ("draft_prob", self.draft))
                if reader is not None and name in self.wanted and (entries_only or not reader.is_logits)
            }
            values |= {name: reader.probs(request, position, ids) for name, reader in by_entry.items()}
            if not entries_only:
                values |= self._reductions(request, position, ids, self.wanted.difference(by_entry))
        if "draft_prob" in values:
            values["draft_prob"] = ops.where(values["draft_prob"] > 0, values["draft_prob"], 0.0)
        elif "draft_prob" in self.wanted:
            values["draft_prob"] = full(ids.shape, 1.0, ids)
        return values

    def _reductions(self, request: Array, position: Array, ids: Array, wanted: frozenset[str]) -> decide.Values:
        """Return scalars that need whole rows, for drafted tokens at some positions: [n] float64 by name."""
        read = {name for row_sum in self.plan.used_row_sums.values() for name in row_sum.names}
        parts = [
            self._reduced(request[chunk], position[chunk], ids[chunk], PROBS & (wanted | read))
            for chunk in self._chunks(len(ids))
        ]
        found = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        values = {name: float64(as_array(value)) for name, value in found.items()}
        if "target_max_prob" in wanted:
            largest = values["target_max_prob"]
            values["target_max_prob"] = ops.where((largest > 0) & (largest < torch.inf), largest, torch.nan)
        return {name: values[name] for name in wanted}

    def _reduced(
        self, request: Array, position: Array, ids: Array, gathered: frozenset[str]
    ) -> dict[str, torch.Tensor]:
        """Return the tensors [n] behind `_reductions` for one chunk of rows; of `PROBS`, those that are `gathered`."""
        elements, _ = self._elements(request, position)
        p, q, column = elements["p"], elements["q"], as_tensor(ids)[:, None]
        found = {
            name: rows.gather(1, column) for name, rows in (("target_prob", p), ("draft_prob", q)) if name in gathered
        }
        read = {**elements, **found}
        found = {name: prob[:, 0] for name, prob in found.items()}
        if "target_max_prob" in self.wanted:
            found["target_max_prob"] = p.amax(1)
        if "draft_max_prob" in self.wanted:
            found["draft_max_prob"] = q.amax(1) if self.draft is None else self.draft.largest(request, position, q)
        if "target_entropy" in self.wanted:
            found["target_entropy"] = _entropy(p)
        if "target_top_entropy" in self.wanted:
            top = p.topk(min(self.plan.traits.top_k, p.shape[1]), dim=1).values.to(torch.float64).clamp_(min=0)
            top = top / top.sum(1, keepdim=True)
            found["target_top_entropy"] = -torch.xlogy(top, top).sum(1)
        if "position" in self.plan.reads:
            read["position"] = as_tensor(position)[:, None].to(torch.float32)
        for name in self.values.keys() & self.plan.constants.keys():  # constants with one value per position
            read[name] = as_tensor(self.values[name][request, position])[:, None].to(torch.float32)
        for name, row_sum in self.plan.used_row_sums.items():
            terms = decide.broadcast(evaluate(row_sum, read, self.plan.numbers), p).to(torch.float32)
            found[name] = _sum(terms)
        return found

    def _next_residual_mass(self) -> Array:
        """Return the mass of the residual at the next row, [B, K] float64; 0 where that row has no law."""
        layout = self.layout
        masses = []
        for chunk in self._chunks(len(layout.flat_position)):
            request, position = layout.flat_request[chunk], layout.flat_position[chunk]
            elements, _ = self._elements(request, position)
            residual = self._residual(request, position, elements)
            weights = residual.clamp(min=0).nan_to_num_(0.0, posinf=0.0)
            masses.append(to_fixed(weights, WEIGHT_SCALE, in_place=True).sum(1))
        mass = full(layout.shape, 0.0, self.carry)
        if masses:
            own = layout.to_grid(as_array(torch.cat(masses))) * layout.valid
            mass[:, :-1] = float64(own[:, 1:]) / WEIGHT_SCALE
        return mass

    def _elements(self, request: Array, position: Array) -> tuple[dict[str, torch.Tensor], Array | float]:
        """Return the rows [n, V] float32 that elementwise rules read at some positions, and the draft rows' mass."""
        p = self.target.rows(request, position)
        elements, draft_mass = {"p": p, "q": p}, 0.0
        if "is_drafted" in self.plan.reads or (self.plan.reads_draft and self.draft is None):
            at = request, ops.minimum(position, self.layout.shape[1] - 1)
            ids = ops.where(self.layout.outside[at], -1, self.layout.ids[at])
            elements["is_drafted"] = torch.arange(p.shape[1], device=p.device) == as_tensor(ids)[:, None]
        if self.draft is not None:
            given = self.draft.rows(request, position)
            elements["q"], draft_mass = cleaned(given, is_logits=self.draft.is_logits)
        elif self.plan.reads_draft:
            elements["q"] = elements["is_drafted"].to(torch.float32)
        return elements, draft_mass

    def _residual(self, request: Array, position: Array, elements: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the residual [n, V] float32 at some positions, before it is clamped at 0; NaN stays NaN."""
        residual = self.plan.residual
        if residual is None:
            return elements["p"]
        at = ops.minimum(position, self.layout.shape[1] - 1)
        grids = {**self.values, "carry": self.carry}
        scalars = {name: as_tensor(grid[request, at]) for name, grid in grids.items() if name in residual.names}
        scalars = {
            name: value[:, None] if value.dtype == torch.bool else value[:, None].to(torch.float32)
            for name, value in scalars.items()
        }
        weights = evaluate(residual, {**scalars, **elements}, self.plan.numbers)
        row: torch.Tensor = decide.broadcast(weights, elements["p"])
        return row.to(torch.float32)

    def _position_faults(self) -> Array | None:
        """Return the `Status` of each drafted position by itself, [B, K] int64; None if all are seen to be OK."""
        bad, prob, has_law = self.layout.outside, None, self.values.get("has_law")
        if "target_prob" in self.plan.reads:
            prob = self.values["target_prob"]
            bad = bad | ~((prob >= 0) & (prob <= 1 + ROW_TOLERANCE))
        if has_law is not None:
            bad = bad | ~has_law
        if not maybe_any(bad):
            return None
        status = self.layout.outside * OK
        if prob is not None:
            status = ops.where(prob > 1 + ROW_TOLERANCE, UNNORMALIZED_ROW, status)
            status = ops.where((prob >= 0) & (prob < torch.inf), status, INVALID_ROW)
        # Ids are clamped, so the probability above is another token's.
        status = ops.where(self.layout.outside, INVALID_TOKEN_ID, status)
        if has_law is not None:
            status = ops.where(has_law, status, INVALID_ROW)
        return status * self.layout.valid

    def _emit(self, stop: Array, bits: torch.Tensor) -> tuple[Array, Array, Array | None]:
        """Return each request's token at its stopping row, the row's `Status`, and the probability if asked for."""
        request = self.layout.request
        if self.inputs.bonus_token_ids is not None and not self.inputs.logprobs and isinstance(stop, np.ndarray):
            takes_given, token, status = self._given_bonus(request, stop)  # what these emit does not depend on rows
            self._keep(request[takes_given], token[takes_given], status[takes_given], None)
        if self.missing.all():
            return self._emit_from_rows(request, stop, bits)
        rest = np.flatnonzero(self.missing)
        if len(rest):
            self._keep(rest, *self._emit_from_rows(rest, stop[rest], bits[as_tensor(rest)]))
        token, status, prob = self.emitted
        return token, status, prob if self.inputs.logprobs else None

    def _emit_ended(self, some: Array, bits: torch.Tensor) -> None:
        """Emit for the requests whose chains end at some flat positions, while their rows are held."""
        request, position = self.layout.flat_request[some], self.layout.flat_position[some]
        ended = ~self.accepted[request, position]
        if ended.any():
            request = request[ended]
            self._keep(request, *self._emit_from_rows(request, position[ended], bits[as_tensor(request)]))

    def _keep(self, request: Array, *found: Array | None) -> None:
        """Keep what some requests emit, in the order of `_emit`; None for what nobody asked for."""
        self.missing[request] = False
        for whole, part in zip(self.emitted, found, strict=True):
            if part is not None:
                whole[request] = part

    def _emit_from_rows(self, request: Array, position: Array, bits: torch.Tensor) -> tuple[Array, Array, Array | None]:
        """Return what `_emit` does for some requests at their stopping positions, a chunk of rows at a time."""
        parts = [self._emit_some(request[c], position[c], bits[c]) for c in self._chunks(len(request))]
        if len(parts) == 1:
            return parts[0]
        token, status, prob = zip(*parts, strict=True)
        join = library(request).concatenate
        return join(token), join(status), join(prob) if self.inputs.logprobs else None

    def _given_bonus(self, request: Array, position: Array) -> tuple[Array, Array, Array]:
        """Return which of some requests take their given bonus tokens, those tokens, and the `Status` of each."""
        assert self.inputs.bonus_token_ids is not None  # noqa: S101 - for the type checker
        layout, given = self.layout, as_array(self.inputs.bonus_token_ids.to(torch.int64))[request]
        outside = (given < 0) | (given >= self.inputs.vocab_size)
        takes = (position == layout.num_draft_tokens[request]) & layout.reached_end[request]
        return takes, given * ~outside, outside * INVALID_TOKEN_ID

    def _emit_some(self, request: Array, position: Array, bits: torch.Tensor) -> tuple[Array, Array, Array | None]:
        """Return what `_emit_from_rows` does, for one chunk."""
        plan, traits = self.plan, self.plan.traits
        is_bonus = position == self.layout.num_draft_tokens[request]
        # A plain boolean where recovered and bonus tokens are taken alike.
        differ = traits.recovered != traits.bonus
        takes_best = (is_bonus == (traits.bonus == "argmax")) if differ else traits.bonus == "argmax"
        status = token = position * 0
        p = prob = None
        # If bonus tokens are given and nothing was drafted, there may be no row at all.
        has_rows = self.inputs.target.data.numel() > 0
        if has_rows and (plan.draws or self.inputs.logprobs):
            p, weights, from_target, row_status = self._weights(request, position, is_bonus)
            if plan.draws:
                status = row_status
            if plan.samples and maybe_any(takes_best ^ True):
                token = as_array(draw(weights, bits, in_place=weights is not p))
        if has_rows and "argmax" in {traits.recovered, traits.bonus}:
            every_row = "is_target_argmax" in plan.reads
            best, has_law = self.target.argmax(request, position, every_row=every_row, rows=p)
            if plan.residual is None:
                status = ops.where(has_law, status, INVALID_ROW)
            else:
                best = ops.where(from_target, best, as_array(weights).argmax(1))
            token = ops.where(takes_best, best, token)
        if self.inputs.bonus_token_ids is not None:
            takes_given, given, given_status = self._given_bonus(request, position)
            token = ops.where(takes_given, given, token)
            status = ops.where(takes_given, given_status, status)
        if self.inputs.logprobs and p is not None:
            prob = as_array(p.gather(1, as_tensor(token)[:, None])[:, 0])
        return token, status, prob

    def _weights(
        self, request: Array, position: Array, is_bonus: Array
    ) -> tuple[torch.Tensor, torch.Tensor, Array, Array]:
        """Return the target's rows, the draw's weights, which of these are the target's, and the rows' `Status`."""
        elements: dict[str, torch.Tensor] = {}
        if self.plan.residual is None or not self.layout.shape[1] or not maybe_any(~is_bonus):
            p = residual = self.target.rows(request, position)
            draft_mass = 0.0
        else:
            elements, draft_mass = self._elements(request, position)
            p, residual = elements["p"], self._residual(request, position, elements)
            draft_mass = ops.where(is_bonus, 0.0, draft_mass)  # the row is another position's there
        return p, *weigh(p, residual, elements, is_bonus, draft_mass, is_logits=self.target.is_logits)

    def _write(
        self, out: VerifyResult, stop: Array, status: Array | int, token: Array, row_status: Array, prob: Array | None
    ) -> None:
        """Fill in the result."""
        most = self.layout.shape[1]
        status = ops.where(status == OK, row_status, status)
        emitted = status == OK
        is_last = arange(most + 1, stop) == stop[:, None]
        stands = self.layout.position < stop[:, None]
        if out.logprobs is not None:
            assert prob is not None  # noqa: S101 - `wanted` has the target's probability
            probs = ops.where(is_last, ops.where(emitted, float64(prob), torch.nan)[:, None], torch.nan)
            probs[:, :most] = ops.where(stands, self.values["target_prob"], probs[:, :most])
            out.logprobs.copy_(as_tensor(probs).log())
        tokens = ops.where(is_last, ops.where(emitted, token, PLACEHOLDER_TOKEN_ID)[:, None], PLACEHOLDER_TOKEN_ID)
        tokens[:, :most] = ops.where(stands, self.layout.ids, tokens[:, :most])
        as_array(out.output_token_ids)[:] = tokens  # only now: the drafted ones may lie there
        if out.logprobs is not None and out.raw_logprobs is not None:
            out.raw_logprobs.copy_(out.logprobs)
            if not self.inputs.target.is_plain:
                raw = self.target.raw_logprobs(stop, out.output_token_ids)
                out.raw_logprobs.copy_(raw.masked_fill(out.logprobs.isnan(), torch.nan))
        as_array(out.num_accepted)[:] = stop
        as_array(out.num_emitted)[:] = stop + emitted
        as_array(out.status)[:] = status
        if out.totals is not None and out.num_passed is not None:
            out.totals[0] += out.num_passed.sum()
            out.totals[1] += out.num_emitted.sum()

    def _chunks(self, length: int) -> Iterator[slice]:
        for start in range(0, length, self.chunk):
            yield slice(start, min(start + self.chunk, length))


def _sum(terms: torch.Tensor) -> torch.Tensor:
    """Return the sums [n] of rows, float64: the same for every order; NaN where magnitudes reach `ROW_SUM_LIMIT`."""
    # Magnitudes sum to at most sqrt(V) times the row's norm, which is found as quickly as a sum. NaN compares as false.
    most = as_array(torch.linalg.vector_norm(terms, dim=1)) * math.sqrt(terms.shape[1])
    may_reach = maybe_any(~(most < ROW_SUM_LIMIT / 2))  # half of it, for rounding
    if may_reach:
        terms = terms.where(terms.abs() < ROW_SUM_LIMIT, ROW_SUM_LIMIT)
    total = to_fixed(fours(terms), SUM_SCALE, in_place=True).sum(1).to(torch.float64).div_(SUM_SCALE)
    if may_reach:
        magnitude = (fours(terms.abs()) * MAGNITUDE_SCALE).round_().sum(1, dtype=torch.int64)
        total.masked_fill_(magnitude >= MAGNITUDE_LIMIT, torch.nan)
    return total


def _entropy(p: torch.Tensor) -> torch.Tensor:
    """Return the entropies [n] of rows in nats, float64: the same for every order of summation; NaN if not finite."""
    safe = torch.clamp(p, min=torch.finfo(p.dtype).tiny, out=scratch("bits", p.shape, p.dtype, p.device))
    terms = scratch("terms", p.shape, torch.float64, p.device).copy_(log2(safe, in_place=True).mul_(p))
    total = terms.add_(ENTROPY_GRID).sub_(ENTROPY_GRID).sum(1)
    return total.masked_fill(total.isinf(), torch.nan) * -ops.LN_2
