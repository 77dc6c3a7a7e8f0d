"""One request on the CPU: a few plain numbers decide, and one or two rows are drawn from.

While the chain is short, it takes longer to lay out a batch of one and to find in arrays all the random numbers that
the chain might need.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from acceptlib.arrays import as_array, float64
from acceptlib.engine import chains, decide
from acceptlib.engine.constants import ROW_TOLERANCE, WEIGHT_SCALE
from acceptlib.engine.draw import BLOCK, weigh
from acceptlib.engine.logits import take
from acceptlib.engine.plan import Plan, evaluate
from acceptlib.engine.process import in_range, process
from acceptlib.engine.rows import KEPT_BYTES, ModelName, cleaned
from acceptlib.engine.scratch import SCRATCH_BYTES, scratch, to_fixed
from acceptlib.inputs import Inputs, Rows
from acceptlib.result import (
    INVALID_PARAMETER,
    INVALID_ROW,
    INVALID_TOKEN_ID,
    OK,
    PLACEHOLDER_TOKEN_ID,
    UNNORMALIZED_ROW,
    VerifyResult,
)
from acceptlib.rng import Root, bits_at, uniform_at

LONGEST_CHAIN: Final = 32
"""Number of drafted tokens up to which this is quicker than arrays, even if all of them stand."""


def can_step(plan: Plan, inputs: Inputs) -> bool:
    """Return whether `step` can run a call, and is the quickest way to."""
    return (
        inputs.num_requests == 1
        and inputs.max_num_draft_tokens <= LONGEST_CHAIN
        and plan.reads_entries_alone
        and inputs.cu_num_draft_tokens is None
        and inputs.bonus_token_ids is None
        and not inputs.logprobs
        and not inputs.counts_passed
        and all(
            rows.data.is_cpu
            and (4 * rows.data.numel() <= KEPT_BYTES if rows.is_logits else rows.data.dtype == torch.float32)
            and rows.data.shape[-1] == inputs.vocab_size
            for rows in (inputs.target, inputs.draft if plan.reads_draft else None)
            if rows is not None
        )
    )


def step(plan: Plan, inputs: Inputs, out: VerifyResult) -> None:
    """Verify the only request of a call; see `AcceptanceStrategy.verify`."""
    numbers = _Numbers(inputs)
    ids = inputs.draft_token_ids[0].tolist()
    end = chains.end_of(ids)
    target = _Model(inputs.target, "target")
    draft = _Model(inputs.draft, "draft") if plan.reads_draft and inputs.draft is not None else None
    stop, token, status = 0, PLACEHOLDER_TOKEN_ID, OK
    if not all(model.is_sound() for model in (target, draft) if model):
        status = INVALID_PARAMETER
    if status == OK:
        stop, status = _decide(plan, ids, end, numbers, target, draft)
    if status == OK:
        token, status = _emit(plan, stop, None if stop == end else ids[stop], numbers, target, draft)
    chains.write(out, [(ids, stop, token, status)])


class _Model:
    """One model's rows; logits are processed as far as the chain has come."""

    def __init__(self, rows: Rows, name: ModelName) -> None:
        self.given, self.is_logits, self.num_processed = rows, rows.is_logits, 0
        self.all = rows.data[0].detach()
        if rows.is_logits:
            self.all = scratch(f"{name}-processed", self.all.shape, torch.float32, self.all.device)

    def is_sound(self) -> bool:
        """Return whether the request's parameters make sense."""
        return self.given.is_plain or bool(np.all(in_range(self.given, self.all.shape[1])))

    def upto(self, end: int) -> torch.Tensor:
        """Return probabilities [R, V] float32; rows from `end` on are arbitrary."""
        if self.is_logits and self.num_processed < end:
            some, given = slice(self.num_processed, end), self.given
            rows = Rows(given.data[0, some], is_logits=True)
            if not given.is_plain:
                request = torch.zeros(end - self.num_processed, dtype=torch.int64, device=self.all.device)
                rows = take(given, request, rows.data, None if given.bitmask is None else given.bitmask[0, some])
            process(rows, self.all[some])
            self.num_processed = end
        return self.all

    def row(self, position: int) -> torch.Tensor:
        """Return one row [1, V], contiguous: sums of a strided one would differ in the last bits."""
        return self.upto(position + 1)[position : position + 1].contiguous()


