"""`acceptlib bench`: strategies timed beside the read floor and other libraries, each checked before it is timed."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, get_args

import torch
import typer

from acceptlib import config as configs
from acceptlib import plots, registry
from acceptlib.benchmarks import measure
from acceptlib.benchmarks.environment import environment
from acceptlib.benchmarks.measure import Make, Row
from acceptlib.benchmarks.peers import PEERS, Peer
from acceptlib.benchmarks.workloads import Dtype, Kind, Level, Source, Workload
from acceptlib.cli import console, models, report
from acceptlib.cli import format as table
from acceptlib.cli.console import FAILED, CommandError, stdout
from acceptlib.cli.files import check_ending, write_whole
from acceptlib.cli.format import Column, Format
from acceptlib.cli.options import (
    ConfigsOption,
    FormatOption,
    MinPOption,
    OptionOption,
    QuietOption,
    TopKOption,
    TopPOption,
    device_of,
    finite,
    labels_of,
    names_of,
    parse_assignments,
)
from acceptlib.engine import backends
from acceptlib.engine.backends import Choice
from acceptlib.errors import AcceptlibError
from acceptlib.sampling import OFF

DEFAULT_SHAPES: Final = "1x5,8x5"

NO_MEMORY: Final = "can't allocate memory"
"""Part of the error of torch's CPU allocator, which has no class of its own."""

COLUMNS: Final = (
    Column("from"),
    Column("B", "right"),
    Column("K", "right"),
    Column("name"),
    Column("backend", expendable=2),
    Column("us", "right"),
    Column("spread", "right", expendable=5),
    Column("floor us", "right", expendable=3),
    Column("of floor", "right", expendable=1),
    Column("host us", "right", expendable=4),
    Column("MB read", "right", expendable=6),
    Column("tau", "right"),
    Column("match"),
)
FIRST_FIGURE: Final = 5

UNSTEADY: Final = 0.25
"""Spread over median from which a time says little."""

NAMED_ROWS: Final = 4
"""Rows with varying times that a remark names, at most."""

HOST_MARK: Final = "*"
"""Marks times that count the host's."""

LEGEND: Final = {
    "us": "median of a call",
    "spread": "distance between its quartiles",
    "floor us": "summing the rows that the step has to read",
    "of floor": "floor us / us",
    "tau": "emitted tokens a step",
    "match": "the result is the oracle's, or what a third party's own rule gives in float64; other libraries draw "
    "numbers of their own, and only the form of their results is checked",
}
"""By heading of a column."""

HOST_LEGEND: Final = f"{HOST_MARK} timed from the host, for it may wait for the GPU; the others in CUDA graphs."


def command(  # noqa: PLR0913, PLR0917 - one argument an option
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="Strategies to time; all available ones without any and without --config."),
    ] = None,
    shapes: Annotated[
        str, typer.Option(metavar="BxK,BxK", help="Batches to time: B requests with K drafted tokens each.")
    ] = DEFAULT_SHAPES,
    inputs: Annotated[
        str,
        typer.Option(
            metavar="A,B",
            help="Forms of the rows that are verified: logits, probs, or one-hot (logits, without draft rows).",
        ),
    ] = "logits,probs",
    vocab_size: Annotated[int, typer.Option(min=2, max=1 << 24, help="Number of entries of a row, V.")] = 128256,
    dtype: Annotated[Dtype, typer.Option(help="Dtype of the rows.")] = "float32",
    temperature: Annotated[
        float, typer.Option(min=0.01, callback=finite, help="Temperature of both models, where rows are logits.")
    ] = 1.0,
    top_k: TopKOption = 0,
    top_p: TopPOption = 1.0,
    min_p: MinPOption = 0.0,
    acceptance: Annotated[
        Level, typer.Option(help="Share of a draft that is accepted: about 30, 60 or 90 percent on synthetic rows.")
    ] = "medium",
    rows: Annotated[
        Source, typer.Option(help="Where rows come from: made up, or computed by the bundled pair of models.")
    ] = "synthetic",
    peers: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="Other libraries to time: flashinfer, transformers, vllm, or none; all installed ones if left out.",
        ),
    ] = None,
    config: ConfigsOption = None,
    option: OptionOption = None,
    backend: Annotated[
        Choice | None, typer.Option(help="Engine that runs the strategies; auto, or as a config has it, if left out.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Device of the tensors, cpu or cuda; if left out, a GPU where there is one.")
    ] = None,
    form: FormatOption = Format.plain,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write a file: a record (.json) or the rows (.csv, .md).")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also draw times against batch sizes (.png, .svg, .pdf).")
    ] = None,
    quiet: QuietOption = False,
) -> None:
    """Time strategies beside the read floor and other libraries; a wrong result is not timed."""
    check_ending(output, report.FILE_FORMS, "--output")
    report.check_plot(plot)
    if rows == "pair":
        models.prepare()
    strategies = _strategies(names or [], config or [], option or [], backend)
    where = device_of(device)
    backends.require(backend or "auto", where)
    parameters: Any = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    todo = [
        Workload(
            num_requests=num_requests,
            num_draft_tokens=num_draft_tokens,
            vocab_size=vocab_size,
            kind=kind,
            dtype=dtype,
            acceptance=acceptance,
            source=rows,
            **({} if kind == "probs" else parameters),
        )
        for kind, (num_requests, num_draft_tokens) in itertools.product(_kinds(inputs, parameters), _shapes(shapes))
    ]
    found, absent = _peers(peers, todo, where)
    measured: list[Row] = []
    ended = _run(todo, strategies, found, where, measured, quiet=quiet)
    # Rows that were finished before a workload failed are shown; a file is the whole or none.
    if measured:
        _print(measured, form, where, absent, quiet=quiet)
    if isinstance(ended, KeyboardInterrupt):
        console.interrupted(_counted(measured), output, plot)
    if measured and isinstance(ended, AcceptlibError):
        console.cut_short(f"after {_counted(measured)}: {ended}", FAILED, output, plot)
    if ended is not None:
        raise ended
    _write(measured, where, output, plot)
    if any(row.error for row in measured):
        raise typer.Exit(FAILED)


