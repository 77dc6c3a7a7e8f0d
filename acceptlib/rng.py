"""Keyed random streams: Philox4x32-10, by the request's own seed and offset.

Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3". The key is the 64-bit seed; the counter is
(position, purpose, low and high word of the offset). So a request's random numbers depend only on its seed, its offset
and the position: not on its batch row, its neighbours, padding or the backend.
"""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass
from enum import IntEnum
from numbers import Integral
from typing import Any, Final

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor

from acceptlib.arrays import Array, arange, as_array, as_tensor, float64
from acceptlib.errors import InputError, expect_int, kind_of, short_repr

ROUNDS: Final = 10
MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
WEYL: Final = (0x9E3779B9, 0xBB67AE85)
MASK: Final = 0xFFFFFFFF
INT64_MIN: Final = -(2**63)
INT64_MAX: Final = 2**63 - 1

CUDA_STEP: Final = 4
"""Least step by which torch's generators on a GPU advance their offsets: the numbers of one Philox evaluation."""

_ADVANCING: Final = threading.Lock()
"""Two threads must not find one generator at the same place."""


class Purpose(IntEnum):
    """What a random number is for; no two purposes share a number."""

    ACCEPT = 0
    EMIT = 1
    DRAFT = 2  # drafting, see `Rng.draft_bits`
    SEED = 3  # per-request seeds from one number, see `Root`


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Uniforms:
    """Every random number of one `verify` call.

    Attributes:
        accept: [T] or [B, K] float64 in [0, 1), one per drafted token.
        emit: [B] int64, 64 random bits for the one draw of each request.
    """

    accept: torch.Tensor
    emit: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rng:
    """One random stream per request.

    `verify` consumes one step of each stream and adds 1 to `offsets` in place, so no number is used twice. Keep the
    tensors for the life of a request and permute them with the batch.

    Attributes:
        seeds: [B] int64, contiguous.
        offsets: [B] int64, contiguous, the step each stream is at.
        advances: Whether `verify` advances `offsets`. If false, it only reads them, and the caller counts steps.
    """

    seeds: torch.Tensor
    offsets: torch.Tensor
    advances: bool = True

    def __post_init__(self) -> None:
        """Check types, shapes and dtypes."""
        for name, value in (("seeds", self.seeds), ("offsets", self.offsets)):
            if not isinstance(value, torch.Tensor) or value.is_nested:
                msg = f"Rng {name}: expected a torch.Tensor, got {kind_of(value)}"
                raise InputError(msg)
            if value.dtype != torch.int64 or value.ndim != 1 or not value.is_contiguous():
                strides = "" if value.is_contiguous() else f" of strides {list(value.stride())}"
                msg = (
                    f"Rng {name}: expected [B] int64, contiguous, got {list(value.shape)} {value.dtype}{strides}. Make "
                    "such a tensor once and keep it: offsets advance in place."
                )
                raise InputError(msg)
        if self.advances and (self.seeds is self.offsets or _share(self.seeds, self.offsets)):
            msg = "Rng: expected seeds and offsets that share no memory: advancing the one would change the other"
            raise InputError(msg)
        if not isinstance(self.advances, bool):
            msg = f"Rng advances: expected True or False, got {short_repr(self.advances)}"
            raise InputError(msg)
        if self.seeds.shape != self.offsets.shape or self.seeds.device != self.offsets.device:
            msg = (
                f"Rng: expected seeds and offsets of one length on one device, got {list(self.seeds.shape)} on "
                f"{self.seeds.device} and {list(self.offsets.shape)} on {self.offsets.device}"
            )
            raise InputError(msg)

    @classmethod
    def of(cls, source: Rng | torch.Generator | int | None, num_requests: int, device: torch.device | str) -> Rng:
        """Return streams for `num_requests` requests.

        Args:
            source: An `Rng` is returned as it is. A `torch.Generator`, or None for torch's default one, draws fresh
                seeds and offsets. From an int, modulo 2^64, a seed is derived for each row, with offset 0: equal ints
                give equal streams, call after call.
            num_requests: B.
            device: Where the tensors live.

        Raises:
            InputError: `source` has another type, or is an `Rng` of another length or device.
        """
        device = torch.device(device)
        if isinstance(source, Rng):
            there = source.seeds.device
            fits = there == device or (device.index is None and there.type == device.type)  # any of that kind
            if source.seeds.shape[0] != num_requests or not fits:
                msg = (
                    f"rng: expected seeds [{num_requests}] on {device}, got {list(source.seeds.shape)} on "
                    f"{source.seeds.device}"
                )
                raise InputError(msg)
            return source
        if source is None or isinstance(source, torch.Generator):
            where = device if source is None else source.device
            # Offsets of zero would be one kernel more, and any place in a fresh stream is as good.
            # With None a compiled caller would have to know the sizes.
            given: dict[str, Any] = {} if source is None else {"generator": source}
            words = torch.randint(INT64_MIN, INT64_MAX, (2, num_requests), device=where, **given).to(device)
            return cls(seeds=words[0], offsets=words[1])
        if isinstance(source, Integral) and not isinstance(source, bool):
            return Root(wrap(int(source)), 0).streams(num_requests, device)
        msg = f"rng: expected acceptlib.Rng, torch.Generator, int or None, got {type(source).__name__}"
        raise InputError(msg)

    def uniforms(self, max_num_draft_tokens: int) -> Uniforms:
        """Return the numbers that `verify` would use at this step, accept [B, K] and emit [B], without advancing.

        Raises:
            InputError: K is not an int >= 0.
        """
        expect_int("max_num_draft_tokens", max_num_draft_tokens)
        # The last column is the draw, so that one Philox evaluation gives every number of the call.
        seeds, offsets = as_array(self.seeds), as_array(self.offsets)
        columns = _columns.__wrapped__ if _is_traced(self.seeds) else _columns
        position, purpose = columns(max_num_draft_tokens, self.seeds.device)
        words = philox(counters(position, purpose, offsets[:, None]), seeds[:, None])
        return Uniforms(accept=as_tensor(to_uniform(words[:, :, :-1])), emit=as_tensor(join(words[:, :, -1])))

    def draft_bits(self, position: int) -> torch.Tensor:
        """Return [B] int64, 64 random bits per request for drafting the token at `position` of this step.

        Raises:
            InputError: The position is not an int in [0, 2^32).
        """
        if not isinstance(position, Integral) or isinstance(position, bool) or not 0 <= position <= MASK:
            msg = f"position: expected an int in [0, 2^32), got {short_repr(position)}"
            raise InputError(msg)
        counter = counters(int(position), Purpose.DRAFT, as_array(self.offsets))  # of NumPy's uint64, floats
        return as_tensor(join(philox(counter, as_array(self.seeds))))


