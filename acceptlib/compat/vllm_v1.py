"""The rejection sampler of vLLM's V1 engine, `vllm.v1.sample.rejection_sampler`.

`docs/compat/vllm_v1.md` says what differs.

A batch of B requests holds T drafted tokens, request b `num_draft_tokens[b]` of them, at most K.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Final, Protocol

import torch

from acceptlib import PLACEHOLDER_TOKEN_ID, AcceptanceStrategy, Rng, SamplingParams, Traits, Uniforms, rule
from acceptlib.compat._common import bonus_tokens, create, expect_tensor, request_streams, unused_uniforms
from acceptlib.errors import InputError
from acceptlib.ops import Value

__all__ = [
    "GREEDY_TEMPERATURE",
    "MAX_SPEC_LEN",
    "PLACEHOLDER_TOKEN_ID",
    "RejectionSampler",
    "SamplingMetadata",
    "SpecDecodeMetadata",
    "compute_probs",
    "expand_batch_to_tokens",
    "generate_uniform_probs",
    "rejection_sample",
    "sample_recovered_tokens",
]

GREEDY_TEMPERATURE: Final = -1
"""Temperature of a greedy request; 0 is taken as greedy too."""

MAX_SPEC_LEN: Final = 32
"""vLLM's limit on K. There is none here."""


@dataclass
class SpecDecodeMetadata:
    """What vLLM says of a step's drafts; its own objects are taken as well.

    Attributes:
        draft_token_ids: [T] int32 or int64.
        num_draft_tokens: One number a request, on the host.
        cu_num_draft_tokens: [B] int32, their running sum, without a leading 0.
        target_logits_indices: [T], where the step's logits [T+B, V] hold the rows of drafted tokens; not read here.
        bonus_logits_indices: [B], where they hold bonus rows; not read here.
        logits_indices: [T+B], of the model's output; not read here.
        max_spec_len: K.
    """

    draft_token_ids: torch.Tensor
    num_draft_tokens: list[int]
    cu_num_draft_tokens: torch.Tensor
    target_logits_indices: torch.Tensor | None = None
    bonus_logits_indices: torch.Tensor | None = None
    logits_indices: torch.Tensor | None = None
    max_spec_len: int = field(init=False)

    def __post_init__(self) -> None:
        """Find K."""
        self.max_spec_len = max(self.num_draft_tokens, default=0)

    @classmethod
    def make_dummy(cls, draft_token_ids: list[list[int]], device: torch.device) -> SpecDecodeMetadata:
        """Return metadata of drafted tokens, one list a request."""
        counts = [len(ids) for ids in draft_token_ids]
        return cls(
            draft_token_ids=torch.tensor(
                list(itertools.chain.from_iterable(draft_token_ids)), dtype=torch.int32, device=device
            ),
            num_draft_tokens=counts,
            cu_num_draft_tokens=torch.tensor(list(itertools.accumulate(counts)), dtype=torch.int32, device=device),
        )


@dataclass
class SamplingMetadata:
    """How vLLM's requests are sampled; its own objects are taken as well.

    Only the fields up to `generators` are read: in vLLM too, the others act on logits before or after this step. From
    there on vLLM's versions order them differently, so they are given by name.

    Attributes:
        temperature: [B] float32, `GREEDY_TEMPERATURE` for greedy requests; None if `all_greedy`.
        all_greedy: Whether every request is greedy.
        all_random: Whether none is.
        top_p: [B] float32 in (0, 1], or None.
        top_k: [B] integers, V or 0 for off, or None.
        generators: From a request's row to its own generator, on the rows' device.
    """

    temperature: torch.Tensor | None
    all_greedy: bool
    all_random: bool
    top_p: torch.Tensor | None = None
    top_k: torch.Tensor | None = None
    _: KW_ONLY
    generators: dict[int, torch.Generator] = field(default_factory=dict)
    min_p: torch.Tensor | None = None
    max_num_logprobs: int | None = None
    no_penalties: bool = True
    prompt_token_ids: torch.Tensor | None = None
    frequency_penalties: torch.Tensor | None = None
    presence_penalties: torch.Tensor | None = None
    repetition_penalties: torch.Tensor | None = None
    output_token_ids: list[list[int]] = field(default_factory=list)
    min_tokens: dict[int, tuple[int, set[int]]] = field(default_factory=dict)
    logit_bias: list[dict[int, float] | None] = field(default_factory=list)
    allowed_token_ids_mask: torch.Tensor | None = None
    bad_words_token_ids: dict[int, list[list[int]]] = field(default_factory=dict)