def points(rows: Sequence[Row]) -> list[plots.Timing]:
    """Return the rows that have a time, as a figure takes them.

    Raises:
        CommandError: None has.
    """
    found = [
        plots.Timing(
            path=row.path,
            name=row.name,
            peer=row.peer,
            num_requests=row.B,
            num_draft_tokens=row.K,
            microseconds=row.microseconds,
            read_floor=row.read_floor,
            rows_read=row.rows_read,
        )
        for row in rows
        if row.microseconds is not None
    ]
    if not found:
        msg = "--plot: no row has a time to draw"
        raise CommandError(msg)
    return found


def _run(
    todo: Sequence[Workload],
    strategies: Mapping[str, Make],
    peers: Sequence[Peer],
    device: torch.device,
    rows: list[Row],
    *,
    quiet: bool,
) -> AcceptlibError | RuntimeError | KeyboardInterrupt | None:
    """Append a row for each workload and name; return what ended that early, if anything did."""
    with console.progress("workloads", quiet=quiet) as progress:
        task = progress.add_task("making rows", total=len(todo))
        try:
            for number, workload in enumerate(todo):
                progress.update(task, description=f"{workload}: making rows", completed=number)
                for row in measure.run(workload, strategies, peers, device):
                    rows.append(row)
                    progress.update(task, description=f"{workload}: {row.name}")
                    progress.advance(task, 1 / (len(strategies) + len(peers)))
        except (AcceptlibError, KeyboardInterrupt) as error:
            return error
        except RuntimeError as error:
            if not isinstance(error, torch.OutOfMemoryError) and NO_MEMORY not in str(error):
                return error
            asked = re.search(r"allocate [\d.]+ \w+", str(error))
            tried = f", which tried to {asked[0]}" if asked else ""
            msg = f"{workload}: out of memory on {device}{tried}: give smaller --shapes or --vocab-size"
            return CommandError(msg)
    return None


def _counted(rows: Sequence[Row]) -> str:
    return f"{len(rows)} row{'s' * (len(rows) != 1)}"


def _write(rows: Sequence[Row], device: torch.device, output: Path | None, plot: Path | None) -> None:
    """Write the files that were asked for."""
    if output is not None:
        write_whole(output, _render(rows, report.FILE_FORMS[output.suffix.lower()], device))
    if plot is not None:
        write_whole(plot, plots.timings(points(rows), plot.suffix.lower()))


def _print(rows: Sequence[Row], form: Format, device: torch.device, absent: Sequence[str], *, quiet: bool) -> None:
    if form is not Format.plain:
        table.stdout_write(_render(rows, form, device))
        return
    failed = [number for number, row in enumerate(rows) if row.error]
    left_out = table.print_figures(COLUMNS, [_cells(row) for row in rows], failed, FIRST_FIGURE)
    if quiet:
        return
    where, first = environment(device), rows[0]
    versions = ", ".join(f"{name} {where[name]}" for name in ("acceptlib", "torch", "triton") if where[name])
    stdout().print()
    table.note("; ".join(f"{header}: {text}" for header, text in LEGEND.items() if header not in left_out) + ".")
    if any(row.how == "turns" for row in rows):
        table.note(HOST_LEGEND)
    table.note(
        f"{first.source} rows, {first.acceptance} acceptance, V = {first.vocab_size}, {first.dtype}. "
        f"{where['machine']}, {versions}."
    )
    varying = [f"{row.name} {row.B}x{row.K} from {row.path}" for row in rows if _is_unsteady(row)]
    if varying:
        more = f" and {len(varying) - NAMED_ROWS} more" if len(varying) > NAMED_ROWS else ""
        table.note(
            f"Times with a spread above {UNSTEADY:.0%} of their median, so the machine may be busy: "
            f"{'; '.join(varying[:NAMED_ROWS])}{more}."
        )
    for reason in absent:
        table.note(f"Not measured: {reason}.")
    table.note_left_out(left_out, "--format csv has every figure.")


