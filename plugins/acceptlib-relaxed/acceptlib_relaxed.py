"""Relaxed acceptance for acceptlib: near misses stand while a request is thinking."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from pydantic import Field, model_validator

import acceptlib
from acceptlib import AcceptanceStrategy, Traits, ops, row_sum, rule

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Self

    from acceptlib import VerifyResult
    from acceptlib.ops import Value


class Relaxed(AcceptanceStrategy):
    """While a request thinks, accept any token near the target's favourite; match the argmax exactly otherwise.

    Guarantee: lossy in the thinking phase: every token is among the relaxed_topk likeliest, within relaxed_delta of the
    largest probability. Outside of it this is `greedy`, and everywhere with relaxed_topk = 0.

    Formula: h_i = 1 if x_i = argmax p_i; also, at a position in the thinking phase, if fewer than relaxed_topk tokens
    are likelier, p_i(x_i) >= max_v p_i(v) - relaxed_delta and p_i(x_i) > 0. Else h_i = 0. The recovered and the bonus
    token are the argmax of their row.

    Source: TensorRT-LLM's `use_relaxed_acceptance_for_thinking`; relaxed_topk 10 and relaxed_delta 0.6 are its example
    for DeepSeek-R1, the token ids its defaults. There all drafted tokens of a step are tested under the phase in which
    the step began. Here a phase token among the drafted ones changes the phase for the positions behind it.

    State: `thinking`, [B] bool, whether the next token is in the thinking phase. Call `update_state` after each step. A
    new request is thinking, as with a chat template that opens the phase in the prompt.
    """

    name = "relaxed"
    interface_version = 1
    traits = Traits(
        guarantee="lossy",
        bound="emitted tokens are among the relaxed_topk likeliest, within relaxed_delta of the largest probability",
        recovered="argmax",
        bonus="argmax",
        state=("thinking",),
        neutral={"relaxed_topk": 0},
        neutral_equals="greedy",
    )

    class Options(acceptlib.Options):
        """Options of `relaxed`."""

        relaxed_topk: int = Field(10, ge=0, description="how many of the likeliest tokens may stand; 0 is greedy")
        relaxed_delta: float = Field(0.6, ge=0, le=1, description="how far below the largest probability they may be")
        begin_thinking_phase_token: int = Field(128798, ge=0, description="id that begins the phase (DeepSeek-R1)")
        end_thinking_phase_token: int = Field(128799, ge=0, description="id that ends it (DeepSeek-R1)")

        @model_validator(mode="after")
        def _has_two_tokens(self) -> Self:
            if self.begin_thinking_phase_token == self.end_thinking_phase_token:
                msg = f"expected two tokens, got {self.begin_thinking_phase_token} for begin and end of the phase"
                raise ValueError(msg)
            return self

    options: Options

    def initial_state(self, num_requests: int, device: torch.device | str) -> dict[str, torch.Tensor]:
        """Return the state of requests whose prompt has opened the thinking phase."""
        return {"thinking": torch.ones(num_requests, dtype=torch.bool, device=device)}

    def update_state(self, state: Mapping[str, torch.Tensor], result: VerifyResult) -> None:
        """Let the last phase token of each request's emitted ones, if any, decide."""
        tokens = result.output_token_ids
        place = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
        begun = (place * (tokens == self.options.begin_thinking_phase_token)).amax(1)
        ended = (place * (tokens == self.options.end_thinking_phase_token)).amax(1)
        thinking = state["thinking"]
        thinking.copy_((begun > ended) | ((begun == ended) & (thinking != 0)))

    def bound_excess(self, p: torch.Tensor, q: torch.Tensor, out: torch.Tensor) -> float:  # noqa: ARG002
        """Return the mass of the tokens that may not stand."""
        best = p == p.max()
        near = ((p[:, None] < p).sum(1) < self.options.relaxed_topk) & (p >= p.max() - self.options.relaxed_delta)
        return float(out[~(best | (near & (p > 0)))].sum())

    @row_sum
    def rank(p: Value, target_prob: Value) -> Value:
        """Count the tokens that are likelier than the drafted one."""
        return ops.where(p > target_prob, 1.0, 0.0)

    @rule
    def carry(
        carry: Value,
        position: Value,
        thinking: Value,
        draft_token_id: Value,
        begin_thinking_phase_token: Value,
        end_thinking_phase_token: Value,
    ) -> Value:
        """Return 1 if this position is in the thinking phase, plus 2 if the next one is."""
        here = ops.where(position > 0, carry >= 2.0, thinking != 0)  # noqa: PLR2004 - as returned
        behind = (here | (draft_token_id == begin_thinking_phase_token)) & (draft_token_id != end_thinking_phase_token)
        return ops.where(here, 1.0, 0.0) + ops.where(behind, 2.0, 0.0)

    @rule
    def accept(  # noqa: PLR0913, PLR0917 - what it reads
        carry: Value,
        target_prob: Value,
        target_max_prob: Value,
        is_target_argmax: Value,
        rank: Value,
        relaxed_topk: Value,
        relaxed_delta: Value,
    ) -> Value:
        """Return h."""
        here = (carry == 1.0) | (carry == 3.0)  # noqa: PLR2004 - as `carry` returns
        near = (rank < relaxed_topk) & (target_prob >= target_max_prob - relaxed_delta) & (target_prob > 0)
        return ops.where(is_target_argmax | (here & near), 1.0, 0.0)


@acceptlib.hookimpl
def acceptlib_strategies() -> list[type[AcceptanceStrategy]]:
    """Return this package's strategies."""
    return [Relaxed]
