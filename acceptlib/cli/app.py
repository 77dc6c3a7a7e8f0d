"""The command line, and the commands that look things up; the others have modules of their own."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any, Final

import typer
from rich.text import Text

from acceptlib import __version__, config, registry
from acceptlib.cli import bench, check, compare, describe, example, generate, scaffold
from acceptlib.cli.console import CommandError, Group, stdout
from acceptlib.cli.format import (
    Column,
    Format,
    github,
    note_left_out,
    paragraph,
    plain,
    show,
    stdout_write,
    to_csv,
    to_json,
    width_of,
)
from acceptlib.cli.options import FormatOption, OptionOption, parse_assignments
from acceptlib.errors import AcceptlibError, OptionError, one_line
from acceptlib.strategy import AcceptanceStrategy

GUARANTEE_ORDER: Final = ("lossless", "greedy", "lossy")

OPTION_COLUMNS: Final = (
    Column("option"),
    Column("type", wraps=True, expendable=1),
    Column("bounds", expendable=2),
    Column("default"),
    Column("description", wraps=True),
)

app = typer.Typer(
    cls=Group,
    name="acceptlib",
    help="Acceptance rules of speculative decoding: look them up, try them, compare them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Run the command line."""
    for stream in (sys.stdout, sys.stderr):
        # A letter that a terminal cannot show must not end a command.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    if not os.environ.get("COLUMNS", "").strip("0"):  # a width of 0 means none, but rich would print nothing
        os.environ.pop("COLUMNS", None)
    app()


def _print_version(value: bool) -> None:
    if value:
        stdout_write(f"acceptlib {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    show_version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command("list")
def list_command(form: FormatOption = Format.plain) -> None:
    """List the strategies: built-in ones and those of installed packages."""
    entries = [registry.find(name) for name in registry.available()]
    entries.sort(key=lambda entry: (GUARANTEE_ORDER.index(entry.strategy.traits.guarantee), entry.name))
    records: list[dict[str, Any]] = [
        {
            "name": entry.name,
            "aliases": registry.aliases(entry.strategy),
            "guarantee": entry.strategy.traits.guarantee,
            "origin": entry.distribution,
            "summary": describe.summary(entry.strategy),
        }
        for entry in entries
    ]
    columns = (
        Column("name"),
        Column("guarantee"),
        Column("origin", expendable=1),
        Column("aliases", expendable=2),
        Column("summary", wraps=True),
    )
    rows = [
        [record["name"], record["guarantee"], record["origin"], ", ".join(record["aliases"]), record["summary"]]
        for record in records
    ]
    show(columns, rows, records, form)


@app.command("show")
def show_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name or alias of a strategy.")],
    option: OptionOption = None,
    worked: Annotated[
        bool, typer.Option("--example", help="Also work out small rows: h, emitted law, TV, expected tokens.")
    ] = False,
    form: FormatOption = Format.plain,
) -> None:
    """Show what a strategy guarantees, its formula, source, traits and options."""
    if form is Format.csv and worked:
        msg = "--example: expected another --format, for csv has the options alone; json has everything"
        raise CommandError(msg)
    entry = registry.find(name)
    strategy, problem = None, None
    try:
        with contextlib.redirect_stdout(sys.stderr):
            strategy = entry.create(**parse_assignments(option or []))
    except Exception as error:
        if option or worked:
            raise
        # An option without a default, or a third party's mistake: what depends on options is left out.
        problem = one_line(error)
    record = describe.record(entry, strategy) | {"problem": problem}
    shown = example.work_out(strategy) if worked and strategy is not None else None
    if shown is not None:
        record["example"] = asdict(shown)
    if form in {Format.json, Format.csv}:
        stdout_write(to_json(record) if form is Format.json else to_csv(record["options"], describe.OPTION_FIELDS))
        return
    page = _Page(github=form is Format.github)
    aliases = ", ".join(record["aliases"])
    page.title(f"{entry.strategy.name} (also {aliases})" if aliases else entry.strategy.name)
    for part, text in describe.parts(entry.strategy).items():
        page.section("" if part == "Summary" else part, text)
    options = [option.cells for option in describe.options(entry.strategy)]
    page.section("Options", "" if options else "None.")
    if options:
        page.table(OPTION_COLUMNS, options)
    if strategy is not None:
        page.section("Traits")
        page.pairs(describe.traits(strategy))
        page.section("Reads", ", ".join(record["reads"]) or "Whatever its own verify reads.")
    else:
        page.section("Not shown", f"Traits and what it reads: creating it without options raised {problem}")
    page.section("Origin")
    page.pairs(record["origin"])
    if shown is not None:
        page.section("Example", f"{strategy!r}, two drafted tokens: rows, and the law of the first token emitted.\n")
        page.table(example.ROW_COLUMNS, shown.rows())
        page.section("", "\nWhat is drafted, the probability that each token is accepted, and how many stand.\n")
        page.table(example.DRAFT_COLUMNS, shown.drafts())
        page.section("Figures of the example")
        page.pairs(shown.figures())


