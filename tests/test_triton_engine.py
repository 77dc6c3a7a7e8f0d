"""The Triton engine interpreted against the torch engine, token for token, and compiled without a GPU."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import triton_engine_cases as cases

import acceptlib
from acceptlib.engine import backends
from acceptlib.errors import BackendError

Results = Callable[[str], dict[str, str]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Return a function that runs all cases of a mode, once."""
    # Workers share the folder above their own, which is this run's.
    base: Path = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "triton-engine"
    folder.mkdir(exist_ok=True)
    return functools.cache(lambda mode: cases.run_apart(mode, folder / f"{mode.replace(':', '-')}.json"))


@pytest.mark.parametrize("label", cases.labels("interpreted"))
def test_interpreted_equals_torch(label: str, results: Results) -> None:
    """Tokens, counts, status and offsets: exactly, from probabilities, bad values included."""
    assert results("interpreted")[label] == ""


@pytest.mark.parametrize("target", cases.TARGETS)
@pytest.mark.parametrize("label", cases.labels("cuda"))
def test_compiles_without_gpu(label: str, target: str, results: Results) -> None:
    assert results(target)[label] == ""


def call(strategy: str, **arguments: object) -> backends.Backend:
    probs = torch.full((1, 2, 4), 0.25)
    given = arguments or {"target_probs": probs, "draft_probs": probs[:, :1]}
    inputs = cases.inputs(torch.zeros(1, 1, dtype=torch.int64), rng=0, **given)
    return backends.resolve("auto", acceptlib.create(strategy).plan, inputs)


def test_auto_says_why_it_takes_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert call("rejection").name == "torch"
    assert call("rejection").reason == "Triton runs on GPUs, and the rows are not on one"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert call("rejection").name == "triton"


def test_without_triton_the_reason_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(backends, "_has_triton", lambda: False)
    assert "not installed" in call("rejection").reason


def test_an_explicit_choice_raises_with_the_reason() -> None:
    probs = torch.full((1, 2, 4), 0.25)
    strategy = acceptlib.create("rejection", backend="triton")
    with pytest.raises(BackendError, match="cannot run on cpu: Triton runs on GPUs"):
        strategy.verify(torch.zeros(1, 1, dtype=torch.int64), target_probs=probs, draft_probs=probs[:, :1])
