"""Tables: one set of rows in every format."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from rich.console import Console  # noqa: TC002 - rich is loaded anyway
from rich.text import Text
from tabulate import tabulate

from acceptlib.cli.console import stdout

NARROW_COLUMN: Final = 24
"""Least width of a column that wraps, as long as another column may be left out."""

NARROWEST_COLUMN: Final = 12
"""Least width of such a column however narrow the terminal."""

GAP: Final = 2
"""Blanks between the columns of a plain table."""


HEADING_LINES: Final = 2
"""Lines of a plain table before its rows: the headings and the rule beneath."""


class Format(str, Enum):
    """How a table is written."""

    plain = "plain"
    github = "github"
    json = "json"
    csv = "csv"


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table for people.

    Attributes:
        header: Its heading.
        align: `left` or `right`.
        wraps: Whether its text is folded to fit the terminal.
        expendable: Columns with the highest number go first where the terminal is too narrow; 0 never goes.
    """

    header: str
    align: str = "left"
    wraps: bool = False
    expendable: int = 0


def show(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], records: Sequence[Mapping[str, Any]], form: Format
) -> None:
    """Print a table on stdout: `rows` for people, `records` for programs."""
    if form in {Format.json, Format.csv}:
        stdout_write(to_json(records) if form is Format.json else to_csv(records))
        return
    if form is Format.github:
        stdout_write(github(columns, rows))
        return
    console = stdout()
    lines, left_out = plain(columns, rows, width_of(console))
    for number, line in enumerate(lines):
        style = ("bold", "dim")[number] if number < HEADING_LINES else ""
        console.print(Text(line, style=style), soft_wrap=True)
    note_left_out(left_out)


def print_figures(
    columns: Sequence[Column], cells: Sequence[Sequence[str]], failed: Collection[int], first: int
) -> list[str]:
    """Print a plain table of figures on stdout, and return the headings of columns left out for its width.

    A message that is cut is repeated in full beneath the table.

    Args:
        columns: Its columns.
        cells: Its rows.
        failed: Numbers of the rows that have a message in place of their first figure, and no others.
        first: Column of the first figure.
    """
    console = stdout()
    width = width_of(console)
    failures = {number: cells[number][first] for number in failed}
    blank = [""] * (len(columns) - first)
    figures = [[*row[:first], *blank] if number in failures else row for number, row in enumerate(cells)]
    lines, left_out = plain(columns, figures, width)
    cut: list[str] = []
    kept = [column.header for column in columns if column.header not in left_out]
    for number, line in enumerate(spread(lines, kept.index(columns[first].header), failures)):
        text = Text(line, style=("bold", "dim")[number] if number < HEADING_LINES else "")
        if number - HEADING_LINES in failures:
            text.stylize("red")
            if width is not None and text.cell_len > width:
                cut.append(failures[number - HEADING_LINES])
            text.truncate(width or text.cell_len, overflow="ellipsis")
        console.print(text, soft_wrap=True)
    for message in dict.fromkeys(cut):
        console.print()
        paragraph(console, Text(message, style="red"))
    return left_out


def width_of(console: Console) -> int | None:
    """Return the columns that a table may take. A pipe has no width: there each row stays one line."""
    return console.width if console.is_terminal else None


def note(text: str) -> None:
    """Print a remark beneath a table."""
    paragraph(stdout(), Text(text, style="dim"))


def note_left_out(headings: Sequence[str], where: str = "--format json has them.") -> None:
    """Say which columns of a table are not shown, if any, and where they are."""
    if headings:
        note(f"Left out at this width: {', '.join(headings)}. {where}")


def paragraph(console: Console, text: Text) -> None:
    """Print prose, folded to the terminal and left as it is in a pipe."""
    console.print(text, soft_wrap=not console.is_terminal)


def stdout_write(text: str) -> None:
    """Print `text` on stdout as it is."""
    stdout().out(text.rstrip("\n"), highlight=False)


def plain(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None) -> tuple[list[str], list[str]]:
    """Return the lines of a table that fits in `width`, and the headings of columns left out for that."""
    columns = list(columns)
    cells = [list(row) for row in rows]
    left_out: list[str] = []

    def widths() -> list[int]:
        return [max(map(len, column)) for column in zip(*([column.header for column in columns], *cells), strict=True)]

    folded: list[int | None] = [None] * len(columns)
    while width is not None and sum(widths()) + GAP * (len(columns) - 1) > width:
        wrapping = [index for index, column in enumerate(columns) if column.wraps]
        index = max(range(len(columns)), key=lambda index: columns[index].expendable)
        if wrapping:
            fixed = sum(length for index, length in enumerate(widths()) if index not in wrapping)
            room = (width - fixed - GAP * (len(columns) - 1)) // len(wrapping)
            if room >= NARROW_COLUMN or not columns[index].expendable:
                for index in wrapping:
                    folded[index] = max(room, NARROWEST_COLUMN)
                break
        elif not columns[index].expendable:
            break
        left_out.append(columns.pop(index).header)
        for row in cells:
            row.pop(index)
        folded.pop(index)
    headers = [column.header for column in columns]
    rule = ["-" * (fold or length) for fold, length in zip(folded, widths(), strict=True)]
    # As rows rather than as tabulate's own headings, which it makes two blanks wider than their text.
    text = tabulate(
        [headers, rule, *cells],
        tablefmt="plain",
        disable_numparse=True,
        colalign=[column.align for column in columns],
        maxcolwidths=folded if any(folded) else None,
    )
    return text.splitlines(), left_out


def github(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in GitHub's Markdown."""
    escaped = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    return (
        tabulate(
            escaped,
            [column.header for column in columns],
            tablefmt="github",
            disable_numparse=True,
            colalign=[column.align for column in columns] if rows else None,
        )
        + "\n"
    )


def spread(lines: list[str], column: int, messages: Mapping[int, str]) -> list[str]:
    """Return a plain table whose rows in `messages` hold one text from `column` to the end."""
    start = [match.start() for match in re.finditer("-+", lines[1])][column]
    body = enumerate(lines[HEADING_LINES:])
    return [
        *lines[:HEADING_LINES],
        *(line[:start].ljust(start) + messages[number] if number in messages else line for number, line in body),
    ]


def to_json(records: object) -> str:
    """Return JSON that any parser reads: numbers that are not finite become null."""
    return json.dumps(_finite(records), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def to_csv(records: Sequence[Mapping[str, Any]], names: Sequence[str] = ()) -> str:
    """Return CSV with a heading; lists are joined, and what is missing or not finite is empty.

    Args:
        records: The rows.
        names: Columns that are there even without a row.
    """
    file = io.StringIO()
    names = list(dict.fromkeys([*names, *(name for record in records for name in record)]))
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(names)
    for record in records:
        writer.writerow([_cell(record.get(name)) for name in names])
    return file.getvalue()


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return value


def _cell(value: object) -> str:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    if isinstance(value, list | tuple):
        # Sentences may hold blanks; numbers do not.
        return ("; " if any(isinstance(entry, str) for entry in value) else " ").join(_cell(entry) for entry in value)
    if isinstance(value, Mapping):
        return json.dumps(_finite(value))
    return str(value)
