"""The torch engine: any strategy on any device, without a loop over requests and without waiting for the device.

Scalars of every drafted position come first, in float64; then the decision; then one draw a request at its stopping
row. From probabilities only the drafted entries and two rows a request are read, unless a rule asks for more. Rows are
taken in chunks of bounded size, so that scratch memory stays in the cache and does not grow with B.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

from acceptlib.arrays import Words, as_tensor, as_words
from acceptlib.engine import decide
from acceptlib.engine.draw import WEIGHT_SCALE, draw
from acceptlib.engine.plan import Plan, call
from acceptlib.engine.rows import Layout, RowReader
from acceptlib.engine.scratch import scratch, to_fixed
from acceptlib.inputs import PLACEHOLDER_TOKEN_ID, Inputs, Status, VerifyResult

SCRATCH_BYTES = 2 << 20
"""Size of one chunk of float32 rows: a few of them fit into a core's cache."""

SUM_SCALE = 2.0**44
"""Fixed-point scale of row sums: magnitudes below 2^19 in steps of 2^-44."""

ROW_TOLERANCE = 1 / 64
"""How far a row of probabilities may sum from 1: bfloat16 rounds each entry by up to 2^-9 of it."""

MASS_LIMIT = 4.0
"""Weights that sum to more would overflow the draw's integers."""

NO_WEIGHT = 2 * MASS_LIMIT
"""Stands for a weight that is no number, and fails its request."""


def verify(plan: Plan, inputs: Inputs) -> VerifyResult:
    """Run `plan` on validated inputs; see `AcceptanceStrategy.verify`."""
    # Made outside of inference mode, so that the caller may use them like any tensor.
    most = inputs.max_num_draft_tokens
    out = inputs.out or VerifyResult.empty(inputs.num_requests, most, inputs.device, logprobs=inputs.logprobs)
    if inputs.num_requests:
        with torch.inference_mode():
            _Step(plan, inputs).run(out)
    return out


