"""What the drop-ins share."""

from __future__ import annotations

from collections.abc import Mapping

import torch

import acceptlib
from acceptlib.errors import InputError, kind_of

_STRATEGIES: dict[str, acceptlib.AcceptanceStrategy] = {}


def create(name: str) -> acceptlib.AcceptanceStrategy:
    """Return a strategy, made at a drop-in's first call, so that importing one loads no plugins.

    It is kept in a dictionary because `torch.compile` looks into one, but warns about a `functools.cache`.
    """
    if name not in _STRATEGIES:
        _STRATEGIES[name] = acceptlib.create(name)
    return _STRATEGIES[name]


def expect_tensor(name: str, value: object, shape: tuple[int | str, ...], device: torch.device | None = None) -> None:
    """Check an argument that reaches `verify` in another form or too late.

    Args:
        name: Of the argument.
        value: What was given for it.
        shape: One length per dimension, or a name for any length.
        device: None for any.

    Raises:
        InputError: `value` is no tensor, or one of another shape or device.
    """
    if isinstance(value, torch.Tensor) and not value.is_nested:
        lengths = zip(shape, value.shape, strict=False)
        fits = len(shape) == value.ndim and all(isinstance(want, str) or want == length for want, length in lengths)
        if fits and device in {None, value.device}:
            return
        got = f"{list(value.shape)} on {value.device}"
    else:
        got = kind_of(value)
    where = "" if device is None else f" on {device}"
    msg = f"{name}: expected a tensor [{', '.join(map(str, shape))}]{where}, got {got}"
    raise InputError(msg)


def bonus_tokens(bonus_token_ids: torch.Tensor, num_requests: int) -> torch.Tensor:
    """Return bonus tokens [B] of [B, 1] or [B].

    Raises:
        InputError: They are no such tensor.
    """
    flat = isinstance(bonus_token_ids, torch.Tensor) and bonus_token_ids.ndim == 1
    expect_tensor("bonus_token_ids", bonus_token_ids, (num_requests,) if flat else (num_requests, 1))
    return bonus_token_ids.reshape(-1)


def as_rows(probs: torch.Tensor) -> torch.Tensor:
    """Return probabilities in a dtype that `verify` reads: float64, which it does not, as float32."""
    return probs.to(torch.float32) if isinstance(probs, torch.Tensor) and probs.dtype == torch.float64 else probs


_ZEROS: dict[tuple[torch.device, int], torch.Tensor] = {}


def zero(device: torch.device) -> torch.Tensor:
    """Return a float64 tensor [1] that is 0, never to be written: the same one for all calls, which spares a kernel.

    On a GPU there is one for each stream, so that no stream reads what another has yet to write.
    """
    # What is made while a CUDA graph is captured, or in a compiled one, is the graph's own.
    on_gpu = device.type == "cuda"
    if torch.compiler.is_dynamo_compiling():
        return torch.zeros(1, dtype=torch.float64, device=device)
    if on_gpu and torch.cuda.is_current_stream_capturing():  # `torch.cuda.graph` has waited for all streams
        there = [tensor for (other, _), tensor in list(_ZEROS.items()) if other == device]
        return there[0] if there else torch.zeros(1, dtype=torch.float64, device=device)
    place = (device, torch.cuda.current_stream(device).cuda_stream if on_gpu else 0)
    found = _ZEROS.get(place)
    if found is None:
        # A tensor made in inference mode could not be used outside of it.
        with torch.inference_mode(False):  # noqa: FBT003 - as torch writes it
            found = torch.zeros(1, dtype=torch.float64, device=device)
        if type(found) is torch.Tensor:  # and not a fake one
            _ZEROS[place] = found
    return found


def unused_uniforms(num_requests: int, max_num_draft_tokens: int, device: torch.device) -> acceptlib.Uniforms:
    """Return numbers for a strategy that draws nothing, so that torch's default generator is left alone."""
    return acceptlib.Uniforms(
        accept=zero(device).expand(num_requests, max_num_draft_tokens),
        emit=torch.empty(num_requests, dtype=torch.int64, device=device),
    )


def request_streams(
    generators: Mapping[int, torch.Generator], num_requests: int, device: torch.device
) -> acceptlib.Rng | None:
    """Return one stream a request, without waiting for the device; None, for torch's default one, without generators.

    A request with a generator gets a seed that the generator draws, so its tokens depend on the generator's state alone
    and the next call's differ. The others' seeds come from torch's default generator.

    Args:
        generators: From the request's row in the batch to its generator, which is on `device`. Rows that the batch
            does not have are passed over.
        num_requests: B.
        device: Where the streams are used.
    """
    if not generators:
        return None
    if not isinstance(generators, Mapping):
        msg = f"generators: expected a mapping from row to torch.Generator, got {generators!r}"
        raise InputError(msg)
    seeds = acceptlib.Rng.of(None, num_requests, device).seeds
    rng = acceptlib.Rng(seeds=seeds, offsets=torch.zeros_like(seeds))
    for request, generator in generators.items():
        if not isinstance(generator, torch.Generator):
            msg = f"generators: expected a torch.Generator for request {request}, got {generator!r}"
            raise InputError(msg)
        if 0 <= request < num_requests:
            rng.seeds[request].random_(generator=generator)
    return rng
