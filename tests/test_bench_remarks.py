"""What `acceptlib bench` says beneath its table."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from cli_support import run

from acceptlib.benchmarks import measure
from acceptlib.benchmarks.measure import Row

if TYPE_CHECKING:
    from acceptlib.benchmarks.workloads import Workload


@pytest.mark.parametrize(
    ("varying", "remark"),
    [
        (0, ""),
        (1, "the machine may be busy: a0 1x2 from probabilities."),
        (6, "a0 1x2 from probabilities; a1 1x2 from probabilities; a2 1x2 from probabilities; "),
        (6, "a3 1x2 from probabilities and 2 more."),
    ],
)
def test_times_that_vary_are_named(varying: int, remark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(workload: Workload, *_: Any) -> list[Row]:
        steady = replace(Row.of(workload, "steady"), microseconds=100.0, spread=25.0)
        failed = replace(Row.of(workload, "failed"), error="no time")
        return [steady, failed, *(replace(steady, name=f"a{number}", spread=26.0) for number in range(varying))]

    monkeypatch.setattr(measure, "run", measured)
    text = run("bench", "rejection", "--shapes", "1x2", "--inputs", "probs", "--peers", "none", code=1).stdout
    assert remark in text
    assert ("may be busy" in text) == bool(varying)
    assert "steady 1x2" not in text