class _Drafts(Protocol):
    """What is read of a `SpecDecodeMetadata`."""

    draft_token_ids: torch.Tensor
    num_draft_tokens: Any
    cu_num_draft_tokens: torch.Tensor
    max_spec_len: Any


class _Sampling(Protocol):
    """What is read of a `SamplingMetadata`."""

    temperature: Any
    all_greedy: Any
    all_random: Any
    top_p: Any
    top_k: Any
    generators: Any


class RejectionSampler(torch.nn.Module):
    """Speculative sampling (arXiv 2211.17192) for random requests, the target's argmax for greedy ones."""

    def __init__(self, *given: object, **named: object) -> None:
        """Create a sampler.

        Raises:
            InputError: Something is given, as later versions of vLLM do.
        """
        super().__init__()
        if given or named:
            msg = (
                "RejectionSampler: expected no arguments. It replaces the class of the versions of vLLM that make it "
                "without any; later ones make theirs of a sampler and pass all logits: call strategy.verify there"
            )
            raise InputError(msg)

    def forward(
        self,
        metadata: _Drafts,
        draft_probs: torch.Tensor | None,
        target_logits: torch.Tensor,
        bonus_token_ids: torch.Tensor,
        sampling_metadata: _Sampling,
    ) -> torch.Tensor:
        """Verify the drafted tokens of a step.

        Args:
            metadata: A `SpecDecodeMetadata`, vLLM's or the one here. A negative drafted id ends its request's chain
                with a token drawn from the row there.
            draft_probs: [T, V] float32, or None for one-hot drafts (n-gram).
            target_logits: [T, V] float32, float16 or bfloat16; never written.
            bonus_token_ids: [B, 1] or [B] int32 or int64, emitted where all drafted tokens of the request are accepted.
            sampling_metadata: A `SamplingMetadata`, vLLM's or the one here.

        Returns:
            [B, K+1] int32, padded with `PLACEHOLDER_TOKEN_ID`.

        Raises:
            InputError: Shapes, dtypes or devices do not fit, or `max_spec_len` is less than a request's number.
        """
        expect_tensor("target_logits", target_logits, (len(metadata.draft_token_ids), "V"))
        _check_longest(metadata.num_draft_tokens, metadata.max_spec_len)
        if sampling_metadata.top_k is not None or sampling_metadata.top_p is not None:
            target_probs = compute_probs(target_logits, metadata.cu_num_draft_tokens, sampling_metadata)
            return rejection_sample(
                metadata.draft_token_ids,
                metadata.num_draft_tokens,
                metadata.max_spec_len,
                metadata.cu_num_draft_tokens,
                draft_probs,
                target_probs,
                bonus_token_ids,
                sampling_metadata,
            )
        if sampling_metadata.all_greedy:
            return _verify_greedy(metadata, bonus_token_ids, target_logits)
        temperature = sampling_metadata.temperature
        expect_tensor("sampling_metadata.temperature", temperature, (len(metadata.num_draft_tokens),))
        if not sampling_metadata.all_random:
            temperature = temperature.clamp(min=0)  # greedy requests have a negative one in vLLM, and 0 here
        return _verify(
            "rejection",
            metadata,
            bonus_token_ids,
            target_logits=target_logits,
            draft_probs=draft_probs,
            sampling=SamplingParams(temperature=temperature),
            rng=_streams(metadata.num_draft_tokens, sampling_metadata.generators, target_logits.device),
        )

    @staticmethod
    def parse_output(output_token_ids: torch.Tensor, vocab_size: int) -> list[list[int]]:
        """Return each request's emitted tokens, those in [0, vocab_size); waits for the device.

        Args:
            output_token_ids: [B, K+1], what `forward` returned.
            vocab_size: V.
        """
        return [[token for token in row if 0 <= token < vocab_size] for row in output_token_ids.tolist()]


