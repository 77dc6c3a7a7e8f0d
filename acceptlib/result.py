"""What a `verify` call returns: tokens, counts, and why a request has no last token."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Final

import torch

from acceptlib.errors import InputError, StatusError

PLACEHOLDER_TOKEN_ID: Final = -1
"""Pads `VerifyResult.output_token_ids`; as a drafted token, any negative id ends the chain."""


class Status(IntEnum):
    """Why a request has no token at the end of a step; of several reasons, the first one found.

    Tokens accepted before are kept.

    Attributes:
        OK: 0, the request has its last token.
        INVALID_ROW: 1, the target's row has NaN or +inf, gives the drafted token less than 0, or has no entry above 0
            (a mask may forbid them all).
        UNNORMALIZED_ROW: 2, a row does not sum to 1 (within 1/64), or the rule's residual is NaN or sums to over 4.
        INVALID_TOKEN_ID: 3, a drafted or bonus token id is outside the vocabulary.
        INVALID_COUNT: 4, `cu_num_draft_tokens` does not begin at 0, decreases, leaves [0, T], or exceeds
            `max_num_draft_tokens`.
        INVALID_PARAMETER: 5, a sampling parameter is out of range; `EXPLANATIONS` has the ranges.
    """

    OK = 0
    INVALID_ROW = 1
    UNNORMALIZED_ROW = 2
    INVALID_TOKEN_ID = 3
    INVALID_COUNT = 4
    INVALID_PARAMETER = 5


OK, INVALID_ROW, UNNORMALIZED_ROW, INVALID_TOKEN_ID, INVALID_COUNT, INVALID_PARAMETER = map(int, Status)
"""As plain numbers: NumPy takes several times as long with an enum's members."""

EXPLANATIONS: Final[dict[Status, str]] = {
    Status.INVALID_ROW: (
        "the target's row has NaN or +inf, gives the drafted token less than 0, or has no entry above 0 (a mask may "
        "forbid them all)"
    ),
    Status.UNNORMALIZED_ROW: "a row does not sum to 1 (within 1/64), or the rule's residual is NaN or sums to over 4",
    Status.INVALID_TOKEN_ID: "a drafted or bonus token id is outside the vocabulary",
    Status.INVALID_COUNT: (
        "cu_num_draft_tokens does not begin at 0, decreases, leaves [0, T], or exceeds max_num_draft_tokens"
    ),
    Status.INVALID_PARAMETER: (
        "a sampling parameter is out of range: expected a finite temperature >= 0, top-k >= 0 (0 is off), top-p above "
        "0 and up to 1, min-p from 0 to 1, and ids of a bias below V"
    ),
}

ROW_FAULTS: Final = {Status.INVALID_ROW, Status.UNNORMALIZED_ROW}
"""What logits that were passed as probabilities, or the reverse, are usually found to be."""

FORMS: Final = "target_probs and draft_probs take probabilities, target_logits and draft_logits take logits."
"""What a `StatusError` adds to a fault of that kind."""

NAMED_REQUESTS: Final = 8
"""Requests named in a `StatusError`: enough to see what is wrong, few enough to read."""


