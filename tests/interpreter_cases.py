"""Calls by Triton's own interpreter and by the quick one: the same memory after every launch.

TRITON_INTERPRET=1 python interpreter_cases.py interpreted:both results.json
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import quick_interpreter
import torch
import triton_engine_cases as cases
from triton_calls import FILTERED_SHAPE, calls, strategies

from acceptlib.engine.triton import launching
from acceptlib.engine.triton.launching import Launch

SEVERAL_BLOCKS = (2, 3, 301)
INTERPRETED = (
    (SEVERAL_BLOCKS, "logits-temperature", "rejection"),
    (SEVERAL_BLOCKS, "ragged-logits", "block"),
    (SEVERAL_BLOCKS, "half", "likeliest"),
    (SEVERAL_BLOCKS, "one-hot", "typical"),
    (FILTERED_SHAPE, "top-p", "rejection"),
    (FILTERED_SHAPE, "min-p-mixed", "block"),
)
"""A shape, a call and a strategy each, which between them run every stage."""


def labels() -> list[tuple[str, str]]:
    """Return the mode and the name of every case."""
    return [("interpreted:both", f"{name}-{call}") for _, call, name in INTERPRETED]


def digests() -> Iterator[list[str]]:
    """Yield, for each case, what identifies all memory after each launch of it; batches of all sizes take turns."""
    found: list[str] = []

    def dispatch(stage: Launch, tensors: tuple[torch.Tensor | None, ...], numbers: tuple[int, ...]) -> None:
        launched(stage, tensors, numbers)
        contents = hashlib.sha256(stage.key.stage.encode())
        for tensor in tensors:
            if tensor is not None and tensor.numel():
                contents.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        found.append(contents.hexdigest())

    launched = launching.dispatch
    with mock.patch.object(launching, "dispatch", dispatch), mock.patch.object(torch, "empty", torch.zeros):
        for (shape, call, name), sizes in zip(INTERPRETED, itertools.cycle(cases.EVERY_SIZE), strict=False):
            problem = cases.compare(strategies()[name], calls(shape)[call], (sizes,))
            yield [*found, problem]
            found.clear()


def main(_mode: str, path: str) -> None:
    """Run every case in both ways."""
    torch.set_num_threads(1)
    cases.shrink()
    expected = list(digests())
    quick_interpreter.install()
    results = {}
    for (_, label), one, other in zip(labels(), expected, digests(), strict=True):
        same = next(
            (number for number, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), len(one)
        )
        results[label] = one[-1] if one == other else f"the same after {same} of {len(one) - 1} launches"
    Path(path).write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
