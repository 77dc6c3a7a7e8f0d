"""Settings of the whole suite."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    import pytest

# Tests run several at a time, and their tensors are small: more threads than cores would only wait for each other.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes long and runs apart that many tests read, half of them for each of two workers.

    So none is left last, where one worker would wait for the other.
    """
    modes: set[str | None] = {None}
    first, rest = [], []
    for item in items:
        parameters = getattr(item, "callspec", None)
        mode = parameters and parameters.params.get("mode")
        (first if mode not in modes or item.get_closest_marker("long") else rest).append(item)
        modes.add(mode)
    half = len(rest) // 2
    items[:] = [*first[::2], *rest[:half], *first[1::2], *rest[half:]]
