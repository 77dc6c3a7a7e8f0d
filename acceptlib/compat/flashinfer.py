"""FlashInfer's `flashinfer.sampling.chain_speculative_sampling`; `docs/compat/flashinfer.md` says what differs."""

from __future__ import annotations

import operator
import sys
from typing import Final, SupportsIndex

import torch

from acceptlib import Rng, VerifyResult
from acceptlib.compat._common import as_rows, create, expect_tensor
from acceptlib.errors import InputError

__all__ = ["chain_speculative_sampling", "sampling"]

ROW_STRIDE: Final = 1 << 40
"""Distance, in a seed's stream, between rows of a batch that share the seed: there is room for 2^23 rows."""

COUNT_DTYPES: Final = (torch.int32, torch.int64)

sampling = sys.modules[__name__]
"""This module, as FlashInfer's package has it: `flashinfer.sampling.chain_speculative_sampling`."""


def chain_speculative_sampling(  # noqa: PLR0913, PLR0917 - FlashInfer's signature
    draft_probs: torch.Tensor,
    draft_token_ids: torch.Tensor,
    target_probs: torch.Tensor,
    maybe_output_accepted_token_num: torch.Tensor | None = None,
    maybe_output_emitted_draft_token_num: torch.Tensor | None = None,
    deterministic: bool = True,  # noqa: ARG001, FBT001, FBT002 - FlashInfer's signature
    generator: torch.Generator | None = None,
    seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Verify drafted chains by speculative sampling (arXiv 2302.01318), the strategy `rejection`.

    Args:
        draft_probs: [B, K, V], the draft's probabilities.
        draft_token_ids: [B, K] int32 or int64, drawn from them. A negative id ends its request's chain.
        target_probs: [B, K+1, V], the target's probabilities.
        maybe_output_accepted_token_num: [B] int32 or int64; the second result is added to it, in place.
        maybe_output_emitted_draft_token_num: [B] int32 or int64; the third result is added to it, in place.
        deterministic: Has no effect: results always are.
        generator: Draws the seeds where `seed` is None; None is torch's default generator.
        seed: An int or an int64 or uint64 tensor of length 1, for the whole batch, or of length B, each request's own.
        offset: Where in the seed's stream the call starts, of the same kinds; 0 where None. One call uses one
            position, so 1 is the least that it must grow by from call to call.

    Returns:
        The emitted tokens, [B, K+1] int32 padded with -1; how many drafted tokens pass each on its own, [B]; how many
        drafted tokens are emitted, [B]. The counts are int32, or the tensors given, with the counts added.

    Raises:
        InputError: Shapes, dtypes or devices do not fit.
    """
    expect_tensor("draft_token_ids", draft_token_ids, ("B", "K"))
    expect_tensor("draft_probs", draft_probs, ("B", "K", "V"))
    expect_tensor("target_probs", target_probs, ("B", "K+1", "V"))
    num_requests, num_draft_tokens = draft_token_ids.shape
    device = target_probs.device
    for name, total in (
        ("maybe_output_accepted_token_num", maybe_output_accepted_token_num),
        ("maybe_output_emitted_draft_token_num", maybe_output_emitted_draft_token_num),
    ):
        if total is not None:
            expect_tensor(name, total, (num_requests,), device)
            if total.dtype not in COUNT_DTYPES:
                msg = f"{name}: expected int32 or int64, got {str(total.dtype).removeprefix('torch.')}"
                raise InputError(msg)
    if generator is not None and not isinstance(generator, torch.Generator):
        msg = f"generator: expected a torch.Generator or None, got {generator!r}"
        raise InputError(msg)
    rng: Rng | torch.Generator | None = generator
    if seed is not None or offset is not None:
        rng = _streams(seed, offset, generator, num_requests, device)
    elif generator is not None and torch.compiler.is_dynamo_compiling():
        rng = Rng.of(generator, num_requests, device)  # no operator takes a generator
    out = VerifyResult.empty(num_requests, num_draft_tokens, device, num_passed=True)
    create("rejection").verify(
        draft_token_ids, target_probs=as_rows(target_probs), draft_probs=as_rows(draft_probs), rng=rng, out=out
    )
    accepted, emitted = out.num_passed, out.num_accepted
    assert accepted is not None  # noqa: S101 - asked for above
    counts = (
        (maybe_output_accepted_token_num, accepted),
        (maybe_output_emitted_draft_token_num, emitted),
    )
    given = [(total, count) for total, count in counts if total is not None]
    if given:
        torch._foreach_add_(*map(list, zip(*given, strict=True)))  # one kernel for both
    accepted, emitted = (count if total is None else total for total, count in counts)
    return out.output_token_ids, accepted, emitted


def _streams(
    seed: int | torch.Tensor | None,
    offset: int | torch.Tensor | None,
    generator: torch.Generator | None,
    num_requests: int,
    device: torch.device,
) -> Rng:
    """Return each request's stream, by its own seed and offset; rows that share a seed are `ROW_STRIDE` apart."""
    for name, value in (("seed", seed), ("offset", offset)):
        if isinstance(value, torch.Tensor):
            fits = value.ndim == 1 and len(value) in {1, num_requests} and value.device == device
            fits = fits and value.dtype in {torch.int64, torch.uint64}
            got = f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')} on {value.device}"
        else:
            fits, got = value is None or isinstance(value, SupportsIndex), repr(value)
        if not fits:
            shapes = " or ".join(f"[{size}]" for size in sorted({1, num_requests}))
            what = f"an int, or a tensor {shapes} of int64 or uint64 on {device}"
            msg = f"{name}: expected {what}, got {got}"
            raise InputError(msg)
    start = _words(0 if offset is None else offset)
    if seed is None or (isinstance(seed, torch.Tensor) and len(seed) == num_requests):
        if isinstance(start, torch.Tensor):
            offsets = start.expand(num_requests).contiguous()
        else:
            offsets = torch.full((num_requests,), start, dtype=torch.int64, device=device)
    else:
        offsets = torch.arange(0, num_requests * ROW_STRIDE, ROW_STRIDE, device=device)
        if offset is not None:
            offsets += start
    if seed is None:
        return Rng(seeds=Rng.of(generator, num_requests, device).seeds, offsets=offsets, advances=False)
    key = _words(seed)
    seeds = key.expand(num_requests).contiguous() if isinstance(key, torch.Tensor) else torch.full_like(offsets, key)
    return Rng(seeds=seeds, offsets=offsets, advances=False)


def _words(value: int | torch.Tensor) -> int | torch.Tensor:
    """Return 64-bit words as int64, signed."""
    if isinstance(value, torch.Tensor):
        return value.view(torch.int64)
    return (operator.index(value) + 2**63) % 2**64 - 2**63  # a NumPy integer would overflow