class _Numbers:
    """The request's random numbers, each found when it is asked for."""

    def __init__(self, inputs: Inputs) -> None:
        self.given, rng = inputs.uniforms, inputs.rng
        if isinstance(rng, Root):
            rng = rng.streams(1, inputs.device)
        if rng is not None:
            self.stream = int(rng.seeds), int(rng.offsets)
            if rng.advances:
                rng.offsets.add_(1)

    def uniform(self, position: int) -> float:
        return uniform_at(position, *self.stream) if self.given is None else self.given.accept[0, position].item()

    def bits(self) -> int:
        return bits_at(*self.stream) if self.given is None else int(self.given.emit)


def _decide(
    plan: Plan, ids: list[int], end: int, numbers: _Numbers, target: _Model, draft: _Model | None
) -> tuple[int, int]:
    """Return how many of the drafted tokens before the end stand, and the `Status` of the one that does not.

    A token is checked for faults in the order of `torch_engine`, its id first.
    """
    vocab_size, each = target.all.shape[1], max(end, 1)  # each: positions that are read at a time
    if (target.is_logits or (draft and draft.is_logits)) and 4 * end * vocab_size > SCRATCH_BYTES:
        each = torch.get_num_threads()  # a softmax gives each thread a row
    for start in range(0, end, each):
        some = range(start, min(start + each, end))
        at = some, [min(max(ids[position], 0), vocab_size - 1) for position in some]
        p = float64(as_array(target.upto(some.stop))[at])
        values, probs = {"target_prob": p[None]}, p.tolist()
        if draft is not None:
            q = float64(as_array(draft.upto(some.stop))[at])[None]
            values["draft_prob"] = np.where(q > 0, q, 0.0)
        elif plan.reads_draft:
            values["draft_prob"] = np.ones_like(p)[None]
        h = decide.broadcast(evaluate(plan.accept, values, plan.constants), p[None])[0].tolist()
        for position, prob, h_i in zip(some, probs, h, strict=True):
            if ids[position] >= vocab_size:
                return position, INVALID_TOKEN_ID
            if "target_prob" in plan.reads and not 0 <= prob <= 1 + ROW_TOLERANCE:
                return position, UNNORMALIZED_ROW if 1 < prob < torch.inf else INVALID_ROW
            if not numbers.uniform(position) < h_i:
                return position, OK
    return end, OK


def _emit(
    plan: Plan, stop: int, drafted: int | None, numbers: _Numbers, target: _Model, draft: _Model | None
) -> tuple[int, int]:
    """Return the token at the stopping row, and the row's `Status`; no token was `drafted` for the bonus row."""
    p = residual = target.row(stop)
    elements, draft_mass = {"p": p, "q": p}, 0.0
    if plan.residual is not None and drafted is not None:
        if draft is not None:
            elements["q"], draft_mass = cleaned(draft.row(stop), is_logits=draft.is_logits)
        elif plan.reads_draft:
            elements["q"] = torch.zeros_like(p)
            elements["q"][0, drafted] = 1
        if "is_drafted" in plan.residual.names:
            elements["is_drafted"] = torch.zeros_like(p, dtype=torch.bool)
            elements["is_drafted"][0, drafted] = True
        residual = decide.broadcast(evaluate(plan.residual, elements, plan.constants), p).to(torch.float32)
    is_bonus = np.array([drafted is None])
    weights, _, row_status = weigh(p, residual, elements, is_bonus, draft_mass, is_logits=target.is_logits)
    status = int(row_status[0])
    return _draw(weights, numbers.bits(), in_place=weights is not p) if status == OK else PLACEHOLDER_TOKEN_ID, status


def _draw(weights: torch.Tensor, bits: int, *, in_place: bool) -> int:
    """Return what `draw` draws from the weights [1, V]."""
    block = min(BLOCK, weights.shape[1])
    blocks = to_fixed(weights, WEIGHT_SCALE, block, in_place=in_place).view(-1, block)
    ends = as_array(blocks.sum(1)).cumsum()
    threshold = (bits % 2**64 * int(ends[-1])) >> 64
    index = int(ends.searchsorted(threshold, "right"))
    before = int(ends[index - 1]) if index else 0
    return index * block + int(as_array(blocks[index]).cumsum().searchsorted(threshold - before, "right"))
