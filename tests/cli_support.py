"""What tests of commands and of the registry share: names, and commands that are run to the end that is expected."""

from __future__ import annotations

from typing import Any

from typer.testing import CliRunner

from acceptlib.cli.app import app

BUILT_IN = [
    "block",
    "fly",
    "greedy",
    "lenience",
    "mixture",
    "rejection",
    "synthetic",
    "target-only",
    "tv-budget",
    "typical",
]
"""Names of the built-in strategies, in order."""


def run(*arguments: str, code: int = 0, **options: Any) -> Any:
    result = CliRunner().invoke(app, list(arguments), **options)
    assert result.exit_code == code, result.output
    return result


def fails(*arguments: str, **options: Any) -> str:
    """Return the one line of a command that is refused."""
    result = run(*arguments, code=2, **options)
    assert not result.stdout
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("Error: ")
    return str(result.stderr)
