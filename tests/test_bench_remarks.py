"""What `acceptlib bench` shows of rows: their figures, and what it says beneath the table."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from cli_support import run

from acceptlib.benchmarks import measure
from acceptlib.benchmarks.measure import Row
from acceptlib.benchmarks.workloads import Workload
from acceptlib.cli import bench
from acceptlib.cli.console import CommandError

if TYPE_CHECKING:
    from collections.abc import Callable

BENCH = ("bench", "rejection", "--shapes", "1x2", "--inputs", "probs", "--peers", "none")


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
    text = run(*BENCH, code=1).stdout
    assert remark in text
    assert ("may be busy" in text) == bool(varying)
    assert "steady 1x2" not in text


def two_rows(**figures: Any) -> Callable[..., list[Row]]:
    """Return what measures a row timed in a graph, with these figures, and one timed from the host."""

    def measured(workload: Workload, *_: Any) -> list[Row]:
        row = Row.of(workload, "graph")
        host = replace(row, name="host", how="turns", microseconds=200.4)
        return [replace(row, backend="triton", how="graph", **figures), host]

    return measured


def test_figures_have_the_units_of_their_headings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that do not exist are a dash, and times that count the host's have a mark, which is explained."""
    figures: dict[str, Any] = {"microseconds": 50.24, "spread": 1.0, "read_floor": 12.56, "host_microseconds": 123.4}
    figures |= {"bytes_read": 2_500_000, "mean_emitted": 2.346, "match": True}
    monkeypatch.setattr(measure, "run", two_rows(**figures))
    _, _, *lines = run(*BENCH, "--format", "github").stdout.splitlines()
    first = ["graph", "triton", "50.2", "1.0", "12.6", "25%", "123", "2.5", "2.35", "yes"]
    second = ["host", "", "200*", *["-"] * 7]
    found = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert found == [["probabilities", "1", "2", *cells] for cells in (first, second)]
    assert "* timed from the host" in run(*BENCH).stdout


def test_a_figure_takes_the_rows_that_have_a_time() -> None:
    row = Row.of(Workload(num_requests=3, num_draft_tokens=2), "a")
    timed = replace(row, name="b", microseconds=8.0, read_floor=2.0, rows_read=7)
    (point,) = bench.points([replace(row, error="no time"), timed])
    assert (point.name, point.num_requests, point.num_draft_tokens) == ("b", 3, 2)
    assert (point.microseconds, point.read_floor, point.rows_read) == (8.0, 2.0, 7)
    with pytest.raises(CommandError, match="no row has a time to draw"):
        bench.points([row])
