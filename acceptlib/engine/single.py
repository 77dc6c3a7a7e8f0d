"""One request from probabilities, on the CPU: a few plain numbers decide, and one or two rows are drawn from.

To lay out a batch of one, and to find in arrays all the random numbers that its chain might come to, takes longer as
long as the chain is short.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from acceptlib.arrays import as_words, float64
from acceptlib.engine import chains, decide
from acceptlib.engine.draw import BLOCK, ROW_TOLERANCE, WEIGHT_SCALE, weigh
from acceptlib.engine.plan import Plan, call
from acceptlib.engine.rows import cleaned
from acceptlib.engine.scratch import to_fixed
from acceptlib.inputs import Inputs
from acceptlib.result import INVALID_ROW, INVALID_TOKEN_ID, OK, UNNORMALIZED_ROW, VerifyResult
from acceptlib.rng import Root, bits_at, uniform_at

LONGEST_CHAIN: Final = 32
"""Drafted tokens up to which this takes less time than arrays, even if all of them stand."""


def can_step(plan: Plan, inputs: Inputs) -> bool:
    """Return whether `step` can run a call, and sooner than others."""
    return (
        inputs.num_requests == 1
        and inputs.max_num_draft_tokens <= LONGEST_CHAIN
        and plan.reads_entries_alone
        and inputs.cu_num_draft_tokens is None
        and inputs.bonus_token_ids is None
        and not inputs.logprobs
        and (inputs.out is None or inputs.out.num_passed is None)  # which counts positions past the stop
        and all(
            rows is not None
            and not rows.is_logits
            and rows.data.is_cpu
            and rows.data.dtype == torch.float32
            and not rows.data.is_neg()
            and rows.data.shape[-1] == inputs.vocab_size
            for rows in ((inputs.target, inputs.draft) if plan.reads_draft else (inputs.target,))
        )
    )


def step(plan: Plan, inputs: Inputs, out: VerifyResult) -> None:
    """Verify the only request of a call; see `AcceptanceStrategy.verify`."""
    numbers = _Numbers(inputs)
    ids = inputs.draft_token_ids[0].tolist()
    end = chains.end_of(ids)
    stop, status = _decide(plan, inputs, ids, end, numbers)
    token = chains.NONE
    if status == OK:
        token, status = _emit(plan, inputs, stop, numbers, is_bonus=stop == end)
    chains.write(out, [(ids, stop, token, status)])


class _Numbers:
    """The random numbers of the request, each found when it is asked for."""

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


def _decide(plan: Plan, inputs: Inputs, ids: list[int], end: int, numbers: _Numbers) -> tuple[int, int]:
    """Return how many of the drafted tokens before the end stand, and the `Status` of the one that does not.

    What is wrong with a token is looked at in the order of `torch_engine`, its id first.
    """
    last = inputs.vocab_size - 1
    at = 0, range(len(ids)), [min(max(token, 0), last) for token in ids]
    p = float64(as_words(inputs.target.data.detach())[at])
    values, probs = {"target_prob": p[None]}, p.tolist()
    if plan.reads_draft:
        assert inputs.draft is not None  # noqa: S101 - `can_step` sees to it
        q = float64(as_words(inputs.draft.data.detach())[at])[None]
        values["draft_prob"] = np.where(q > 0, q, 0.0)
    h = decide.broadcast(call(plan.accept, values, plan.constants), p[None])[0].tolist()
    for position in range(end):
        if ids[position] >= inputs.vocab_size:
            return position, INVALID_TOKEN_ID
        if "target_prob" in plan.reads and not 0 <= probs[position] <= 1 + ROW_TOLERANCE:
            return position, UNNORMALIZED_ROW if 1 < probs[position] < torch.inf else INVALID_ROW
        if not numbers.uniform(position) < h[position]:
            return position, OK
    return end, OK


def _emit(plan: Plan, inputs: Inputs, stop: int, numbers: _Numbers, *, is_bonus: bool) -> tuple[int, int]:
    """Return the token at the stopping row, and the row's `Status`."""
    # Sums of a row that does not lie in one piece would be others in the last bits.
    p = residual = inputs.target.data[:, stop].contiguous()
    elements, draft_mass = {"p": p, "q": p}, 0.0
    if plan.residual is not None and not is_bonus:
        if plan.reads_draft:
            assert inputs.draft is not None  # noqa: S101 - `can_step` sees to it
            elements["q"], draft_mass = cleaned(inputs.draft.data[:, stop].contiguous(), is_logits=False)
        residual = decide.broadcast(call(plan.residual, elements, plan.constants), p).to(torch.float32)
    weights, _, row_status = weigh(p, residual, elements, np.array([is_bonus]), draft_mass, is_logits=False)
    status = int(row_status[0])
    return _draw(weights, numbers.bits(), in_place=weights is not p) if status == OK else chains.NONE, status


def _draw(weights: torch.Tensor, bits: int, *, in_place: bool) -> int:
    """Return what `draw` draws from the weights [1, V]."""
    block = min(BLOCK, weights.shape[1])
    blocks = to_fixed(weights, WEIGHT_SCALE, block, in_place=in_place).view(-1, block)
    ends = as_words(blocks.sum(1)).cumsum()
    threshold = (bits % 2**64 * int(ends[-1])) >> 64
    index = int(ends.searchsorted(threshold, "right"))
    before = int(ends[index - 1]) if index else 0
    return index * block + int(as_words(blocks[index]).cumsum().searchsorted(threshold - before, "right"))