@dataclass(frozen=True, slots=True)
class Root:
    """One seed and one offset, signed 64 bits, that the streams of a call's requests are derived from.

    The seed of row b's stream is what the counter (b, `Purpose.SEED`, offset) gives under this seed; its offset is 0.
    The fused kernels derive it where they use it, so that a call without streams of its own takes no extra kernel.
    """

    seed: int
    offset: int

    def streams(self, num_requests: int, device: torch.device) -> Rng:
        """Return the streams of `num_requests` requests."""
        offsets = torch.zeros(num_requests, dtype=torch.int64, device=device)
        words = as_array(offsets)
        counter = counters(arange(num_requests, words), Purpose.SEED, words + self.offset)
        return Rng(seeds=as_tensor(join(philox(counter, words + self.seed))), offsets=offsets)


def resolve(source: Rng | torch.Generator | int | None, num_requests: int, device: torch.device) -> Rng | Root:
    """Return the streams of one call, as `Rng.of` does, or what they are derived from.

    The latter, a `Root`, comes from an int, or on a GPU from the state of a generator, which advances.
    """
    if isinstance(source, Rng):  # first, since it is what engines pass
        return Rng.of(source, num_requests, device)
    if isinstance(source, int) and not isinstance(source, bool):
        return Root(wrap(source), 0)
    if source is None or isinstance(source, torch.Generator):
        where = device if source is None else source.device
        # A captured generator's state is the graph's, and advances on the device.
        if where.type == "cuda" and where == device and not torch.cuda.is_current_stream_capturing():
            generator = torch.cuda.default_generators[device.index] if source is None else source
            with _ADVANCING:
                offset = generator.get_offset()
                generator.set_offset(offset + CUDA_STEP)
            return Root(wrap(generator.initial_seed()), INT64_MIN + offset)  # unlike those of an int
    return Rng.of(source, num_requests, device)


def _is_traced(words: Array) -> bool:
    """Return whether words belong to a graph that is being made, and hold no values."""
    return torch.compiler.is_dynamo_compiling() or isinstance(words, FakeTensor)


