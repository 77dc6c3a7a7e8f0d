"""The samplers of vLLM's first engine, V0: `RejectionSampler` and `TypicalAcceptanceSampler`.

`docs/compat/vllm_v0.md` says what differs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from pydantic import Field

from acceptlib import (
    PLACEHOLDER_TOKEN_ID,
    AcceptanceStrategy,
    Options,
    Traits,
    VerifyResult,
    create,
    ops,
    row_sum,
    rule,
)
from acceptlib.compat._common import as_rows, bonus_tokens, expect_tensor, request_streams, unused_uniforms
from acceptlib.errors import InputError, kind_of, short_repr
from acceptlib.ops import Value

__all__ = ["RejectionSampler", "StrictModeError", "TypicalAcceptanceSampler"]


class StrictModeError(InputError, AssertionError):
    """What strict mode found; an AssertionError too, which is what vLLM raises."""


class _SpecDecodeSampler(torch.nn.Module):
    """What both samplers share: strict mode, the output's form, and counters.

    Attributes:
        num_draft_tokens: Tokens drafted.
        probs_dtype: Dtype of probabilities that strict mode expects.
        token_id_dtype: Dtype of token ids that it expects.
    """

    probs_dtype = torch.float32
    token_id_dtype = torch.int64

    def __init__(self, strategy: AcceptanceStrategy, *, strict_mode: bool, disable_bonus_tokens: bool) -> None:
        super().__init__()
        self._strategy = strategy
        self._strict_mode = strict_mode
        self._disable_bonus_tokens = disable_bonus_tokens
        self._totals: torch.Tensor | None = None
        self.num_draft_tokens = 0

    @property
    def num_accepted_tokens(self) -> torch.Tensor | None:
        """int64 scalar: drafted tokens that passed on their own, past the first rejection too.

        It is None before the first call or `init_tensors`, and what later calls add shows in it.
        """
        return None if self._totals is None else self._totals[0]

    @property
    def num_emitted_tokens(self) -> torch.Tensor | None:
        """int64 scalar: tokens emitted, likewise."""
        return None if self._totals is None else self._totals[1]

    def init_tensors(self, device: int | str | torch.device, device_type: str | torch.device = "cuda") -> None:
        """Set the counters to 0 on a device, an index among those of `device_type` or a device by itself.

        The first call does so by itself; before CUDA graphs are captured it has to be done here.
        """
        kind = torch.device(device_type).type
        where = torch.device(kind, device) if isinstance(device, int) else torch.device(device)
        # A tensor made in inference mode could not be added to outside of it.
        with torch.inference_mode(False):  # noqa: FBT003 - a compiled caller takes it by position alone
            self._totals = torch.zeros(2, dtype=torch.int64, device=where)
        self.num_draft_tokens = 0

    def init_gpu_tensors(self, device: int | str) -> None:
        """Set the counters to 0 on a GPU; the older name of `init_tensors`."""
        self.init_tensors(device)

    def _sample(
        self,
        target_with_bonus_probs: torch.Tensor,
        bonus_token_ids: torch.Tensor,
        draft_probs: torch.Tensor | None,
        draft_token_ids: torch.Tensor,
        generators: Mapping[int, torch.Generator] | None,
    ) -> torch.Tensor:
        """Verify, count, and return [B, k+1] int64; nothing is drawn if `generators` is None."""
        if self._strict_mode:
            self._raise_if_incorrect_input(target_with_bonus_probs, bonus_token_ids, draft_probs, draft_token_ids)
        expect_tensor("draft_token_ids", draft_token_ids, ("B", "k"))
        expect_tensor("target_with_bonus_probs", target_with_bonus_probs, ("B", "k+1", "V"))
        device = target_with_bonus_probs.device
        batch_size, k = draft_token_ids.shape
        output = torch.empty(batch_size, k + 1, dtype=torch.int64, device=device)
        if self._totals is None:
            self.init_tensors(device)
        assert self._totals is not None  # noqa: S101 - just made
        # A step that strict mode refuses counts nothing.
        totals = torch.zeros_like(self._totals) if self._strict_mode else self._totals
        counts = torch.empty(3, batch_size, dtype=torch.int32, device=device)
        out = VerifyResult(
            output_token_ids=output,
            num_accepted=counts[0],
            num_emitted=counts[1],
            status=torch.empty(batch_size, dtype=torch.int8, device=device),
            num_passed=counts[2],
            totals=totals,
        )
        self._strategy.verify(
            draft_token_ids,
            target_probs=as_rows(target_with_bonus_probs),
            draft_probs=None if draft_probs is None else as_rows(draft_probs),
            bonus_token_ids=bonus_tokens(bonus_token_ids, batch_size),
            rng=request_streams(generators, batch_size, device) if generators else None,
            uniforms=unused_uniforms(batch_size, k, device) if generators is None else None,
            out=out,
        )
        if self._strict_mode:
            out.raise_for_status()
            self._totals += totals
        if self._disable_bonus_tokens:
            output[:, -1] = PLACEHOLDER_TOKEN_ID
            self._totals[1] -= (out.num_emitted > k).sum()
        self.num_draft_tokens += draft_token_ids.numel()
        return output

    def _passes(
        self,
        target_probs: torch.Tensor,
        draft_probs: torch.Tensor | None,
        draft_token_ids: torch.Tensor,
    ) -> torch.Tensor:
        """Return which drafted tokens pass on their own, [B, k] bool: each is verified as a request of its own."""
        ids = draft_token_ids.reshape(-1).contiguous()
        result = self._strategy.verify(
            ids[:, None],
            target_probs=as_rows(target_probs).flatten(0, 1)[:, None],
            draft_probs=None if draft_probs is None else as_rows(draft_probs).flatten(0, 1)[:, None],
            bonus_token_ids=ids,
            uniforms=unused_uniforms(len(ids), 1, ids.device) if draft_probs is None else None,
        )
        return result.num_accepted.view(draft_token_ids.shape) > 0

    def _raise_if_incorrect_input(
        self,
        target_with_bonus_probs: torch.Tensor,
        bonus_token_ids: torch.Tensor,
        draft_probs: torch.Tensor | None,
        draft_token_ids: torch.Tensor,
    ) -> None:
        """Check shapes, dtypes, devices and ids; waits for the device.

        Raises:
            StrictModeError: With the expected and the actual value.
        """
        given = {
            "target_with_bonus_probs": target_with_bonus_probs,
            "bonus_token_ids": bonus_token_ids,
            "draft_probs": draft_probs,
            "draft_token_ids": draft_token_ids,
        }
        for name, value in given.items():
            if value is None and name == "draft_probs":  # which typical acceptance does not need
                continue
            if not isinstance(value, torch.Tensor) or value.is_nested:
                msg = f"{name}: expected a torch.Tensor, got {kind_of(value)}"
                raise StrictModeError(msg)
        if draft_token_ids.ndim != 2 or target_with_bonus_probs.ndim != 3:  # noqa: PLR2004
            msg = (
                "expected draft_token_ids [B, k] and target_with_bonus_probs [B, k+1, V] or [B, k, V], got "
                f"{list(draft_token_ids.shape)} and {list(target_with_bonus_probs.shape)}"
            )
            raise StrictModeError(msg)
        batch_size, k = draft_token_ids.shape
        num_rows, vocab_size = target_with_bonus_probs.shape[1:]
        expectations = (
            ((batch_size, k if num_rows == k else k + 1, vocab_size), self.probs_dtype),
            ((batch_size, 1), self.token_id_dtype),
            ((batch_size, k, vocab_size), self.probs_dtype),
            ((batch_size, k), self.token_id_dtype),
        )
        for (name, tensor), (shape, dtype) in zip(given.items(), expectations, strict=True):
            if tensor is None:
                continue
            expected = (list(shape), dtype, target_with_bonus_probs.device)
            actual = (list(tensor.shape), tensor.dtype, tensor.device)
            if actual != expected:
                msg = f"{name}: expected shape, dtype and device {expected}, got {actual}"
                raise StrictModeError(msg)
            if dtype == self.token_id_dtype and bool(((tensor < 0) | (tensor >= vocab_size)).any()):
                msg = f"{name}: expected ids in [0, {vocab_size}), got {short_repr(tensor.tolist())}"
                raise StrictModeError(msg)


class RejectionSampler(_SpecDecodeSampler):
    """Speculative sampling (arXiv 2302.01318), the strategy `rejection`."""

    def __init__(
        self,
        strict_mode: bool = False,  # noqa: FBT001, FBT002 - vLLM's signature
        disable_bonus_tokens: bool = False,  # noqa: FBT001, FBT002 - as above
        use_flashinfer: bool | None = None,  # noqa: FBT001, ARG002 - as above
    ) -> None:
        """Create a rejection sampler.

        Args:
            strict_mode: Check shapes, dtypes, devices, ids and rows at every call, which waits for the device.
            disable_bonus_tokens: Emit no bonus token: the last column is always -1.
            use_flashinfer: Chose one of vLLM's kernels, and chooses nothing here.
        """
        super().__init__(create("rejection"), strict_mode=strict_mode, disable_bonus_tokens=disable_bonus_tokens)

    def forward(
        self,
        target_with_bonus_probs: torch.Tensor,
        bonus_token_ids: torch.Tensor,
        draft_probs: torch.Tensor,
        draft_token_ids: torch.Tensor,
        seeded_seqs: Mapping[int, torch.Generator] | None = None,
    ) -> torch.Tensor:
        """Accept drafted tokens, or replace the first rejected one by a draw from max(p - q, 0), normalised.

        Args:
            target_with_bonus_probs: [B, k+1, V] float32, of which the last row is not read, or [B, k, V].
            bonus_token_ids: [B, 1] int64, emitted where all drafted tokens are accepted.
            draft_probs: [B, k, V] float32.
            draft_token_ids: [B, k] int64.
            seeded_seqs: From row to the generator of a request that has its own. Rows from B on are passed over.

        Returns:
            [B, k+1] int64, padded with -1.

        Raises:
            InputError: Shapes, dtypes or devices do not fit; `StrictModeError` in strict mode.
            StatusError: In strict mode, a row is no law (NaN, unnormalised).
        """
        if draft_probs is None:
            msg = "draft_probs: expected [B, k, V] probabilities, got None. For n-gram drafts pass one-hot rows."
            raise InputError(msg)
        return self._sample(target_with_bonus_probs, bonus_token_ids, draft_probs, draft_token_ids, seeded_seqs or {})

    def _get_accepted(
        self, target_probs: torch.Tensor, draft_probs: torch.Tensor, draft_token_ids: torch.Tensor
    ) -> torch.Tensor:
        """Return which drafted tokens pass, each on its own: [B, k] bool, of probabilities [B, k, V]."""
        return self._passes(target_probs, draft_probs, draft_token_ids)


class _GuardedTypical(AcceptanceStrategy):
    """`typical` with vLLM's guard of the logarithm, which lowers the entropy of flat rows."""

    name = "vllm-typical"
    # Bonus tokens are given: with `bonus` an argmax, nothing is drawn and no row is weighed.
    traits = Traits(guarantee="lossy", bound="none", recovered="argmax", bonus="argmax")

    class Options(Options):
        """Those of `typical` that vLLM's sampler has."""

        posterior_threshold: float = Field(ge=0, allow_inf_nan=False)
        posterior_alpha: float = Field(ge=0, allow_inf_nan=False)

    @row_sum
    def guarded_negentropy(p: Value) -> Value:
        """Sum to sum_x p(x) log2(p(x) + 1e-5).

        A factor here would cost one more pass over the row. In place, the product takes no more of a CPU's cache.
        """
        logs = ops.log2(p, 1e-5)
        logs *= p
        return logs

    @rule
    def accept(
        target_prob: Value, guarded_negentropy: Value, posterior_threshold: Value, posterior_alpha: Value
    ) -> Value:
        """Return h."""
        typical = posterior_alpha * ops.exp(ops.log(2.0) * guarded_negentropy)
        threshold = ops.minimum(typical, posterior_threshold)
        return ops.where(target_prob > threshold, 1.0, 0.0)