@dataclass(frozen=True, slots=True, eq=False)
class VerifyResult:
    """What one `verify` call decided, for B requests of at most K drafted tokens.

    Attributes:
        output_token_ids: [B, K+1] int32: accepted tokens, then the recovered or bonus token, then -1. A result given as
            `out` may have int64 here.
        num_accepted: [B] int32, drafted tokens that stand, 0..n_b.
        num_emitted: [B] int32, `num_accepted + 1`; `num_accepted` where status is not 0.
        status: [B] int8, a `Status`; 0 where all is well.
        logprobs: [B, K+1] float32, log-probability of each emitted token under the processed target row, NaN
            beyond them; None unless asked for.
        raw_logprobs: The same under the softmax of the caller's logits, before any sampling parameter; NaN where a row
            has none, and equal to `logprobs` from probabilities.
        num_passed: [B] int32, drafted tokens that pass on their own (u < h), including those after the stop, up to the
            first bad value; None unless a result with this tensor was given as `out`.
        totals: [2] int64, to which each call adds the sums of `num_passed` and of `num_emitted`; None unless a result
            with both tensors was given as `out`.
    """

    output_token_ids: torch.Tensor
    num_accepted: torch.Tensor
    num_emitted: torch.Tensor
    status: torch.Tensor
    logprobs: torch.Tensor | None = None
    raw_logprobs: torch.Tensor | None = None
    num_passed: torch.Tensor | None = None
    totals: torch.Tensor | None = None

    @classmethod
    def empty(
        cls,
        num_requests: int,
        max_num_draft_tokens: int,
        device: torch.device | str,
        *,
        logprobs: bool = False,
        num_passed: bool = False,
        totals: bool = False,
    ) -> VerifyResult:
        """Allocate a result to pass as `out`; `totals` start at 0 and imply `num_passed`.

        Raises:
            InputError: A size is below 0.
        """
        # A graph that is traced cannot ask, of numbers of NumPy.
        if not torch.compiler.is_dynamo_compiling() and (num_requests < 0 or max_num_draft_tokens < 0):
            msg = f"expected sizes >= 0, got {num_requests} requests of {max_num_draft_tokens} drafted tokens"
            raise InputError(msg)
        shape = (num_requests, max_num_draft_tokens + 1)
        return cls(
            output_token_ids=torch.empty(shape, dtype=torch.int32, device=device),
            num_accepted=torch.empty(num_requests, dtype=torch.int32, device=device),
            num_emitted=torch.empty(num_requests, dtype=torch.int32, device=device),
            status=torch.empty(num_requests, dtype=torch.int8, device=device),
            logprobs=torch.empty(shape, dtype=torch.float32, device=device) if logprobs else None,
            raw_logprobs=torch.empty(shape, dtype=torch.float32, device=device) if logprobs else None,
            num_passed=torch.empty(num_requests, dtype=torch.int32, device=device) if num_passed or totals else None,
            totals=torch.zeros(2, dtype=torch.int64, device=device) if totals else None,
        )

    def narrow(self, num_requests: int) -> VerifyResult:
        """Return the result's first requests, in the same memory: `out` of a smaller batch. `totals` are shared.

        Raises:
            InputError: The result is of fewer requests.
        """
        if not 0 <= num_requests <= len(self.status):
            msg = f"num_requests: expected 0 to {len(self.status)}, for as many as the result has, got {num_requests}"
            raise InputError(msg)
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        return VerifyResult(
            **{name: t if t is None or name == "totals" else t[:num_requests] for name, t in tensors.items()}
        )

    def to_lists(self) -> list[list[int]]:
        """Return each request's emitted token ids, without padding. Waits for the device.

        Returns:
            B lists, the b-th of `num_emitted[b]` ids: accepted tokens, then the recovered or bonus token. A request
            whose status is not 0 has no recovered or bonus token.
        """
        rows, lengths = self.output_token_ids.tolist(), self.num_emitted.tolist()
        return [row[:length] for row, length in zip(rows, lengths, strict=True)]

    def raise_for_status(self) -> None:
        """Raise if any request met bad values. Waits for the device.

        Raises:
            StatusError: Names the first such requests, the position each stopped at, and what was wrong there.
        """
        marked = self.status.nonzero()[:, 0].tolist()
        places: dict[Status, list[str]] = {}
        for index in marked[:NAMED_REQUESTS]:
            where = f"request {index}, position {int(self.num_accepted[index])}"
            places.setdefault(Status(int(self.status[index])), []).append(where)
        problems = [f"{' and '.join(found)}: {EXPLANATIONS[status]}" for status, found in places.items()]
        if rest := len(marked[NAMED_REQUESTS:]):
            problems.append(f"and {rest} request{'s' * (rest > 1)} more")
        if problems:
            hint = f" {FORMS}" if places.keys() & ROW_FAULTS else ""
            raise StatusError("; ".join(problems) + f". Tokens accepted before were kept; nothing was drawn.{hint}")