def rejection_sample(  # noqa: PLR0913, PLR0917 - vLLM's signature
    draft_token_ids: torch.Tensor,
    num_draft_tokens: list[int],
    max_spec_len: int,
    cu_num_draft_tokens: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    bonus_token_ids: torch.Tensor,
    sampling_metadata: _Sampling,
) -> torch.Tensor:
    """Verify the drafted tokens of a step from probabilities.

    Args:
        draft_token_ids: [T] int32 or int64.
        num_draft_tokens: One number a request, on the host.
        max_spec_len: K, or a bound above it.
        cu_num_draft_tokens: [B] int32, their running sum.
        draft_probs: [T, V] or None for one-hot drafts.
        target_probs: [T, V] probabilities; logits do as well where all requests are greedy.
        bonus_token_ids: [B, 1] or [B].
        sampling_metadata: A `SamplingMetadata`.

    Returns:
        [B, max_spec_len+1] int32, padded with `PLACEHOLDER_TOKEN_ID`.

    Raises:
        InputError: Shapes, dtypes or devices do not fit, or `max_spec_len` is less than a request's number.
    """
    expect_tensor("target_probs", target_probs, (len(draft_token_ids), "V"))
    _check_longest(num_draft_tokens, max_spec_len)
    metadata = SpecDecodeMetadata(draft_token_ids, num_draft_tokens, cu_num_draft_tokens)
    metadata.max_spec_len = max_spec_len
    greedy = random = None
    if sampling_metadata.all_greedy or not sampling_metadata.all_random:  # an empty batch is both
        # As logits: an argmax needs no normalised rows.
        greedy = _verify_greedy(metadata, bonus_token_ids, target_probs)
    if not sampling_metadata.all_greedy:
        random = _verify(
            "rejection",
            metadata,
            bonus_token_ids,
            target_probs=target_probs,
            draft_probs=draft_probs,
            rng=_streams(num_draft_tokens, sampling_metadata.generators, target_probs.device),
        )
    if greedy is None or random is None:
        chosen = random if greedy is None else greedy
        assert chosen is not None  # noqa: S101 - one of the two ran
        return chosen
    temperature = sampling_metadata.temperature
    expect_tensor("sampling_metadata.temperature", temperature, (len(num_draft_tokens),))
    return torch.where((temperature <= 0)[:, None], greedy, random)


def compute_probs(
    logits: torch.Tensor, cu_num_draft_tokens: torch.Tensor, sampling_metadata: _Sampling
) -> torch.Tensor:
    """Return the law that each row of logits is sampled from.

    Args:
        logits: [T, V]; never written.
        cu_num_draft_tokens: [B] int32, the running sum of drafted tokens.
        sampling_metadata: A `SamplingMetadata`. Top-k keeps ties with the k-th; top-p then keeps the fewest largest
            entries that hold its share, one at least.

    Returns:
        [T, V] float32 probabilities; at temperature 1 for greedy requests, and `logits` itself where all are greedy.

    Raises:
        InputError: Shapes do not fit.
    """
    if sampling_metadata.all_greedy:
        return logits
    expect_tensor("logits", logits, ("T", "V"))

    def per_token(name: str) -> torch.Tensor:
        value = getattr(sampling_metadata, name)
        expect_tensor(f"sampling_metadata.{name}", value, (len(cu_num_draft_tokens),))
        return expand_batch_to_tokens(value, cu_num_draft_tokens, logits.shape[0])[:, None]

    temperature = per_token("temperature")
    raw = logits.to(torch.float32)
    largest = raw.amax(-1, keepdim=True)  # taken away first, as `verify` does: large logits would round otherwise
    scaled = (raw - largest) / temperature.masked_fill(temperature <= 0, 1)
    if sampling_metadata.top_k is not None or sampling_metadata.top_p is not None:
        ordered, index = scaled.sort(-1)
        if sampling_metadata.top_k is not None:
            top_k = per_token("top_k").to(torch.int64)
            smallest = (logits.shape[1] - top_k).clamp(min=0).masked_fill(top_k <= 0, 0)
            ordered = ordered.masked_fill(ordered < ordered.gather(-1, smallest), -torch.inf)
        if sampling_metadata.top_p is not None:
            dropped = ordered.softmax(-1).cumsum(-1) <= 1 - per_token("top_p")
            dropped[:, -1] = False
            ordered = ordered.masked_fill(dropped, -torch.inf)
        scaled = torch.empty_like(ordered).scatter_(-1, index, ordered)
    return scaled.softmax(-1, dtype=torch.float32)


def expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: float = 0, replace_to: float = 0
) -> torch.Tensor:
    """Repeat a value of each request for each of its tokens.

    `[a, b, c]` and `[2, 5, 6]` give `[a, a, b, b, b, c]`. A request may have any number of tokens.

    Args:
        x: [B].
        cu_num_tokens: [B], the running sum of each request's number of tokens.
        num_tokens: T, the last of them.
        replace_from: A value to replace.
        replace_to: What replaces it.

    Returns:
        [T], of the dtype of `x`.

    Raises:
        InputError: `x` and `cu_num_tokens` differ in length.
    """
    expect_tensor("cu_num_tokens", cu_num_tokens, (x.shape[0],))
    tokens = torch.arange(num_tokens, device=x.device, dtype=cu_num_tokens.dtype)
    request = torch.searchsorted(cu_num_tokens.contiguous(), tokens, right=True).clamp_(max=x.shape[0] - 1)
    return x.masked_fill(x == replace_from, replace_to)[request]


def generate_uniform_probs(
    num_tokens: int,
    num_draft_tokens: list[int],
    generators: Mapping[int, torch.Generator],
    device: torch.device,
) -> torch.Tensor:
    """Return one uniform number a drafted token, reproducible for requests with a generator.

    `rejection_sample` does not use it: there, random numbers are made where they are used.

    Args:
        num_tokens: T.
        num_draft_tokens: One number a request. One without drafted tokens leaves its generator alone.
        generators: From a request's row to its own generator, on `device`.
        device: Where the numbers live.

    Returns:
        [T] float32 in [0, 1).

    Raises:
        InputError: The requests' numbers do not add up to T.
    """
    if sum(num_draft_tokens) != num_tokens:
        msg = f"num_tokens: expected {sum(num_draft_tokens)}, the sum of num_draft_tokens, got {num_tokens}"
        raise InputError(msg)
    device = torch.device(device)
    rng = _streams(num_draft_tokens, generators, device) or Rng.of(None, len(num_draft_tokens), device)
    uniforms = rng.uniforms(max(num_draft_tokens, default=0)).accept
    rows = [row[:count] for row, count in zip(uniforms, num_draft_tokens, strict=True)]
    flat = torch.cat(rows) if rows else torch.empty(0, dtype=torch.float64, device=device)
    # 24 bits, truncated: rounding to float32 could give 1.
    return (flat * 2**24).floor_().to(torch.float32) / 2**24