class _Step:
    """One call, with what every stage of it needs."""

    def __init__(self, plan: Plan, inputs: Inputs) -> None:
        self.plan = plan
        self.inputs = inputs
        self.chunk = max(1, SCRATCH_BYTES // (4 * inputs.vocab_size))
        self.layout = Layout(inputs)
        self.target = RowReader(inputs.target, self.layout, inputs.vocab_size, self.chunk, "target")
        self.draft = None
        if inputs.max_num_draft_tokens and inputs.draft is not None and plan.reads_draft and inputs.draft.data.numel():
            self.draft = RowReader(inputs.draft, self.layout, inputs.vocab_size, self.chunk, "draft")
        self.values, self.numbers = decide.positional(plan, self.layout.num_draft_tokens, inputs.max_num_draft_tokens)

    def run(self, out: VerifyResult) -> None:
        """Decide, draw and write."""
        plan, layout = self.plan, self.layout
        accept_uniforms, emit_bits = self._uniforms()
        self.values |= {name: layout.to_grid(value) for name, value in self._row_scalars().items()}
        faults = self._position_faults()
        self.carry = decide.run_carry(plan, self.values, self.numbers, layout.ids)
        h = decide.acceptance(plan, self.values, self.numbers, self.carry, self._next_residual_mass)
        sound = (as_words(faults) == Status.OK) & as_words(layout.valid)
        accepted = as_tensor((as_words(accept_uniforms) < as_words(h)) & (sound.cumprod(1) > 0))
        may_stand = decide.forgiven(plan, self.values, self.numbers, self.carry)
        if may_stand is not None:
            may_stand = may_stand & as_tensor(sound)
        stop = decide.stop_position(plan, accepted, may_stand, layout.num_draft_tokens)
        whole_request_fails = layout.faults != Status.OK
        stop = stop.masked_fill(whole_request_fails, 0)
        status = functional.pad(faults, (0, 1)).gather(1, stop[:, None])[:, 0]
        status = torch.where(whole_request_fails, layout.faults, status)
        self._write(out, stop, status, *self._emit(stop, emit_bits))

    def _uniforms(self) -> tuple[torch.Tensor, torch.Tensor]:
        uniforms = self.inputs.uniforms
        if self.inputs.rng is not None:
            uniforms = self.inputs.rng.uniforms(self.inputs.max_num_draft_tokens)
            self.inputs.rng.offsets.add_(1)
        assert uniforms is not None  # noqa: S101 - `prepare` gives one of the two
        accept = uniforms.accept
        return (self.layout.to_grid(accept) if accept.ndim == 1 else accept), uniforms.emit

    def _row_scalars(self) -> decide.Values:
        """Return what rules read of the rows at each drafted position: [N] by name."""
        plan, layout = self.plan, self.layout
        wanted = plan.reads & {"target_prob", "draft_prob", "target_max_prob", "draft_max_prob", "target_top_entropy"}
        wanted |= {*plan.used_row_sums} | ({"target_prob"} if self.inputs.logprobs else set())
        values: decide.Values = {}
        if "is_target_argmax" in plan.reads:
            best, values["has_law"] = self.target.argmax(layout.flat_request, layout.flat_position, every_row=True)
            values["is_target_argmax"] = best == layout.flat_ids
        readers = [reader for reader in (self.target, self.draft) if reader is not None]
        if wanted and wanted <= {"target_prob", "draft_prob"}:
            values |= {f"{reader.model}_prob": reader.probs_at_flat_ids() for reader in readers}
        elif wanted:
            parts = [self._reductions(chunk, wanted) for chunk in self._chunks(len(layout.flat_ids))]
            values |= {name: torch.cat([part[name] for part in parts]) for name in wanted if parts}
            values |= {name: self.layout.flat_ids.to(torch.float64) for name in wanted if not parts}
        if "draft_prob" in values:
            values["draft_prob"] = values["draft_prob"].nan_to_num(nan=0.0).clamp_(min=0)
        elif "draft_prob" in wanted:
            values["draft_prob"] = torch.ones_like(layout.flat_ids, dtype=torch.float64)
        return values

    def _reductions(self, chunk: slice, wanted: frozenset[str]) -> decide.Values:
        """Return scalars that need whole rows, for some flat positions: [n] float64 by name."""
        request, position = self._flat(chunk)
        ids = self.layout.flat_ids[chunk, None]
        elements = self._elements(request, position)
        p, q = elements["p"], elements["q"]
        found: decide.Values = {
            "target_prob": p.gather(1, ids)[:, 0].to(torch.float64),
            "draft_prob": q.gather(1, ids)[:, 0].to(torch.float64),
        }
        if "target_max_prob" in wanted:
            found["target_max_prob"] = p.amax(1).to(torch.float64)
        if "draft_max_prob" in wanted:
            found["draft_max_prob"] = q.amax(1).to(torch.float64)
        if "target_top_entropy" in wanted:
            top = p.topk(min(self.plan.traits.top_k, p.shape[1]), dim=1).values.to(torch.float64)
            top = top / top.sum(1, keepdim=True)
            found["target_top_entropy"] = -torch.xlogy(top, top).sum(1)
        scalars = {name: found[name][:, None].to(torch.float32) for name in ("target_prob", "draft_prob")}
        scalars["position"] = position[:, None].to(torch.float32)
        for name, row_sum in self.plan.used_row_sums.items():
            terms = decide.broadcast(call(row_sum, {**elements, **scalars}, self.numbers), p).to(torch.float32)
            found[name] = to_fixed(terms, SUM_SCALE).sum(1).to(torch.float64) / SUM_SCALE
        return found

    def _next_residual_mass(self) -> torch.Tensor:
        """Return the mass of the residual at the next row, [B, K] float64; 0 where that row has no law."""
        masses = [
            to_fixed(self._residual(*self._flat(chunk)).clamp(min=0).nan_to_num_(0.0, posinf=0.0), WEIGHT_SCALE).sum(1)
            for chunk in self._chunks(len(self.layout.flat_ids))
        ]
        if not masses:
            return torch.zeros_like(self.carry[:, 1:])
        mass = self.layout.to_grid(torch.cat(masses).to(torch.float64) / WEIGHT_SCALE)
        return torch.where(functional.pad(self.layout.valid[:, 1:], (0, 1)), functional.pad(mass[:, 1:], (0, 1)), 0.0)

    def _elements(self, request: torch.Tensor, position: torch.Tensor) -> decide.Values:
        """Return the rows [n, V] float32 that elementwise rules read at some positions."""
        p = self.target.rows(request, position)
        elements = {"p": p, "q": p}
        if "is_drafted" in self.plan.reads or (self.plan.reads_draft and self.draft is None):
            ids = functional.pad(self.layout.ids, (0, 1))[request, position]
            elements["is_drafted"] = torch.arange(p.shape[1], device=p.device) == ids[:, None]
        if self.draft is not None:
            q = self.draft.rows(request, position).nan_to_num_(nan=0.0)
            elements["q"] = q if self.draft.is_logits else q.clamp_(min=0)
        elif self.plan.reads_draft:
            elements["q"] = elements["is_drafted"].to(torch.float32)
        return elements

    def _residual(
        self, request: torch.Tensor, position: torch.Tensor, elements: decide.Values | None = None
    ) -> torch.Tensor:
        """Return the residual [n, V] float32 at some positions, before it is clamped at 0; NaN stays NaN."""
        elements = elements or self._elements(request, position)
        residual = self.plan.residual
        if residual is None:
            return elements["p"]
        at = position.clamp(max=self.layout.shape[1] - 1)
        grids = {**self.values, "carry": self.carry}
        scalars = {name: grid[request, at] for name, grid in grids.items() if name in residual.names}
        scalars = {name: value[:, None].to(torch.float32) for name, value in scalars.items()}
        weights = call(residual, {**scalars, **elements}, self.numbers)
        return decide.broadcast(weights, elements["p"]).to(torch.float32)

    def _position_faults(self) -> torch.Tensor:
        """Return the `Status` of each drafted position by itself: [B, K] int64."""
        prob = as_words(self.values["target_prob"]) if "target_prob" in self.plan.reads else None
        has_law = as_words(self.values["has_law"]) if "has_law" in self.values else None
        return as_tensor(_token_status(as_words(self.layout.outside), prob, has_law, as_words(self.layout.valid)))

    def _emit(self, stop: torch.Tensor, bits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return each request's token at its stopping row, the row's `Status`, and the probability if asked for."""
        parts = [self._emit_some(chunk, stop[chunk], bits[chunk]) for chunk in self._chunks(len(stop))]
        if len(parts) == 1:
            return parts[0]
        token, status, prob = zip(*parts, strict=True)
        return torch.cat(token), torch.cat(status), torch.cat(prob) if self.inputs.logprobs else None

    def _emit_some(
        self, chunk: slice, position: torch.Tensor, bits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        plan, traits = self.plan, self.plan.traits
        request = torch.arange(chunk.start, chunk.stop, device=position.device)
        is_bonus = position == self.layout.num_draft_tokens[chunk]
        status = torch.zeros_like(position)
        token = prob = None
        if plan.samples or plan.residual is not None or self.inputs.logprobs:
            p, weights, row_status = self._weights(request, position, is_bonus)
            if plan.samples or plan.residual is not None:
                status = row_status
            token = draw(weights, bits) if plan.samples else weights.argmax(1)
        if "argmax" in {traits.recovered, traits.bonus}:
            if plan.residual is None:
                every_row = "is_target_argmax" in plan.reads
                best, has_law = self.target.argmax(request, position, every_row=every_row)
                status = status.masked_fill(~has_law, Status.INVALID_ROW)
            else:
                best = weights.argmax(1)
            takes_best = torch.where(is_bonus, traits.bonus == "argmax", traits.recovered == "argmax")
            token = best if token is None else torch.where(takes_best, best, token)
        assert token is not None  # noqa: S101 - a strategy samples or takes the argmax
        if self.inputs.bonus_token_ids is not None:
            given = self.inputs.bonus_token_ids[chunk].to(torch.int64)
            outside = (given < 0) | (given >= self.inputs.vocab_size)
            token = torch.where(is_bonus, given.masked_fill(outside, 0), token)
            status = torch.where(is_bonus, outside * int(Status.INVALID_TOKEN_ID), status)
        if self.inputs.logprobs:
            prob = p.gather(1, token[:, None])[:, 0]
        return token, status, prob

    def _weights(
        self, request: torch.Tensor, position: torch.Tensor, is_bonus: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the target's rows, the weights of the draw, and the rows' `Status`."""
        if self.plan.residual is None or not self.layout.shape[1]:
            p = weights = self.target.rows(request, position)
            draft_mass = torch.zeros_like(position, dtype=torch.float32)
        else:
            elements = self._elements(request, position)
            p, q = elements["p"], elements["q"]
            residual = self._residual(request, position, elements)
            weights = scratch("weights", p.shape, torch.float32, p.device)
            torch.nan_to_num(residual, nan=NO_WEIGHT, posinf=NO_WEIGHT, neginf=0.0, out=weights)
            # p == q, or equal but for rounding: nothing is left to draw from, and p is what the token must follow.
            takes_p = is_bonus | (weights.amax(1) < 1 / WEIGHT_SCALE)
            weights.lerp_(p, takes_p[:, None].to(torch.float32))  # exact at 0 and 1, and quicker than `where`
            draft_mass = q.sum(1).masked_fill_(is_bonus, 0)
        mass, drawn_mass = p.sum(1), weights.clamp_(min=0).sum(1)
        return p, weights, as_tensor(_row_status(as_words(mass), as_words(drawn_mass), as_words(draft_mass)))

    def _write(
        self,
        out: VerifyResult,
        stop: torch.Tensor,
        status: torch.Tensor,
        token: torch.Tensor,
        row_status: torch.Tensor,
        prob: torch.Tensor | None,
    ) -> None:
        """Fill in the result."""
        most = self.layout.shape[1]
        if prob is not None:
            failed = (status != Status.OK) | (row_status != Status.OK)
            beyond = torch.arange(most + 1, device=stop.device) >= stop[:, None]
            probs = functional.pad(self.values["target_prob"], (0, 1)).masked_fill_(beyond, torch.nan)
            prob = prob.to(torch.float64).masked_fill(failed, torch.nan)
            assert out.logprobs is not None  # noqa: S101 - `prepare` sees to it
            out.logprobs.copy_(probs.scatter_(1, stop[:, None], prob[:, None]).log())
        stops, drawn, faults = as_words(stop), as_words(token), as_words(status)
        faults = faults + (faults == Status.OK) * as_words(row_status)
        emitted = faults == Status.OK
        position = as_words(torch.arange(most + 1, device=stop.device))
        accepted = position < stops[:, None]
        last = (position == stops[:, None]) & emitted[:, None]
        tokens = as_words(out.output_token_ids)
        tokens[:, :most] = as_words(self.layout.ids)
        tokens[:, most] = 0
        tokens[:] = tokens * accepted + drawn[:, None] * last + (accepted | last) + PLACEHOLDER_TOKEN_ID
        if out.logprobs is not None and out.raw_logprobs is not None:
            out.raw_logprobs.copy_(out.logprobs)
            if not self.inputs.target.is_plain:
                row = torch.arange(most + 1, device=stop.device).minimum(stop[:, None])  # what is beyond is not read
                request = torch.arange(len(stop), device=stop.device)[:, None].expand_as(row)
                ids = out.output_token_ids.to(torch.int64).clamp(min=0)
                raw = self.target.raw_logprobs(request.reshape(-1), row.reshape(-1), ids.reshape(-1))
                out.raw_logprobs.copy_(raw.view_as(ids).masked_fill(out.logprobs.isnan(), torch.nan))
        as_words(out.num_accepted)[:] = stops
        as_words(out.num_emitted)[:] = stops + emitted
        as_words(out.status)[:] = faults

    def _flat(self, chunk: slice) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layout.flat_request[chunk], self.layout.flat_position[chunk]

    def _chunks(self, length: int) -> Iterator[slice]:
        for start in range(0, length, self.chunk):
            yield slice(start, min(start + self.chunk, length))


def _row_status(mass: Words, drawn_mass: Words, draft_mass: Words) -> Words:
    """Return the `Status` [n] of stopping rows, from the sums of the target's row, the weights and the draft's row."""
    unnormalized = (abs(mass - 1) > ROW_TOLERANCE) | (draft_mass > 1 + ROW_TOLERANCE) | (drawn_mass > MASS_LIMIT)
    invalid = ~((drawn_mass > 0) & (abs(mass) < torch.inf))
    return invalid * int(Status.INVALID_ROW) + (unnormalized & ~invalid) * int(Status.UNNORMALIZED_ROW)


def _token_status(outside: Words, prob: Words | None, has_law: Words | None, valid: Words) -> Words:
    """Return the `Status` [B, K] of drafted positions by themselves; `prob` and `has_law` where a rule reads them."""
    status = outside * int(Status.INVALID_TOKEN_ID)
    if prob is not None:
        unnormalized = prob > 1 + ROW_TOLERANCE
        invalid = ~((prob >= 0) & (prob < torch.inf))
        status = status * ~unnormalized + unnormalized * int(Status.UNNORMALIZED_ROW)
        status = status * ~invalid + invalid * int(Status.INVALID_ROW)
    if has_law is not None:
        status = status * has_law + ~has_law * int(Status.INVALID_ROW)
    return status * valid
