"""Settings of the benchmarks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Say where the ratios are recorded."""
    parser.addoption("--record", type=Path, metavar="FILE", help="add this run's ratios to a record in bench/results")
