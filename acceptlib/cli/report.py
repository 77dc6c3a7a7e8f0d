"""A comparison as a table, a file and a figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from acceptlib import plots
from acceptlib.benchmarks.environment import environment
from acceptlib.cli import format as table
from acceptlib.cli.comparison import LONGEST_EXACT, SUSPICIOUS, Row
from acceptlib.cli.console import CommandError, stdout
from acceptlib.cli.files import check_ending, write_whole
from acceptlib.cli.format import Column, Format
from acceptlib.errors import import_extra
from acceptlib.sampling import FILTERS, OFF

if TYPE_CHECKING:
    import torch

FILE_FORMS: Final = {".json": Format.json, ".csv": Format.csv, ".md": Format.github}
"""How a file is written, by its ending."""

COLUMNS: Final = (
    Column("strategy"),
    Column("K", "right"),
    Column("guarantee", expendable=2),
    Column("tau", "right"),
    Column("expected", "right"),
    Column("accepted", "right"),
    Column("TV", "right"),
    Column("KL", "right", expendable=1),
    Column("tok/s", "right"),
    Column("us/verify", "right", expendable=3),
)
FIRST_FIGURE: Final = 3
"""Where a failed row's message starts."""

NOTHING: Final = 1e-12
"""Below this a distance is what rounding leaves of 0."""

LEGEND: Final = (
    "tau: emitted tokens a step, with its standard error over prompts (steps of one text depend on each other). "
    "expected: tau by the exact law, given the same drafts and rows. accepted: share of drafted tokens. TV, KL: mean "
    "distance of the exact law of a token from the target's, KL in nats."
)


def print_rows(rows: Sequence[Row], form: Format, device: torch.device, *, quiet: bool) -> None:
    """Print a comparison on stdout."""
    if form is not Format.plain:
        table.stdout_write(render(rows, form, device))
        return
    failed = [number for number, row in enumerate(rows) if row.error]
    left_out = table.print_figures(COLUMNS, [_cells(row) for row in rows], failed, FIRST_FIGURE)
    if quiet:
        return
    stdout().print()
    for remark in [LEGEND, *_remarks(rows)]:
        table.note(remark)
    table.note_left_out(left_out, "--format csv has every figure.")


def render(rows: Sequence[Row], form: Format, device: torch.device) -> str:
    """Return a comparison as text in a format for files: rows, in JSON with the machine, versions and commit."""
    if form is Format.json:
        return table.to_json({**environment(device), "rows": [row.record() for row in rows]})
    if form is Format.csv:
        return table.to_csv([row.record() for row in rows])
    return github(rows)


def github(rows: Sequence[Row]) -> str:
    """Return a comparison as a Markdown table."""
    return table.github(COLUMNS, [_cells(row) for row in rows])


def write(rows: Sequence[Row], path: Path, device: torch.device) -> None:
    """Write a comparison to a file: a record (.json), or the rows (.csv, .md)."""
    write_whole(path, render(rows, FILE_FORMS[path.suffix.lower()], device))


def check_plot(path: Path | None) -> None:
    """Refuse a figure that could not be drawn, before any work is done for it.

    Raises:
        CommandError: The ending is unknown.
        MissingPackageError: matplotlib is not installed.
    """
    check_ending(path, plots.ENDINGS, "--plot")
    if path is not None:
        import_extra("matplotlib", "plot")


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw a comparison.

    Raises:
        CommandError: No row has the figures that it takes.
    """
    points = points_of(rows)
    if not points:
        msg = f"--plot: no row has a distance to draw; it takes K <= {LONGEST_EXACT} and a strategy that ran"
        raise CommandError(msg)
    write_whole(path, plots.comparison(points, path.suffix.lower()))


def points_of(rows: Sequence[Row]) -> list[plots.Point]:
    """Return the rows that have a distance, as a figure takes them."""
    return [
        plots.Point(
            strategy=row.strategy,
            guarantee=row.guarantee,
            num_draft_tokens=row.num_draft_tokens,
            tau=row.mean_acceptance_length,
            tau_error=row.standard_error or 0.0,
            tv=row.tv,
            acceptance_by_position=tuple(row.acceptance_by_position),
        )
        for row in rows
        if row.mean_acceptance_length is not None and row.tv is not None
    ]


def _cells(row: Row) -> list[str]:
    head = [row.strategy, str(row.num_draft_tokens), row.guarantee]
    if row.error is not None:
        return [*head, f"failed: {row.error}", *[""] * (len(COLUMNS) - FIRST_FIGURE - 1)]
    tau = _number(row.mean_acceptance_length, ".2f")
    if row.standard_error is not None:
        tau += f" ± {row.standard_error:.2f}"
    return [
        *head,
        tau,
        _number(row.expected_acceptance_length, ".2f"),
        _number(row.draft_acceptance_rate, ".1%"),
        _distance(row.tv),
        _distance(row.kl),
        _number(row.tokens_per_second, ".0f"),
        _number(row.verify_microseconds, ".0f"),
    ]


def _number(value: float | None, how: str) -> str:
    return "-" if value is None else format(value, how)


def _distance(value: float | None) -> str:
    if value is None:
        return "-"
    if value < NOTHING:
        return "0"
    # Four decimals of a smaller number would read as nothing, which it is not.
    return f"{value:.4f}" if value >= 5e-5 else f"{value:.0e}"  # noqa: PLR2004


def _remarks(rows: Sequence[Row]) -> list[str]:
    """Return how well measured and expected tau agree, and what the table does not say of its settings."""
    first = rows[0]
    prompts = "1 prompt" if first.num_prompts == 1 else f"{first.num_prompts} prompts"
    filters = "".join(f", {name} {value:g}" for name in FILTERS if (value := getattr(first, name)) != OFF[name])
    sampling = f"temperature {first.temperature:g}{filters}"
    settings = f"up to {first.max_new_tokens} tokens each, {sampling}, seed {first.seed}"
    remarks = [f"{prompts}, {settings}; the same seeds for every row."]
    tested = [(abs(row.deviation), row) for row in rows if row.deviation]  # 0 where nothing is random
    if tested:
        worst, row = max(tested, key=lambda pair: pair[0])
        verdict = ": more than chance explains." if worst > SUSPICIOUS else "."
        where = f"({row.strategy}, K = {row.num_draft_tokens})"
        gap = f"{worst:.1f} standard errors of their difference {where}{verdict}"
        remarks.append(f"Largest gap between tau and expected: {gap}")
    ahead = sorted({row.strategy for row in rows if row.looks_ahead and row.tv is not None})
    if ahead:
        remarks.append(
            f"{', '.join(ahead)}: later rows have a say, so TV and KL are those of a step's first token on rows cut to "
            "their likeliest entries."
        )
    if any(row.num_draft_tokens > LONGEST_EXACT for row in rows):
        remarks.append(f"No exact figures beyond K = {LONGEST_EXACT}.")
    return remarks