class _Page:
    """Prints a page about one thing, for a terminal or as Markdown."""

    def __init__(self, *, github: bool) -> None:
        self._github = github
        self._console = stdout()

    def title(self, text: str) -> None:
        self._console.print(Text(f"# {text}" if self._github else text, style="bold"), soft_wrap=True)

    def section(self, heading: str, text: str = "") -> None:
        if heading:
            marked = f"## {heading}\n" if self._github else heading
            self._console.print(Text(f"\n{marked}", style="bold"), soft_wrap=True)
        elif self._github:
            self._console.print()
        if text:
            paragraph(self._console, Text(text))

    def table(self, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
        left_out: list[str] = []
        if self._github:
            lines = github(columns, rows).splitlines()
        else:
            lines, left_out = plain(columns, rows, width_of(self._console))
        for line in lines:
            self._console.print(Text(line), soft_wrap=True)
        note_left_out(left_out)

    def pairs(self, mapping: Mapping[str, str]) -> None:
        length = max(map(len, mapping), default=0)
        for key, value in mapping.items():
            line = f"- {key}: {value}" if self._github else f"{key:{length}}  {value}"
            self._console.print(Text(line), soft_wrap=True)


@app.command("plugins")
def plugins_command(form: FormatOption = Format.plain) -> None:
    """List the sources of strategies, and what went wrong with them."""
    records: list[dict[str, Any]] = [
        {
            "entry_point": plugin.name,
            "distribution": plugin.distribution,
            "strategies": [strategy.name for strategy in plugin.strategies],
            "problems": [*plugin.problems, *filter(None, map(_fault_of, plugin.strategies))],
        }
        for plugin in registry.loaded_plugins()
    ]
    columns = (
        Column("entry point", expendable=1),
        Column("distribution"),
        Column("strategies", wraps=True),
        Column("problems", wraps=True),
    )
    rows = [
        [
            record["entry_point"],
            record["distribution"],
            ", ".join(record["strategies"]),
            "; ".join(record["problems"]) or "none",
        ]
        for record in records
    ]
    show(columns, rows, records, form)


def _fault_of(strategy: type[AcceptanceStrategy]) -> str:
    """Return what is wrong with a strategy if creating it shows that; nothing if some option lacks a default."""
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what a rule prints is no part of a command's JSON
            registry.create(strategy.name)
    except OptionError:
        return ""
    except AcceptlibError as error:
        return one_line(error)
    return ""


@app.command("schema")
def schema_command() -> None:
    """Print the JSON Schema of a config file, for editors and validators."""
    stdout_write(to_json(config.json_schema()))


app.command("generate")(generate.command)
app.command("compare")(compare.command)
app.command("check")(check.command)
app.command("bench")(bench.command)
app.command("new-plugin")(scaffold.command)