def _share(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two contiguous tensors [B] int64 share memory; False if they have none."""
    if _is_traced(one):
        return False
    try:
        first, second = one.data_ptr(), other.data_ptr()
    except RuntimeError:  # of a transformed function, as by torch.vmap
        return False
    return bool(first) and abs(first - second) < 8 * one.numel()


def counters(position: Array | int, purpose: Array | int, offset: Array) -> Array:
    """Return Philox counters [4, ...], for position and purpose that broadcast with `offset`."""
    if isinstance(purpose, Purpose):
        # numpy asks an enum's class for attributes. In Python 3.11 that runs code of `enum`, and numpy drops what is
        # raised there, a KeyboardInterrupt too.
        purpose = int(purpose)
    zero = position * (offset & 0)
    words = (zero + position, zero + purpose, zero + (offset & MASK), zero + ((offset >> 32) & MASK))
    return torch.stack(words) if isinstance(zero, torch.Tensor) else np.stack(words)


def philox(counter: Array, seed: Array) -> Array:
    """Evaluate Philox4x32-10.

    Args:
        counter: [4, ...] int64 with values below 2^32, a tensor or an array.
        seed: int64 that broadcasts with `counter[0]`; its low and high words are the key.

    Returns:
        [4, ...] int64 with values below 2^32, of the same kind.
    """
    tensors = isinstance(counter, torch.Tensor)
    stack, swap = (torch.stack, torch.flipud) if tensors else (np.stack, _swap)
    # A tracer warns about cached functions, and what is fake must not be kept.
    constants = _constants.__wrapped__ if _is_traced(counter) else _constants
    multiplier, weyl, half, mask = constants(counter.device if tensors else None, counter.ndim)
    # Both multiplications of a round run as one: `even` holds words 0 and 2, `odd` words 3 and 1. Only what is
    # multiplied must be below 2^32, so that is what is masked.
    even, odd = counter[0::2], swap(counter[1::2])
    for key in stack((seed >> half, seed)) + weyl:
        product = even * multiplier
        # (c0, c2) <- (high(M1 c2) ^ c1 ^ k0, high(M0 c0) ^ c3 ^ k1), (c1, c3) <- (low(M1 c2), low(M0 c0))
        even = swap(((product >> half) ^ odd ^ key) & mask)
        odd = product
    odd = odd & mask
    return stack((even[0], odd[1], even[1], odd[0]))


def uniform_at(position: int, seed: int, offset: int) -> float:
    """Return one of `Rng.uniforms` from plain numbers, which is quicker than arrays where few are wanted."""
    high, low = _philox_at(position, Purpose.ACCEPT, seed, offset)
    return ((high << 21) | (low >> 11)) * 2.0**-53


def bits_at(seed: int, offset: int) -> int:
    """Return the 64 bits of a request's draw, as `uniform_at` returns its uniforms."""
    high, low = _philox_at(0, Purpose.EMIT, seed, offset)
    return wrap((high << 32) | low)


def _philox_at(position: int, purpose: int, seed: int, offset: int) -> tuple[int, int]:
    """Return the first two words of `philox` at one place of one stream."""
    words = (position, purpose, offset & MASK, (offset >> 32) & MASK)
    first, second = seed & MASK, (seed >> 32) & MASK
    for _ in range(ROUNDS):
        left, right = words[0] * MULTIPLIERS[0], words[2] * MULTIPLIERS[1]
        words = ((right >> 32) ^ words[1] ^ first, right & MASK, (left >> 32) ^ words[3] ^ second, left & MASK)
        first, second = (first + WEYL[0]) & MASK, (second + WEYL[1]) & MASK
    return words[:2]


def _swap(words: Array) -> Array:
    """Return an array's rows in reverse; `np.flipud` takes longer than the multiplications."""
    return words[::-1]


@functools.lru_cache
def _constants(device: torch.device | None, ndim: int) -> tuple[Array, ...]:
    """Return multipliers [2, ...], what each round adds to the key's words [ROUNDS, 2, ...], 32 and the mask.

    All are words, because a plain number beside an array takes NumPy twice as long.
    """
    column = [1] * (ndim - 1)
    multiplier = np.array(MULTIPLIERS, np.int64).reshape(2, *column)
    weyl = (np.arange(ROUNDS)[:, None] * np.array(WEYL[::-1], np.int64)).reshape(ROUNDS, 2, *column)
    words = (multiplier, weyl, np.array(32), np.array(MASK))
    return words if device is None else tuple(torch.from_numpy(array).to(device) for array in words)


@functools.lru_cache
def _columns(max_num_draft_tokens: int, device: torch.device) -> tuple[Array, Array]:
    """Return position and purpose, [K+1] int64, of the numbers of one step."""
    position = torch.tensor([*range(max_num_draft_tokens), 0], device=device)
    purpose = torch.tensor([Purpose.ACCEPT] * max_num_draft_tokens + [Purpose.EMIT], device=device)
    return as_array(position), as_array(purpose)


def join(words: Array) -> Array:
    """Return the first two of [4, ...] words as 64 bits in an int64."""
    return (words[0] << 32) | words[1]


def to_uniform(words: Array) -> Array:
    """Return 53 bits of the first two of [4, ...] words as a float64 in [0, 1)."""
    bits = (words[0] << 21) | (words[1] >> 11)
    return float64(bits) * 2.0**-53


def wrap(value: int) -> int:
    """Return `value` modulo 2^64 as a signed 64-bit integer."""
    return value if INT64_MIN <= value <= INT64_MAX else (value + 2**63) % 2**64 - 2**63
