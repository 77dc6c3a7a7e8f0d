"""What the scripts for a GPU do, without one: records, and sizes of the kernels tried beside each other."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import acceptlib
from acceptlib.benchmarks import measure, timing
from acceptlib.benchmarks.workloads import Workload
from acceptlib.errors import InputError

pytest.importorskip("triton", reason="without Triton there are no sizes")

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))
try:
    import gpu
    import tune
finally:
    del sys.path[0]

from acceptlib.engine.triton import engine, tunings

SMALL = Workload(num_requests=2, num_draft_tokens=2, vocab_size=50)


@pytest.fixture(autouse=True)
def _remembers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of this process may have it forget."""
    monkeypatch.setattr(engine, "schedule", functools.cache(engine.schedule))


def test_a_variant_replaces_what_it_names_and_nothing_stays() -> None:
    before = (tunings.TUNINGS, tunings.SIZES)
    with tune.tuned(tune.parse("large.reduce_registers=96 large.row_blocks=[1,2] small.loops=true sizes.large=7")):
        changed = tunings.TUNINGS
        assert changed.large == before[0].large._replace(reduce_registers=96, row_blocks=(1, 2))
        assert changed.small == before[0].small._replace(loops=True)
        assert changed._replace(large=before[0].large, small=before[0].small) == before[0]
        assert before[1]._replace(large=7) == tunings.SIZES
    assert before == (tunings.TUNINGS, tunings.SIZES)


@pytest.mark.parametrize("text", ["large.nothing=1", "none.loops=true", "large", "sizes.loops=1", "large.loops=yes"])
def test_what_is_no_variant(text: str) -> None:
    with pytest.raises(InputError, match=f"{text}: expected "):
        tune.parse(text)


def test_every_variant_is_timed_over_the_same_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def replayed(calls: Any, _device: Any) -> timing.Time:
        for call in calls:
            call()
        seen.append((len(calls), tunings.TUNINGS.large.emit_block))
        return timing.Time(median=float(len(seen)), spread=0.0)

    monkeypatch.setattr(timing, "replayed", replayed)
    monkeypatch.setitem(gpu.PATHS, "logits", gpu.Case(lambda: acceptlib.create("rejection"), {}))
    texts = [tune.AS_IT_IS, "large.emit_block=512", tune.AS_IT_IS]
    assert tune.times("logits", SMALL, texts, torch.device("cpu")) == [1.0, 2.0, 3.0]
    sets, blocks = zip(*seen, strict=True)
    assert len({*sets}) == 1
    assert blocks == (tunings.LARGE.emit_block, 512, tunings.LARGE.emit_block)


def test_other_tokens_are_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    count = itertools.count()

    def other() -> acceptlib.AcceptanceStrategy:
        return acceptlib.create("synthetic", synthetic_acceptance_length=3.0 if next(count) else 1.0)

    monkeypatch.setattr(timing, "replayed", lambda *_: timing.Time(median=1.0, spread=0.0))
    monkeypatch.setitem(gpu.PATHS, "logits", dataclasses.replace(gpu.PATHS["logits"], strategy=other))
    with pytest.raises(RuntimeError, match="'' gives other tokens than ''"):
        tune.times("logits", SMALL, [tune.AS_IT_IS, tune.AS_IT_IS], torch.device("cpu"))


def test_a_record_has_every_workload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = itertools.count(1)

    def measured(workload: Workload, *_: Any) -> Iterator[measure.Row]:
        row = measure.Row.of(workload, "rejection")
        row.microseconds = float(next(count))
        yield row

    monkeypatch.setattr(measure, "run", measured)
    monkeypatch.setattr(measure, "record", lambda rows, _device: {"rows": [row.record() for row in rows]})
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    path = tmp_path / "record.json"
    monkeypatch.setattr(sys, "argv", ["gpu.py", str(path), "--paths", "logits;logits, block", "--shapes", "1x3,8x3"])
    gpu.main()
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert [(row["path"], row["B"], row["microseconds"], row["goal"]) for row in rows] == [
        ("logits", 1, 1.0, 1.8),
        ("logits", 8, 2.0, 1.5),
        ("logits, block", 1, 3.0, 1.8),
        ("logits, block", 8, 4.0, 1.8),
    ]
