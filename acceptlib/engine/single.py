"""One request from probabilities, on the CPU: decided in plain numbers, drawn from the rows where its chain ends.

To lay out a batch of one, and to find all the random numbers that it might need in arrays, would take longer.
"""

from __future__ import annotations

import numpy as np
import torch

from acceptlib.arrays import arange, as_words, float64
from acceptlib.engine import decide
from acceptlib.engine.draw import ROW_TOLERANCE, draw, weigh
from acceptlib.engine.plan import Plan, call
from acceptlib.engine.rows import cleaned
from acceptlib.inputs import Inputs
from acceptlib.result import PLACEHOLDER_TOKEN_ID, Status, VerifyResult
from acceptlib.rng import Purpose, Root, philox_block, wrap

OK, INVALID_ROW, UNNORMALIZED_ROW, INVALID_TOKEN_ID = map(
    int, (Status.OK, Status.INVALID_ROW, Status.UNNORMALIZED_ROW, Status.INVALID_TOKEN_ID)
)


def can_step(plan: Plan, inputs: Inputs) -> bool:
    """Return whether `step` can run a call."""
    return (
        inputs.num_requests == 1
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
            and rows.data.shape[-1] == inputs.vocab_size
            for rows in ((inputs.target, inputs.draft) if plan.reads_draft else (inputs.target,))
        )
    )


def step(plan: Plan, inputs: Inputs, out: VerifyResult) -> None:
    """Verify the only request of a call; see `AcceptanceStrategy.verify`."""
    numbers = _Numbers(inputs)
    ids = inputs.draft_token_ids[0].tolist()
    most = len(ids)
    end = next((position for position, drafted in enumerate(ids) if drafted < 0), most)
    stop, status = _decide(plan, inputs, ids[:end], numbers)
    token = PLACEHOLDER_TOKEN_ID
    if status == OK:
        drawn, status = _emit(plan, inputs, stop, numbers, is_bonus=stop == end)
        token = drawn if status == OK else token
    as_words(out.output_token_ids)[0] = [*ids[:stop], token, *[PLACEHOLDER_TOKEN_ID] * (most - stop)]
    as_words(out.num_accepted)[0] = stop
    as_words(out.num_emitted)[0] = stop + (status == OK)
    as_words(out.status)[0] = status


class _Numbers:
    """The random numbers of the request, each found when it is asked for."""

    def __init__(self, inputs: Inputs) -> None:
        self.given, rng = inputs.uniforms, inputs.rng
        if isinstance(rng, Root):
            rng = rng.streams(1, inputs.device)
        if rng is not None:
            self.seed, self.offset = int(rng.seeds), int(rng.offsets)
            if rng.advances:
                rng.offsets.add_(1)

    def uniform(self, position: int) -> float:
        if self.given is not None:
            return self.given.accept[0, position].item()
        high, low = philox_block(position, Purpose.ACCEPT, self.offset, self.seed)
        return ((high << 21) | (low >> 11)) * 2.0**-53

    def bits(self) -> torch.Tensor:
        if self.given is not None:
            return self.given.emit
        high, low = philox_block(0, Purpose.EMIT, self.offset, self.seed)
        return torch.tensor([wrap((high << 32) | low)])


def _decide(plan: Plan, inputs: Inputs, ids: list[int], numbers: _Numbers) -> tuple[int, int]:
    """Return how many of the drafted tokens stand, and the `Status` of the one that does not."""
    if not ids:
        return 0, OK
    drafted = np.array(ids)
    at = 0, arange(len(ids), drafted), np.minimum(drafted, inputs.vocab_size - 1)
    values = {"target_prob": float64(inputs.target.data.detach().numpy()[at])[None]}
    if plan.reads_draft and inputs.draft is not None:
        found = float64(inputs.draft.data.detach().numpy()[at])[None]
        values["draft_prob"] = np.where(found > 0, found, 0.0)
    h = decide.broadcast(call(plan.accept, values, plan.constants), values["target_prob"])[0]
    looks = "target_prob" in plan.reads
    for position, (token, p) in enumerate(zip(ids, values["target_prob"][0].tolist(), strict=True)):
        if token >= inputs.vocab_size:
            return position, INVALID_TOKEN_ID
        if looks and not 0 <= p < np.inf:
            return position, INVALID_ROW
        if looks and p > 1 + ROW_TOLERANCE:
            return position, UNNORMALIZED_ROW
        if not numbers.uniform(position) < h[position]:
            return position, OK
    return len(ids), OK


def _emit(plan: Plan, inputs: Inputs, stop: int, numbers: _Numbers, *, is_bonus: bool) -> tuple[int, int]:
    """Return the token at the stopping row, and the row's `Status`."""
    p = residual = inputs.target.data[:, stop]
    elements, draft_mass = {"p": p, "q": p}, 0.0
    if plan.residual is not None and not is_bonus:
        if plan.reads_draft and inputs.draft is not None:
            elements["q"], draft_mass = cleaned(inputs.draft.data[:, stop], is_logits=False)
        weights = call(plan.residual, elements, plan.constants)
        residual = decide.broadcast(weights, p).to(torch.float32)
    weights, _, status = weigh(p, residual, elements, np.array([is_bonus]), draft_mass, is_logits=False)
    return int(draw(weights, numbers.bits(), in_place=weights is not p)), int(status[0])
