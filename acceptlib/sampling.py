"""Sampling parameters that verification applies to logits, per request. `docs/sampling.md` defines them to the bit."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Final, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from acceptlib.errors import InputError, short_repr

HALVES: Final = (torch.float16, torch.bfloat16)
"""Dtypes that no engine takes parameters in: float32 holds all of their numbers."""


class Parameter(NamedTuple):
    """A sampling parameter that is one number, or one per request.

    Attributes:
        name: Its name.
        kind: Type of the number.
        low: The smallest it may be.
        high: The largest; infinity itself is none.
        expected: What errors say was expected.
        off: The number that turns it off.
        tensor_dtypes: Dtypes of a tensor in its place.
        narrowed: Those of them that are converted to float32.
        number_dtype: Dtype of the tensor that a number becomes.
    """

    name: str
    kind: type
    low: float
    high: float
    expected: str
    off: float
    tensor_dtypes: tuple[torch.dtype, ...]
    narrowed: tuple[torch.dtype, ...]
    number_dtype: torch.dtype


_FLOATS: Final = (torch.float32, *HALVES, torch.float64)
_INTS: Final = (torch.int32, torch.int64)
_MAX_TEMPERATURE: Final = torch.finfo(torch.float32).max  # engines take it as float32
_TEMPERATURE: Final = "a finite float32 number >= 0 (0 is greedy)"

PARAMETERS: Final = (
    Parameter(
        "temperature", Real, 0, _MAX_TEMPERATURE, _TEMPERATURE, 1, _FLOATS, (*HALVES, torch.float64), torch.float32
    ),
    Parameter("top_k", Integral, 0, math.inf, "an int >= 0 (0 is off)", 0, _INTS, (), torch.int64),
    Parameter("top_p", Real, math.ulp(0.0), 1, "a number in (0, 1] (1 is off)", 1, _FLOATS, HALVES, torch.float64),
    Parameter("min_p", Real, 0, 1, "a number in [0, 1] (0 is off)", 0, _FLOATS, HALVES, torch.float64),
)

OFF: Final = {parameter.name: parameter.off for parameter in PARAMETERS}
"""The number that turns each parameter off."""

FILTERS: Final = ("top_k", "top_p", "min_p")
"""Those that leave entries out."""


@dataclass(frozen=True, slots=True, eq=False)
class LogitBias:
    """Numbers added to the logits of a few tokens, the same at every position of a request.

    Attributes:
        token_ids: [B, n] int32 or int64, distinct within a request, padded with -1. An id of at least the target's V
            marks its request in `VerifyResult.status`. An id beyond a narrower draft's rows is ignored there.
        values: [B, n] float32, added to the logits; -inf bans a token.
    """

    token_ids: torch.Tensor
    values: torch.Tensor

    def __post_init__(self) -> None:
        """Check kinds; shapes are checked by `verify`, which knows them."""
        for name in ("token_ids", "values"):
            value = getattr(self, name)
            if not isinstance(value, torch.Tensor):
                msg = f"LogitBias {name}: expected a torch.Tensor [B, n], got {type(value).__name__}"
                raise InputError(msg)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SamplingParams:
    """How a row of logits becomes the law that tokens are drawn from.

    Parameters apply in the order of transformers' processors: bias and mask, temperature, top-k, top-p, min-p. The last
    four are each None for off, one number for all requests, or a tensor [B] with one entry per request; mask and bias
    have shapes of their own. A number out of range raises an error here; a tensor entry out of range marks its request
    in `VerifyResult.status`.

    Attributes:
        temperature: >= 0, divides the logits. 0 makes the row one-hot at its argmax (lowest id among ties), whatever
            the filters. Floating point, taken as float32.
        top_k: >= 0, keeps the k largest logits and any that equal the smallest of them. 0, V and above are off. int32
            or int64.
        top_p: In (0, 1], keeps the fewest largest entries that hold this share of the mass left by top-k; among equal
            logits at the cut, the highest ids. 1 is off. Floating point.
        min_p: In [0, 1], keeps entries with at least this share of the largest probability. 0 is off. Floating point.
        allowed_token_bitmask: One row of ceil(V/32) int32 for every row of logits: [T+B, ceil(V/32)] (ragged) or
            [B, K+1, ceil(V/32)] (padded); for the draft's rows [T, ...] or [B, K, ...]. Bit v % 32 of word v // 32
            allows token v, the layout of xgrammar and llguidance. Forbidden tokens are never drawn.
        logit_bias: Added to the logits before anything else.
    """

    temperature: float | torch.Tensor | None = None
    top_k: int | torch.Tensor | None = None
    top_p: float | torch.Tensor | None = None
    min_p: float | torch.Tensor | None = None
    allowed_token_bitmask: torch.Tensor | None = None
    logit_bias: LogitBias | None = None

    def __post_init__(self) -> None:
        """Check numbers; tensors are checked by `verify`, which knows their shapes."""
        for name, kind, low, high, expected, *_ in PARAMETERS:
            value = getattr(self, name)
            if value is None or isinstance(value, torch.Tensor):
                continue
            if isinstance(value, np.generic):
                value = value.item()  # a narrow one warns where a bound is beyond its range
            is_number = isinstance(value, kind) and not isinstance(value, bool)
            if not is_number or not low <= value <= high:
                msg = f"{name}: expected {expected} or a tensor [B], got {short_repr(value)}"
                raise InputError(msg)
            # An int of more than 64 bits too
            object.__setattr__(self, name, float(value) if kind is Real else int(value))
        if self.logit_bias is not None and not isinstance(self.logit_bias, LogitBias):
            got = f"{short_repr(self.logit_bias)} ({type(self.logit_bias).__name__})"
            msg = f"logit_bias: expected LogitBias(token_ids=..., values=...), got {got}"
            raise InputError(msg)

    def __eq__(self, other: object) -> bool:
        """Compare numbers by value, and tensors, which have no truth value, by identity."""
        return isinstance(other, SamplingParams) and self._compared() == other._compared()

    def __hash__(self) -> int:
        """Return the hash of what is compared."""
        return hash(self._compared())

    def _compared(self) -> tuple[object, ...]:
        values = (getattr(self, field.name) for field in fields(self))
        return tuple(value if value is None or isinstance(value, int | float) else id(value) for value in values)


def pack_bitmask(allowed: torch.Tensor) -> torch.Tensor:
    """Pack flags into the form that `SamplingParams.allowed_token_bitmask` takes.

    Args:
        allowed: [..., V] bool, whether each token may be drawn.

    Returns:
        [..., ceil(V/32)] int32 on the same device: bit v % 32 of word v // 32 is set where token v is allowed.

    Raises:
        InputError: `allowed` is not such a tensor.
    """
    if not isinstance(allowed, torch.Tensor) or allowed.dtype != torch.bool or allowed.ndim == 0:
        got = f"{list(allowed.shape)} {allowed.dtype}" if isinstance(allowed, torch.Tensor) else type(allowed).__name__
        msg = f"allowed: expected a tensor [..., V] bool, got {got}"
        raise InputError(msg)
    padded = functional.pad(allowed, (0, -allowed.shape[-1] % 32))
    bits = padded.reshape(*allowed.shape[:-1], padded.shape[-1] // 32, 32).to(torch.int64) << torch.arange(
        32, device=allowed.device
    )
    return bits.sum(-1).to(torch.int32)
