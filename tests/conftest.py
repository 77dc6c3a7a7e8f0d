"""Settings of the whole suite, and what its modules share."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from acceptlib import checks

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


@pytest.fixture(scope="session")
def target() -> Any:
    """Return a tiny model."""
    from transformers_support import make_model  # noqa: PLC0415 - transformers is slow to import

    return make_model(0)


@pytest.fixture(scope="session")
def draft(target: Any) -> Any:
    """Return its draft."""
    from transformers_support import perturbed  # noqa: PLC0415 - as above

    return perturbed(target, 0.02)


@pytest.fixture(scope="session")
def pair() -> Any:
    """Return the bundled models."""
    from acceptlib.cli import models  # noqa: PLC0415 - as above

    return models.load(None, None, torch.device("cpu"))


@pytest.fixture
def loaded(pair: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Have commands find the bundled models loaded."""
    from acceptlib.cli import models  # noqa: PLC0415 - as above

    monkeypatch.setattr(models, "load", lambda _target, _draft, _device: pair)
    return pair


@pytest.fixture
def remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have good calls remembered, whatever other tests do about it."""
    monkeypatch.setattr(checks, "_CHECKED", {})
