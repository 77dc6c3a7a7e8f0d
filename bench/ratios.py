"""Ratios of times on a CPU: taken in turns, printed beside their goals, and kept in a record of bench/results."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from acceptlib.benchmarks import timing
from acceptlib.benchmarks.environment import environment
from acceptlib.cli.files import write_whole

if TYPE_CHECKING:
    import pytest

CPU: Final = torch.device("cpu")


class Figure(NamedTuple):
    """One ratio as a page shows it, with its goal."""

    name: str
    goal: str
    value: float


def median_times(*functions: Callable[[], Any], rounds: int) -> list[float]:
    """Return the median seconds of each function, taken in turns so that a slow moment hits all alike."""
    now = timing.clock(CPU)
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds):
        for function, column in zip(functions, times, strict=True):
            start = now()
            function()
            column.append(now() - start)
    return [statistics.median(column) for column in times]


def publish(figures: Sequence[Figure], request: pytest.FixtureRequest) -> None:
    """Print figures, and add them to the record that `--record` names."""
    with request.getfixturevalue("capsys").disabled():
        print("\n" + "\n".join(f"{value:6.2f} {name} (goal: {goal})" for name, goal, value in figures))
    path: Path | None = request.config.getoption("--record")
    if path is not None:
        add_to(path, figures)


def add_to(path: Path, figures: Sequence[Figure]) -> None:
    """Add one run to the record, or start it anew if machine, versions or commit differ."""
    record: dict[str, Any] = {**environment(CPU), "ratios": []}
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        if all(before.get(name) == value for name, value in record.items() if name != "ratios"):  # and perhaps a note
            record = before
    ratios = {entry["name"]: entry for entry in record["ratios"]}
    for name, goal, value in figures:
        runs = ratios[name]["runs"] if name in ratios else []
        ratios[name] = {"name": name, "goal": goal, "runs": [*runs, round(value, 3)]}
    write_whole(path, json.dumps({**record, "ratios": [*ratios.values()]}, indent=2) + "\n")
