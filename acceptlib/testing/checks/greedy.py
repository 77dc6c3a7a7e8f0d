"""What a greedy strategy promises: the target's argmax sequence, whatever was drafted and whatever the uniforms are."""

from __future__ import annotations

import itertools
from typing import Final

import torch
from torch.nn import functional

from acceptlib.testing.batches import ALMOST_ONE, Request, fixed, generator, tokens
from acceptlib.testing.subject import Subject, require

LENGTH: Final = 8
"""Drafted tokens of a request: a rule may depend on the position."""


def check_greedy_sequence(subject: Subject) -> None:
    """Greedy: the emitted tokens are the target's argmax sequence, ties to the lowest id.

    This holds with draft rows, which may be sure of another token, and without, at u = 0 and at the largest u.

    Catches ties broken otherwise than by torch.argmax, which are frequent in bfloat16 rows; accepting a token now and
    then, or because it ties with the best, is nearly as likely, or because the draft is certain of it; and an argmax of
    the wrong row: with greedy drafts and softmax rows (transformers#32867) the sequence follows the draft.
    """
    source = generator(5)
    for name, rows in _rows(source).items():
        requests = []
        for key, p in enumerate(rows):
            best, other = p.argmax(1), p.shape[1] - 1 - p.flip(1).argmax(1)
            # The highest id of a tie. Without a tie this is the argmax itself, and the second best is taken instead.
            other = torch.where(other == best, p.topk(2).indices[:, 1], other) if name != "ties" else other
            # The argmax first, then the other one.
            ids = torch.where(torch.arange(LENGTH) < key % LENGTH, best[:LENGTH], other[:LENGTH])
            sure = functional.one_hot(ids, p.shape[1]).float()
            q = (p[:LENGTH].roll(1, 1), sure, 0.9 * sure + 0.1 * p[:LENGTH])[key % 3]  # the first has another argmax
            requests.append(Request(ids, p, q, key))
        for layout, draft, u in itertools.product(("padded", "ragged"), (True, False), (0.0, ALMOST_ONE)):
            result = subject.verify(requests, layout, draft=draft, uniforms=fixed(len(requests), LENGTH, u))
            for index, request in enumerate(requests):
                best = request.p.argmax(1)
                stop = int((request.ids == best[:LENGTH]).int().cumprod(0).sum())
                found, wanted = tokens(result, index), best[: stop + 1].tolist()
                where = f"rows {name!r} {'with' if draft else 'without'} draft rows, {layout}, u = {u}, request {index}"
                having = subject.having(request.key)
                require(found == wanted, f"{where}{having}: expected the argmax sequence {wanted}, got {found}")


def _rows(source: torch.Generator) -> dict[str, torch.Tensor]:
    """Return rows [requests, LENGTH + 1, V] by what they are like."""
    count, length = 12, LENGTH + 1
    weights = torch.randint(0, 4, (count, length, 8), generator=source).float()
    weights[torch.arange(count), :, torch.arange(count) % 8] += 1
    close = torch.rand(count, length, 8, generator=source) + 1
    first, second = close.topk(2).indices.unbind(-1)
    close.scatter_(-1, second[..., None], close.gather(-1, first[..., None]) * (1 - 2**-12))
    two = torch.rand(count, length, 8, generator=source) / 100
    two.scatter_(-1, first[..., None], 1.0).scatter_(-1, second[..., None], 0.96)
    found = {"ties": weights, "nearly ties": close, "two likely entries": two}
    for name, sharpness, vocab_size in (("flat", 0.3, 64), ("ordinary", 2.0, 64), ("sharp", 8.0, 8)):
        found[name] = (sharpness * torch.randn(count, length, vocab_size, generator=source)).exp()
    return {name: rows / rows.sum(-1, keepdim=True) for name, rows in found.items()}
