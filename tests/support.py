"""Batches and comparisons that several test files share."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch

import acceptlib
from acceptlib import PLACEHOLDER_TOKEN_ID, VerifyResult
from acceptlib.engine import filters, logits, process
from acceptlib.testing import batches
from acceptlib.testing.batches import (
    ALMOST_ONE,
    Request,
    fixed,
    generator,
    lay_out,
    mask_drafted,
    mixed,
    ordinary,
    same,
    streams,
)
from acceptlib.testing.simulation import chi_square_z, counts

with warnings.catch_warnings():  # of an interface that may change
    warnings.simplefilter("ignore")
    NESTED = torch.nested.nested_tensor([torch.ones(2, dtype=torch.int64)] * 2)
"""It has no shape to look at."""

__all__ = [
    "ALMOST_ONE",
    "FAITHFUL",
    "READ_NO_DRAFT",
    "SETTINGS",
    "Request",
    "check_sound",
    "create",
    "fixed",
    "forms",
    "generator",
    "lay_out",
    "layouts",
    "mask_drafted",
    "mixed",
    "ordinary",
    "pickled",
    "same",
    "settings",
    "standing",
    "streams",
    "tokens",
    "verify",
]

SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "block": ("block", {}),
    "fly": ("fly", {}),
    "greedy": ("greedy", {}),
    "lenience": ("lenience", {}),
    "mixture": ("mixture", {}),
    "rejection": ("rejection", {}),
    "synthetic": ("synthetic", {"synthetic_acceptance_rates": (1.0,) * 8}),
    "target-only": ("target-only", {"threshold_single": 0.15, "threshold_acc": 0.9}),
    "tv-budget": ("tv-budget", {}),
    "typical": ("typical", {}),
    "typical-sample": ("typical", {"recovery": "sample"}),
}
"""Readable name -> strategy and options. Every one of them accepts the tokens of `standing`."""

FAITHFUL = [name for name in SETTINGS if name != "synthetic"]
"""Settings under which a drafted token of zero target probability never stands."""

READ_NO_DRAFT = {"greedy", "synthetic", "target-only", "typical", "typical-sample"}
"""Settings whose rules do not read the draft's rows."""

settings = pytest.mark.parametrize("setting", SETTINGS)
layouts = pytest.mark.parametrize("layout", ["padded", "ragged"])
forms = pytest.mark.parametrize("form", ["probs", "logits"])


def standing(n: int, vocab: int, seed: int) -> Request:
    """Return a request whose drafted tokens a rule that compares p with q accepts, whatever the uniforms.

    The drafted tokens are the target's argmaxes, and the draft is the target at temperature 2, which gives them less.
    """
    logits = 2 * torch.randn(n + 1, vocab, generator=generator(seed))
    return Request(logits[:n].argmax(-1), logits.softmax(-1), (logits[:n] / 2).softmax(-1), seed)


def create(setting: str) -> acceptlib.AcceptanceStrategy:
    """Return the strategy of a setting."""
    name, options = SETTINGS[setting]
    return acceptlib.create(name, **options)


def verify(
    setting: str, requests: list[Request], layout: str = "ragged", form: str = "probs", **arguments: Any
) -> VerifyResult:
    """Verify requests; request b has seed b unless `rng` or `uniforms` is given."""
    if not {"rng", "uniforms"} & {*arguments}:
        arguments["rng"] = streams(range(len(requests)))
    return create(setting).verify(**{**lay_out(requests, layout, form), **arguments})


def tokens(result: VerifyResult, index: int) -> list[int]:
    """Return the emitted tokens of one request; what follows them must be padding."""
    found = batches.tokens(result, index)
    behind = result.output_token_ids[index, len(found) :].tolist()
    assert behind == [PLACEHOLDER_TOKEN_ID] * len(behind)
    return found


def check_sound(result: VerifyResult, vocab: int) -> None:
    """Assert what holds of every result: ids inside the vocabulary, counts that fit, padding behind."""
    ids = result.output_token_ids
    emitted = torch.arange(ids.shape[1]) < result.num_emitted[:, None]
    assert bool((ids[emitted] >= 0).all())
    assert bool((ids[emitted] < vocab).all())
    assert bool((ids[~emitted] == PLACEHOLDER_TOKEN_ID).all())
    assert torch.equal(result.num_emitted, result.num_accepted + (result.status == 0).to(torch.int32))
    assert bool(((result.num_accepted >= 0) & (result.num_accepted < ids.shape[1])).all())


def emitted_z(output_token_ids: torch.Tensor, law: Mapping[tuple[int, ...], float], vocab_size: int) -> float:
    """Return `chi_square_z` of whole emitted sequences [n, K+1], padded with -1, under their law."""
    # Placeholders are one more token, so that sequences of every length share one table.
    tokens = torch.where(output_token_ids < 0, vocab_size, output_token_ids.long())
    length = tokens.shape[1]
    table = torch.zeros((vocab_size + 1,) * length, dtype=torch.float64)
    for sequence, probability in law.items():
        table[(*sequence, *[vocab_size] * (length - len(sequence)))] = probability
    return chi_square_z(counts(tokens, vocab_size + 1), table)


def read_as_on_a_device(patch: pytest.MonkeyPatch) -> None:
    """Have no value of a row or parameter looked at, as where that would wait for a device."""
    for module in (filters, logits, process):
        patch.setattr(module, "readable", lambda _tensor: False)


def pickled(value: Any) -> Any:
    """Return what comes back of a pickle."""
    return pickle.loads(pickle.dumps(value))  # noqa: S301 - our own
