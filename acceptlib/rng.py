"""Keyed random streams: Philox4x32-10, by the request's own seed and offset.

Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3". The key is the 64-bit seed; the counter is
(position, purpose, low and high word of the offset). So a request's random numbers depend on nothing but its seed,
its offset and the position: not on its batch row, its neighbours, padding or the backend.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from enum import IntEnum

import torch

from acceptlib.errors import InputError

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
MASK = 0xFFFFFFFF


class Purpose(IntEnum):
    """What a random number is for; no two purposes share one."""

    ACCEPT = 0
    EMIT = 1
    DRAFT = 2  # reserved for the caller's own drafting
    SEED = 3  # per-request seeds from one int


@dataclass(frozen=True, kw_only=True, slots=True)
class Uniforms:
    """Every random number of one `verify` call.

    Attributes:
        accept: [T] or [B, K] float64 in [0, 1), one a drafted token.
        emit: [B] int64, 64 random bits for the one draw of each request.
    """

    accept: torch.Tensor
    emit: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Rng:
    """One random stream a request.

    `verify` consumes one step of each stream and adds 1 to `offsets` in place, so no number is used twice. Keep the
    tensors for the life of a request and permute them with the batch.

    Attributes:
        seeds: [B] int64.
        offsets: [B] int64, the step each stream is at.
    """

    seeds: torch.Tensor
    offsets: torch.Tensor

    def __post_init__(self) -> None:
        """Check shapes and dtypes."""
        for name, value in (("seeds", self.seeds), ("offsets", self.offsets)):
            if value.dtype != torch.int64 or value.ndim != 1:
                msg = f"Rng {name}: expected [B] int64, got {list(value.shape)} {value.dtype}"
                raise InputError(msg)
        if self.seeds.shape != self.offsets.shape or self.seeds.device != self.offsets.device:
            msg = (
                f"Rng: expected seeds and offsets of one length on one device, got {list(self.seeds.shape)} on "
                f"{self.seeds.device} and {list(self.offsets.shape)} on {self.offsets.device}"
            )
            raise InputError(msg)

    @classmethod
    def of(cls, source: Rng | torch.Generator | int | None, num_requests: int, device: torch.device) -> Rng:
        """Return streams for `num_requests` requests.

        Args:
            source: An `Rng` is returned as it is. A `torch.Generator`, or None for torch's default one, draws fresh
                seeds. An int derives a seed for each row from it: equal ints give equal streams, call after call.
            num_requests: B.
            device: Where the tensors live.

        Raises:
            InputError: `source` is of another type, or an `Rng` of another length or device.
        """
        if isinstance(source, Rng):
            if source.seeds.shape[0] != num_requests or source.seeds.device != device:
                msg = (
                    f"rng: expected seeds [{num_requests}] on {device}, got {list(source.seeds.shape)} on "
                    f"{source.seeds.device}"
                )
                raise InputError(msg)
            return source
        offsets = torch.zeros(num_requests, dtype=torch.int64, device=device)
        if source is None or isinstance(source, torch.Generator):
            where = device if source is None else source.device
            limits = torch.iinfo(torch.int64)
            seeds = torch.randint(limits.min, limits.max, (num_requests,), generator=source, device=where)
            return cls(seeds=seeds.to(device), offsets=offsets)
        if isinstance(source, int):
            key = torch.full((num_requests,), _wrap(source), dtype=torch.int64, device=device)
            rows = torch.arange(num_requests, device=device)
            return cls(seeds=join(philox(counters(rows, Purpose.SEED, offsets), key)), offsets=offsets)
        msg = f"rng: expected acceptlib.Rng, torch.Generator, int or None, got {type(source).__name__}"
        raise InputError(msg)

    def uniforms(self, max_num_draft_tokens: int) -> Uniforms:
        """Return the numbers that `verify` would use at this step, as accept [B, K] and emit [B]; advance nothing."""
        # The last column is the draw, so that one Philox evaluation gives every number of the call.
        position, purpose = _columns(max_num_draft_tokens, self.seeds.device)
        words = philox(counters(position, purpose, self.offsets[:, None]), self.seeds[:, None])
        return Uniforms(accept=to_uniform(words[:, :, :-1]), emit=join(words[:, :, -1]))

    def draft_bits(self, position: int) -> torch.Tensor:
        """Return [B] int64, 64 random bits a request for drafting the token at `position` of this step."""
        positions = torch.full_like(self.seeds, position)
        return join(philox(counters(positions, Purpose.DRAFT, self.offsets), self.seeds))


def counters(position: torch.Tensor, purpose: torch.Tensor | int, offset: torch.Tensor) -> torch.Tensor:
    """Return Philox counters [4, ...] as int64 words for broadcast position, purpose and offset."""
    if not isinstance(purpose, torch.Tensor):
        purpose = torch.full_like(position, purpose)
    offset, zero = offset + 0 * position, 0 * offset
    return torch.stack((position + zero, purpose + zero, offset & MASK, (offset >> 32) & MASK))


def philox(counter: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
    """Evaluate Philox4x32-10.

    Args:
        counter: [4, ...] int64 with values below 2^32.
        seed: int64 that broadcasts with `counter[0]`; its low and high words are the key.

    Returns:
        [4, ...] int64 with values below 2^32.
    """
    multiplier, steps = _constants(counter.device)
    shape = counter.shape
    counter = counter.reshape(4, -1)
    keys = torch.stack((seed >> 32, seed)).expand(2, *shape[1:]).reshape(2, -1) + steps
    # Both multiplications of a round run as one: `even` holds words 0 and 2, `odd` words 3 and 1. Only what is
    # multiplied must be below 2^32, so that is what is masked.
    even, odd = counter[0::2], counter[[3, 1]]
    for key in keys.unbind():
        product = even * multiplier
        # (c0, c2) <- (high(M1 c2) ^ c1 ^ k0, high(M0 c0) ^ c3 ^ k1), (c1, c3) <- (low(M1 c2), low(M0 c0))
        even = (product >> 32).bitwise_xor_(odd).bitwise_xor_(key).bitwise_and_(MASK).flip(0)
        odd = product
    odd = odd & MASK
    return torch.stack((even[0], odd[1], even[1], odd[0])).view(shape)


@functools.lru_cache
def _constants(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the multipliers [2, 1], and what each round adds to the key's high and low word, [10, 2, 1]."""
    multiplier = torch.tensor(MULTIPLIERS, dtype=torch.int64, device=device)[:, None]
    weyl = torch.tensor(WEYL[::-1], dtype=torch.int64, device=device)[:, None]
    return multiplier, torch.arange(ROUNDS, device=device)[:, None, None] * weyl


@functools.lru_cache
def _columns(max_num_draft_tokens: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return position and purpose, [K+1] int64, of the numbers of one step."""
    position = [*range(max_num_draft_tokens), 0]
    purpose = [Purpose.ACCEPT] * max_num_draft_tokens + [Purpose.EMIT]
    return torch.tensor(position, device=device), torch.tensor(purpose, device=device)


def join(words: torch.Tensor) -> torch.Tensor:
    """Return the first two of [4, ...] words as 64 bits in an int64."""
    return (words[0] << 32) | words[1]


def to_uniform(words: torch.Tensor) -> torch.Tensor:
    """Return 53 bits of the first two of [4, ...] words as a float64 in [0, 1)."""
    return ((words[0] << 21) | (words[1] >> 11)).to(torch.float64) * 2.0**-53


def _wrap(value: int) -> int:
    """Return `value` modulo 2^64 as a signed 64-bit integer."""
    return (value + 2**63) % 2**64 - 2**63
