"""`acceptlib check`: the conformance suite on installed strategies, as a table."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Annotated, Final, TypeAlias

import typer

from acceptlib import registry, testing
from acceptlib.cli import console
from acceptlib.cli.console import FAILED, CommandError
from acceptlib.cli.format import Column, Format, note, show
from acceptlib.cli.options import (
    ConfigOption,
    DeviceOption,
    FormatOption,
    OptionOption,
    QuietOption,
    device_of,
    names_of,
    parse_assignments,
    strategy_of,
)
from acceptlib.engine.backends import Choice
from acceptlib.errors import one_line
from acceptlib.strategy import AcceptanceStrategy
from acceptlib.testing import Check, CheckResult, Subject
from acceptlib.testing.checks import asked_of
from acceptlib.testing.suite import due, make_subject, select

Job: TypeAlias = tuple[Subject, Check]

MAX_JOBS: Final = 64
"""Checks that run at a time, at most: there are few more for a strategy."""

COLUMNS: Final = (
    Column("strategy"),
    Column("check"),
    Column("result"),
    Column("seconds", "right", expendable=1),
    Column("property, or what is wrong", wraps=True),
)


def command(  # noqa: PLR0913, PLR0917 - one argument an option
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="Names of the strategies to check; all available ones if left out."),
    ] = None,
    device: DeviceOption = "cpu",
    backend: Annotated[Choice | None, typer.Option(help="Engine that runs the strategies.")] = None,
    only: Annotated[str | None, typer.Option(metavar="CHECK,CHECK", help="Run these checks alone.")] = None,
    processes: Annotated[
        int, typer.Option("--jobs", "-j", min=1, max=MAX_JOBS, help="Checks that run at a time, each in a process.")
    ] = 1,
    config: ConfigOption = None,
    option: OptionOption = None,
    form: FormatOption = Format.plain,
    quiet: QuietOption = False,
) -> None:
    """Check that strategies are what they declare themselves to be; exit with 1 if one is not."""
    console.use_one_thread()
    where = device_of(device)
    wanted = None if only is None else names_of("--only", only)
    strategies, results = _created(names or [], config, option or [])
    suites = [
        (make_subject(strategy, device=where, backend=backend), testing.checks_for(strategy)) for strategy in strategies
    ]
    # A check may be for some of the strategies only: a name is unknown only if none of them has it.
    chosen = select(list({check.name: check for _, checks in suites for check in checks}.values()), wanted)
    jobs = [
        (subject, check)
        for subject, checks in suites
        for check in due(subject, [check for check in checks if check in chosen])
    ]
    if (names or config) and wanted is not None:
        # A named strategy that a check does not apply to must not look as if it had passed.
        results += [
            (subject.strategy.name, _skipped(check))
            for subject, checks in suites
            for check in chosen
            if check not in checks
        ]
    interrupted, found = False, dict[int, CheckResult]()
    with console.progress("checks", quiet=quiet) as progress:
        task = progress.add_task("", total=len(jobs))
        announce = partial(progress.update, task)
        run = _run_in_turn(jobs, announce) if processes == 1 else _run_side_by_side(jobs, processes)
        try:
            with contextlib.closing(run):
                for number, result in run:
                    found[number] = result
                    progress.advance(task)
        except KeyboardInterrupt:
            interrupted = True
    results += [(jobs[number][0].strategy.name, found[number]) for number in sorted(found)]
    _print(results, form)
    tally = Counter(result.status for _, result in results)
    if form is Format.plain and not quiet:
        seconds = sum(result.seconds for _, result in results)
        note(f"{tally['passed']} passed, {tally['failed']} failed, {tally['skipped']} skipped in {seconds:.1f} s.")
    if interrupted:
        console.interrupted(f"{len(found)} of {len(jobs)} checks")
    if tally["failed"]:
        raise typer.Exit(FAILED)


def _run_in_turn(jobs: Sequence[Job], announce: Callable[..., None]) -> Generator[tuple[int, CheckResult]]:
    """Yield the numbers and results of jobs, each of which is announced as a `description` before."""
    for number, (subject, check) in enumerate(jobs):
        announce(description=f"{subject.strategy.name}, {check.name}")
        yield number, testing.run_check(check, subject)


def _run_side_by_side(jobs: Sequence[Job], processes: int) -> Generator[tuple[int, CheckResult]]:
    """Yield the numbers and results of jobs that run in processes of their own, in the order in which they end."""
    # Forked processes could not use a GPU.
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), console.use_one_thread)
    resource_tracker.ensure_running()  # as it starts it lets signals through
    try:
        # The mask is inherited, for Ctrl-C ends these processes below. Here a signal waits until it is lifted.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            futures = {pool.submit(_run_apart, *job): number for number, job in enumerate(jobs)}
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        for future in as_completed(futures):
            number = futures[future]
            try:
                result = future.result()
            except Exception as error:  # noqa: BLE001 - the process has ended, or the strategy cannot be sent to it
                check = jobs[number][1]
                result = CheckResult(check.name, "failed", f"no result: {one_line(error)}", check.description, 0.0)
            yield number, result
    finally:
        for process in multiprocessing.active_children():
            process.terminate()
        pool.shutdown(cancel_futures=True)


def _run_apart(subject: Subject, check: Check) -> CheckResult:
    """Run a job where its process is: what it raised is left out, for not every exception can be sent back."""
    return replace(testing.run_check(check, subject), error=None)


def _created(
    names: list[str], config: Path | None, assignments: list[str]
) -> tuple[list[AcceptanceStrategy], list[tuple[str, CheckResult]]]:
    """Return the strategies to check, and what is said of those that cannot be created: others are checked still."""
    if config is not None:
        if names:
            msg = "NAME and --config both name strategies: give one"
            raise CommandError(msg)
        return [strategy_of(None, config, assignments)], []
    found, failed = [], []
    for entry in {entry.strategy: entry for entry in map(registry.find, names or registry.available())}.values():
        try:
            strategy = entry.create(**parse_assignments(assignments))
            testing.checks_for(strategy)
        except Exception as error:
            if names or assignments:
                raise
            # A third party's, or one whose options have no defaults.
            failed.append((entry.name, _not_created(error)))
            continue
        found.append(strategy)
    return found, failed


def _skipped(check: Check) -> CheckResult:
    return CheckResult(check.name, "skipped", f"it is for {asked_of(check.name)} alone", check.description, 0.0)


def _not_created(error: BaseException) -> CheckResult:
    return CheckResult("creation", "failed", one_line(error), "The strategy is created without options", 0.0, error)


def _print(results: list[tuple[str, CheckResult]], form: Format) -> None:
    records = [
        {
            "strategy": name,
            "check": result.name,
            "status": result.status,
            "message": result.message,
            "property": result.description,
            "seconds": result.seconds,
        }
        for name, result in results
    ]
    rows = [
        [name, result.name, result.status, f"{result.seconds:.2f}", result.message or result.description]
        for name, result in results
    ]
    show(COLUMNS, rows, records, form)