class TypicalAcceptanceSampler(_SpecDecodeSampler):
    """Typical acceptance (Medusa, arXiv 2401.10774, section 3.3.1), as the strategy `typical` but for vLLM's 1e-5."""

    def __init__(
        self,
        posterior_threshold: float = 0.09,
        posterior_alpha: float = 0.3,
        strict_mode: bool = False,  # noqa: FBT001, FBT002 - vLLM's signature
        *,
        disable_bonus_tokens: bool = False,
    ) -> None:
        """Create a typical acceptance sampler.

        Args:
            posterior_threshold: Probability that always suffices.
            posterior_alpha: Factor of exp(-entropy), which suffices as well.
            strict_mode: Check shapes, dtypes, devices, ids and rows at every call, which waits for the device.
            disable_bonus_tokens: Emit no bonus token: the last column is always -1.

        Raises:
            OptionError: A number is out of range.
            InputError: A flag is given for one.
        """
        for name, value in (("posterior_threshold", posterior_threshold), ("posterior_alpha", posterior_alpha)):
            if isinstance(value, bool):
                msg = f"{name}: expected a number, got {value}; strict_mode is the third argument"
                raise InputError(msg)
        strategy = _GuardedTypical(posterior_threshold=posterior_threshold, posterior_alpha=posterior_alpha)
        super().__init__(strategy, strict_mode=strict_mode, disable_bonus_tokens=disable_bonus_tokens)
        self._options: dict[str, float] = strategy.options.model_dump()

    @property
    def _posterior_threshold(self) -> float:
        """The probability that always suffices; only read, so that a new number is not ignored."""
        return self._options["posterior_threshold"]

    @property
    def _posterior_alpha(self) -> float:
        """The factor of exp(-entropy), likewise."""
        return self._options["posterior_alpha"]

    def forward(
        self,
        target_with_bonus_probs: torch.Tensor,
        bonus_token_ids: torch.Tensor,
        draft_probs: torch.Tensor | None,  # noqa: ARG002 - vLLM's signature
        draft_token_ids: torch.Tensor,
    ) -> torch.Tensor:
        """Accept typical tokens, and replace the first that is not by the target's argmax.

        Args:
            target_with_bonus_probs: [B, k+1, V] float32, of which the last row is not read, or [B, k, V].
            bonus_token_ids: [B, 1] int64, emitted where all drafted tokens are accepted.
            draft_probs: Not read.
            draft_token_ids: [B, k] int64.

        Returns:
            [B, k+1] int64, padded with -1.

        Raises:
            InputError: Shapes, dtypes or devices do not fit; `StrictModeError` in strict mode.
            StatusError: In strict mode, a row is no law (NaN, unnormalised).
        """
        return self._sample(target_with_bonus_probs, bonus_token_ids, None, draft_token_ids, None)

    def _evaluate_accepted_tokens(self, target_probs: torch.Tensor, draft_token_ids: torch.Tensor) -> torch.Tensor:
        """Return which drafted tokens pass, each on its own: [B, k] bool, of probabilities [B, k, V]."""
        return self._passes(target_probs, None, draft_token_ids)

    def _get_recovered_token_ids(self, target_probs: torch.Tensor) -> torch.Tensor:
        """Return what replaces a rejected token, the argmax of [B, k, V]: [B, k] int64."""
        return target_probs.argmax(-1)
