"""What a run of verifications achieved: acceptance length, rates and histograms."""

from __future__ import annotations

import itertools
import math
import operator
from dataclasses import dataclass, field, fields
from typing import Final

import torch

from acceptlib.errors import InputError, short_repr
from acceptlib.result import VerifyResult

INTEGERS: Final = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


@dataclass(slots=True)
class AcceptanceMetrics:
    """Counts over many verified steps; updating waits for the device.

    Steps that ended at a bad row or count (see `VerifyResult.status`) count as well.

    Attributes:
        num_steps: Verified steps, one per request and call.
        num_draft_tokens: Drafted tokens.
        num_accepted_tokens: Drafted tokens that stood.
        num_emitted_tokens: Accepted tokens and the recovered or bonus token of each step.
        drafted_at: For each position, how many steps drafted a token there.
        accepted_at: For each position, how many of these tokens stood.
    """

    num_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_emitted_tokens: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    _squares: int = 0

    def update(self, result: VerifyResult, num_draft_tokens: torch.Tensor) -> None:
        """Add one `verify` call.

        Args:
            result: The result of the call.
            num_draft_tokens: [B] integers, drafted tokens of each request.

        Raises:
            InputError: `result` is not a `VerifyResult`, there is not one number per request, or a number is less than
                the accepted tokens or more than the result has places for.
        """
        if not isinstance(result, VerifyResult):
            msg = f"result: expected a VerifyResult, as verify returns it, got {type(result).__name__}"
            raise InputError(msg)
        counts, most = result.num_accepted.tolist(), result.output_token_ids.shape[1] - 1
        drafts: list[int] = num_draft_tokens.tolist() if isinstance(num_draft_tokens, torch.Tensor) else []
        if (
            not isinstance(num_draft_tokens, torch.Tensor)
            or num_draft_tokens.dtype not in INTEGERS
            or num_draft_tokens.shape != (len(counts),)
            or any(map(operator.lt, drafts, counts))
            or max(drafts, default=0) > most
        ):
            got = short_repr(num_draft_tokens)
            if isinstance(num_draft_tokens, torch.Tensor):
                got = f"{list(num_draft_tokens.shape)} {num_draft_tokens.dtype}, {short_repr(drafts)}"
            expected = (
                f"a tensor [{len(counts)}] of integers, each at least what was accepted, {short_repr(counts)}, and at "
                f"most {most}"
            )
            msg = f"num_draft_tokens: expected {expected}; got {got}"
            raise InputError(msg)
        for accepted, emitted, drafted in zip(counts, result.num_emitted.tolist(), drafts, strict=True):
            self.num_steps += 1
            self.num_draft_tokens += drafted
            self.num_accepted_tokens += accepted
            self.num_emitted_tokens += emitted
            self._squares += emitted * emitted
            missing = drafted - len(self.drafted_at)
            self.drafted_at += [0] * missing
            self.accepted_at += [0] * missing
            for position in range(drafted):
                self.drafted_at[position] += 1
                self.accepted_at[position] += position < accepted

    def merge(self, other: AcceptanceMetrics) -> None:
        """Add the counts of other metrics, such as those of another worker.

        Raises:
            InputError: `other` is not `AcceptanceMetrics`.
        """
        if not isinstance(other, AcceptanceMetrics):
            msg = f"other: expected AcceptanceMetrics, got {type(other).__name__}"
            raise InputError(msg)
        for name in (counted.name for counted in fields(self)):
            ours, theirs = getattr(self, name), getattr(other, name)
            if isinstance(ours, list):
                setattr(self, name, [a + b for a, b in itertools.zip_longest(ours, theirs, fillvalue=0)])
            else:
                setattr(self, name, ours + theirs)

    @property
    def mean_acceptance_length(self) -> float:
        """Mean number of emitted tokens per step, tau."""
        return self.num_emitted_tokens / self.num_steps if self.num_steps else math.nan

    @property
    def standard_error(self) -> float:
        """Standard error of `mean_acceptance_length`, assuming independent steps."""
        if self.num_steps < 2:  # noqa: PLR2004 - no variance from one step
            return math.nan
        # In integers, which lose nothing to rounding.
        deviations = self.num_steps * self._squares - self.num_emitted_tokens**2
        return math.sqrt(deviations / (self.num_steps - 1)) / self.num_steps

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted share of drafted tokens."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else math.nan

    @property
    def acceptance_by_position(self) -> list[float]:
        """For each position, the share of the tokens drafted there that stood."""
        return [accepted / drafted for accepted, drafted in zip(self.accepted_at, self.drafted_at, strict=True)]
