"""`acceptlib compare`: every strategy on the same prompts, in one table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from acceptlib import config as configs
from acceptlib import demo, registry
from acceptlib.cli import comparison, console, models, report
from acceptlib.cli.comparison import Case, Row, Settings
from acceptlib.cli.console import FAILED, CommandError
from acceptlib.cli.files import check_ending
from acceptlib.cli.format import Format
from acceptlib.cli.options import (
    MAX_TOKENS,
    ConfigsOption,
    DeviceOption,
    DraftOption,
    FormatOption,
    MinPOption,
    QuietOption,
    SeedOption,
    TargetOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
    device_of,
    labels_of,
    names_of,
)

if TYPE_CHECKING:
    from acceptlib.demo.pair import ModelPair

# With these, the built-in strategies take one to four minutes on two CPU cores.
DEFAULT_NUM_DRAFT_TOKENS: Final = (2, 4, 8)
DEFAULT_NUM_PROMPTS: Final = 16
DEFAULT_MAX_NEW_TOKENS: Final = 32


def command(  # noqa: PLR0913, PLR0917 - one argument an option
    strategies: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Strategies to compare; all available ones without it and without --config."),
    ] = None,
    config: ConfigsOption = None,
    num_draft_tokens: Annotated[str, typer.Option(metavar="K,K", help="Numbers of drafted tokens a step.")] = ",".join(
        map(str, DEFAULT_NUM_DRAFT_TOKENS)
    ),
    prompts: Annotated[int, typer.Option(min=1, help="Number of the bundled prompts to take.")] = DEFAULT_NUM_PROMPTS,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, max=MAX_TOKENS, help="Most tokens to generate after each prompt.")
    ] = DEFAULT_MAX_NEW_TOKENS,
    temperature: TemperatureOption = 1.0,
    top_k: TopKOption = 0,
    top_p: TopPOption = 1.0,
    min_p: MinPOption = 0.0,
    seed: SeedOption = 0,
    target: TargetOption = None,
    draft: DraftOption = None,
    device: DeviceOption = "cpu",
    form: FormatOption = Format.plain,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the rows to a file (.json, .csv, .md).")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Also draw the rows (.png, .svg, .pdf).")] = None,
    quiet: QuietOption = False,
) -> None:
    """Compare strategies: tokens a step, distance from the target, speed."""
    check_ending(output, report.FILE_FORMS, "--output")
    report.check_plot(plot)
    lengths = _lengths(num_draft_tokens)
    if plot is not None and min(lengths) > comparison.LONGEST_EXACT:
        msg = f"--plot: there is no distance to draw beyond K = {comparison.LONGEST_EXACT}: give a smaller one as well"
        raise CommandError(msg)
    cases = _cases(strategies, config or [])
    where = device_of(device)
    pair = models.load(target, draft, where)
    settings = Settings(
        prompts=_prompts(prompts),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
    )
    longest = max(models.encode(pair, prompt).shape[1] for prompt in settings.prompts)
    models.expect_room(pair, longest, max_new_tokens)
    rows: list[Row] = []
    interrupted = False
    try:
        _run(pair, cases, lengths, settings, rows, quiet=quiet)
    except KeyboardInterrupt:
        interrupted = True
    if rows:
        report.print_rows(rows, form, where, quiet=quiet)
    if interrupted:
        console.interrupted(f"{len(rows)} of {len(cases) * len(lengths)} rows", output, plot)
    if output is not None:
        report.write(rows, output, where)
    if plot is not None:
        report.plot(rows, plot)
    if any(row.error for row in rows):
        raise typer.Exit(FAILED)


def _run(
    pair: ModelPair,
    cases: Sequence[Case],
    lengths: Sequence[int],
    settings: Settings,
    rows: list[Row],
    *,
    quiet: bool,
) -> None:
    """Append a row for each strategy and length, so that an interruption leaves the finished ones."""
    share = 1 / len(settings.prompts)
    with console.progress("rows", quiet=quiet) as progress:
        task = progress.add_task("warming up", total=len(cases) * len(lengths))
        comparison.warm_up(pair, max(lengths), settings)
        for case in cases:
            for length in lengths:
                progress.update(task, description=f"{case.name}, K = {length}", completed=len(rows))
                rows.append(comparison.measure(pair, case, length, settings, lambda: progress.advance(task, share)))


def _cases(strategies: str | None, files: Sequence[Path]) -> list[Case]:
    """Return what to compare; a name that does not exist is an error before anything runs."""
    configured = [configs.from_config(file) for file in files]
    names = [] if configured else registry.available()
    if strategies is not None:
        names = names_of("--strategies", strategies)
    entries = {entry.strategy: entry for entry in map(registry.find, names)}.values()
    found = [Case(entry.strategy.name, entry.strategy.traits.guarantee, entry.create) for entry in entries]
    labels = labels_of(configured, files, [case.name for case in found])
    return found + [
        Case(label, strategy.traits.guarantee, lambda strategy=strategy: strategy)  # type: ignore[misc]
        for label, strategy in zip(labels, configured, strict=True)
    ]


def _lengths(text: str) -> list[int]:
    try:
        lengths = sorted({int(part) for part in text.split(",")})
    except ValueError:
        lengths = [0]
    if lengths[0] < 1:
        msg = f"--num-draft-tokens: expected integers >= 1 separated by commas, got {text!r}"
        raise CommandError(msg)
    return lengths


def _prompts(count: int) -> list[str]:
    known = demo.prompts()
    if count > len(known):
        msg = f"--prompts: expected at most {len(known)}, the bundled ones, got {count}"
        raise CommandError(msg)
    return known[:count]