def _is_unsteady(row: Row) -> bool:
    return row.microseconds is not None and row.spread is not None and row.spread > UNSTEADY * row.microseconds


def _render(rows: Sequence[Row], form: Format, device: torch.device) -> str:
    if form is Format.json:
        return table.to_json(measure.record(rows, device))
    if form is Format.csv:
        return table.to_csv([row.record() for row in rows])
    return table.github(COLUMNS, [_cells(row) for row in rows])


def _cells(row: Row) -> list[str]:
    head = [row.path, str(row.B), str(row.K), row.name, row.backend]
    if row.error is not None:
        return [*head, f"failed: {row.error}", *[""] * (len(COLUMNS) - FIRST_FIGURE - 1)]
    share, megabytes = row.share_of_floor, None if row.bytes_read is None else row.bytes_read / 1e6
    return [
        *head,
        _microseconds(row.microseconds) + HOST_MARK * (row.how == "turns"),
        *(_microseconds(value) for value in (row.spread, row.read_floor)),
        "-" if share is None else f"{share:.0%}",
        _microseconds(row.host_microseconds),
        "-" if megabytes is None else f"{megabytes:.1f}" if megabytes >= 0.1 else f"{megabytes:.1g}",  # noqa: PLR2004
        "-" if row.mean_emitted is None else f"{row.mean_emitted:.2f}",
        {True: "yes", False: "no", None: "-"}[row.match],
    ]


def _microseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}" if value < 100 else f"{value:.0f}"  # noqa: PLR2004 - three digits


def _strategies(
    names: Sequence[str], files: Sequence[Path], assignments: Sequence[str], backend: Choice | None
) -> dict[str, Make]:
    """Return what makes each strategy; a name or an option that does not exist is an error before anything runs."""
    if assignments:
        if len(names) != 1 or files:
            msg = "-o: expected one strategy to give options to, by NAME"
            raise CommandError(msg)
        strategy = registry.create(names[0], **parse_assignments(assignments), backend=backend or "auto")
        return {strategy.name: lambda: strategy}
    entries = [registry.find(name) for name in names or ([] if files else registry.available())]
    found: dict[str, Make] = {
        entry.strategy.name: (lambda entry=entry: entry.create(backend=backend or "auto"))  # type: ignore[misc]
        for entry in entries
    }
    configured = [configs.from_config(file) for file in files]
    if backend is not None:
        configured = [strategy.with_backend(backend) for strategy in configured]
    for label, strategy in zip(labels_of(configured, files, [*found]), configured, strict=True):
        found[label] = lambda strategy=strategy: strategy  # type: ignore[misc]
    return found


def _peers(names: str | None, todo: Sequence[Workload], device: torch.device) -> tuple[list[Peer], list[str]]:
    """Return the other libraries to measure, and why some are not, or not for all workloads.

    Raises:
        CommandError: One that was asked for does not exist or cannot be imported.
    """
    if names == "none":
        return [], []
    wanted = list(PEERS) if names is None else _split(names, PEERS, "--peers", "none, or ")
    missing = {name: reason for name in wanted if (reason := PEERS[name].missing()) is not None}
    if names is not None and missing:
        msg = "--peers: " + "; ".join(f"{name}: {reason}" for name, reason in missing.items())
        raise CommandError(msg)
    found = {name: PEERS[name] for name in wanted if name not in missing}
    absent = [f"{name}, since {reason}" for name, reason in missing.items()]
    for name, peer in found.items():
        reasons = Counter(peer.unsupported(workload, device) for workload in todo)
        absent += [
            f"{name} in {count} of {len(todo)} workloads, since it {reason}"
            for reason, count in reasons.items()
            if reason
        ]
    return [*found.values()], absent


def _kinds(text: str, parameters: Mapping[str, float]) -> list[Any]:
    kinds = _split(text, get_args(Kind), "--inputs")
    if kinds == ["probs"] and parameters != OFF:
        msg = "--temperature, --top-k, --top-p and --min-p act on logits, and --inputs probs are processed already"
        raise CommandError(msg)
    return kinds


def _split(text: str, known: Sequence[str] | Mapping[str, object], option: str, alone: str = "") -> list[str]:
    """Return names separated by commas, once each; `alone` is what else the option takes, for the message.

    Raises:
        CommandError: One is not known.
    """
    names = names_of(option, text)
    unknown = [name for name in names if name not in known]
    if unknown:
        msg = f"{option}: expected {alone}some of {', '.join(known)}, separated by commas, got {unknown[0]!r}"
        raise CommandError(msg)
    return names


def _shapes(text: str) -> list[tuple[int, int]]:
    found = [re.fullmatch(r"\s*([1-9]\d{0,5})x([1-9]\d{0,5})\s*", part) for part in text.split(",")]
    if not all(found):
        expected = f"BxK, each from 1 to 999999, separated by commas, as in {DEFAULT_SHAPES}"
        msg = f"--shapes: expected {expected}, got {text!r}"
        raise CommandError(msg)
    return sorted({(int(match[1]), int(match[2])) for match in found if match})
