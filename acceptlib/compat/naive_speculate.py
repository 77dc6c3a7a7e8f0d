"""naive-speculate's `naive_speculate.speculate.utils`; `docs/compat/naive_speculate.md` says what differs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from acceptlib import VerifyResult
from acceptlib.compat._common import as_rows, create, expect_tensor, unused_uniforms

if TYPE_CHECKING:
    import torch

__all__ = ["greedy_match", "speculative_sampling"]


def greedy_match(target_dists: torch.Tensor, candidate_tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept drafted tokens while they are the target's argmax: the strategy `greedy`.

    Args:
        target_dists: [K+1, V], the target's probabilities.
        candidate_tokens: [K] int32 or int64. A negative id ends the draft.

    Returns:
        The index of the first token that is not the argmax, 0..K, and the argmax there: two int64 scalars of empty
        shape. The token is -1 where a row has NaN or an infinity.

    Raises:
        InputError: Shapes, dtypes or devices do not fit.
    """
    expect_tensor("candidate_tokens", candidate_tokens, ("K",))
    expect_tensor("target_dists", target_dists, ("K+1", "V"))
    result = create("greedy").verify(
        candidate_tokens[None],
        target_logits=as_rows(target_dists)[None],  # an argmax needs no normalised rows
        uniforms=unused_uniforms(1, len(candidate_tokens), target_dists.device),
    )
    return _scalars(result)


def speculative_sampling(
    target_dists: torch.Tensor, proposal_dists: torch.Tensor, candidate_tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Verify drafted tokens by speculative sampling (arXiv 2211.17192): the strategy `rejection`.

    Random numbers come from torch's default generator.

    Args:
        target_dists: [K+1, V], the target's probabilities.
        proposal_dists: [K, V], what the drafted tokens were drawn from.
        candidate_tokens: [K] int32 or int64. A negative id ends the draft.

    Returns:
        The index of the first rejected token, K if there is none, and the token drawn there: from the residual, or
        from the last row. Two int64 scalars of empty shape. The token is -1 where a row is no law (NaN).

    Raises:
        InputError: Shapes, dtypes or devices do not fit.
    """
    expect_tensor("candidate_tokens", candidate_tokens, ("K",))
    expect_tensor("target_dists", target_dists, ("K+1", "V"))
    expect_tensor("proposal_dists", proposal_dists, ("K", "V"))
    result = create("rejection").verify(
        candidate_tokens[None], target_probs=as_rows(target_dists)[None], draft_probs=as_rows(proposal_dists)[None]
    )
    return _scalars(result)


def _scalars(result: VerifyResult) -> tuple[torch.Tensor, torch.Tensor]:
    rejected_idx = result.num_accepted[0].long()
    return rejected_idx, result.output_token_ids.take(rejected_idx).long()