def sample_recovered_tokens(  # noqa: PLR0913, PLR0917 - vLLM's signature
    max_spec_len: int,  # noqa: ARG001
    num_draft_tokens: list[int],
    cu_num_draft_tokens: torch.Tensor,
    draft_token_ids: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    sampling_metadata: _Sampling,
    device: torch.device,
) -> torch.Tensor:
    """Draw the token that would replace each drafted one, from max(p - q, 0), normalised.

    A request's positions share one random number, since at most one of them is emitted. `rejection_sample` does not
    use this: it draws at the first rejection alone.

    Args:
        max_spec_len: Not read.
        num_draft_tokens: One number a request. One without drafted tokens leaves its generator alone.
        cu_num_draft_tokens: [B] int32, their running sum.
        draft_token_ids: [T] int32 or int64.
        draft_probs: [T, V] or None for one-hot drafts.
        target_probs: [T, V]; never written.
        sampling_metadata: A `SamplingMetadata`, for its generators.
        device: Of all tensors.

    Returns:
        [T], of the dtype of `draft_token_ids`.
    """
    num_tokens = draft_token_ids.shape[0]
    expect_tensor("target_probs", target_probs, (num_tokens, "V"))
    device = torch.device(device)
    streams = _streams(num_draft_tokens, sampling_metadata.generators, device)
    bits = (streams or Rng.of(None, len(num_draft_tokens), device)).uniforms(0).emit
    result = _RECOVER.verify(
        draft_token_ids,
        target_probs=target_probs,
        draft_probs=draft_probs,
        # Every token is a request of its own.
        cu_num_draft_tokens=torch.arange(num_tokens + 1, device=device),
        max_num_draft_tokens=1,
        bonus_token_ids=draft_token_ids,
        uniforms=Uniforms(
            accept=torch.zeros(num_tokens, dtype=torch.float64, device=device),
            emit=expand_batch_to_tokens(bits, cu_num_draft_tokens, num_tokens),
        ),
    )
    return result.output_token_ids[:, 0].to(draft_token_ids.dtype)


class _Recover(AcceptanceStrategy):
    """Accept nothing, and recover as `rejection` does."""

    name = "recover"
    traits = Traits(guarantee="lossy", bound="none")

    @rule
    def accept() -> Value:
        """Return h."""
        return 0.0

    @rule
    def residual(p: Value, q: Value) -> Value:
        """Return the weight of each entry."""
        return p - q


_RECOVER: Final = _Recover()


def _check_longest(num_draft_tokens: Sequence[int], max_spec_len: int) -> None:
    """Check that no request has more drafted tokens than K, before a generator draws for any."""
    longest = max(num_draft_tokens, default=0)
    if longest > max_spec_len:
        msg = f"max_spec_len: expected at least {longest}, as in num_draft_tokens, got {max_spec_len}"
        raise InputError(msg)


def _verify_greedy(metadata: _Drafts, bonus_token_ids: torch.Tensor, target_logits: torch.Tensor) -> torch.Tensor:
    uniforms = unused_uniforms(len(metadata.num_draft_tokens), int(metadata.max_spec_len), target_logits.device)
    return _verify("greedy", metadata, bonus_token_ids, target_logits=target_logits, uniforms=uniforms)


def _verify(strategy: str, metadata: _Drafts, bonus_token_ids: torch.Tensor, **arguments: Any) -> torch.Tensor:
    """Return the output of `verify` in vLLM's layout: no bonus rows, and counts without a leading 0."""
    num_requests = len(metadata.num_draft_tokens)
    expect_tensor("cu_num_draft_tokens", metadata.cu_num_draft_tokens, (num_requests,))
    result = create(strategy).verify(
        metadata.draft_token_ids,
        cu_num_draft_tokens=metadata.cu_num_draft_tokens,
        max_num_draft_tokens=int(metadata.max_spec_len),
        bonus_token_ids=bonus_tokens(bonus_token_ids, num_requests),
        **arguments,
    )
    return result.output_token_ids


def _streams(
    num_draft_tokens: Sequence[int], generators: Mapping[int, torch.Generator], device: torch.device
) -> Rng | None:
    """Return `request_streams`; a request without drafted tokens draws nothing from its generator."""
    if isinstance(generators, Mapping):  # else it is refused
        generators = {b: generators[b] for b, count in enumerate(num_draft_tokens) if count > 0 and b in generators}
    return request_streams(generators, len(num_draft_tokens), device)
