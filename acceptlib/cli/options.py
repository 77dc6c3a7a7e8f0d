"""Options that several commands share, and the strategy that they ask for."""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import torch
import typer

from acceptlib import config, registry
from acceptlib.cli.console import CommandError
from acceptlib.cli.format import Format
from acceptlib.errors import one_line, short_repr

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from acceptlib.strategy import AcceptanceStrategy

MAX_TOKENS: Final = 1 << 20
"""Tokens of a generated text, at most: more than any model has positions."""

LONGEST_INDEX: Final = 3
"""Digits of a GPU's index, at most."""

FormatOption: TypeAlias = Annotated[Format, typer.Option("--format", "-f", help="Format of the output.")]
OptionOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "-o", "--option", metavar="KEY=VALUE", help="An option of the strategy, its value as in TOML; may be repeated."
    ),
]
ConfigOption: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="Take the strategy from the table `acceptance` of a file (.toml, .json, .yaml).",
    ),
]

ConfigsOption: TypeAlias = Annotated[
    list[Path] | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="Take the strategy of a config file's table `acceptance` too; may be repeated.",
    ),
]


def finite(value: float) -> float:
    """Return a number if it is finite.

    Raises:
        BadParameter: It is not.
    """
    if not math.isfinite(value):
        msg = f"{value} is not finite."
        raise typer.BadParameter(msg)
    return value


TemperatureOption: TypeAlias = Annotated[
    float, typer.Option(min=0.0, callback=finite, help="Temperature of both models; 0 is greedy.")
]
TopKOption: TypeAlias = Annotated[
    int, typer.Option(min=0, max=(1 << 31) - 1, help="Keep the k likeliest tokens; 0 is off.")
]


def _above_zero(value: float) -> float:
    if value <= 0:
        msg = f"{value} is not above 0."
        raise typer.BadParameter(msg)
    return value


TopPOption: TypeAlias = Annotated[
    float,
    typer.Option(
        max=1.0,
        callback=_above_zero,
        help="Keep the likeliest tokens with this share of the mass, above 0; 1 is off.",
    ),
]
MinPOption: TypeAlias = Annotated[
    float, typer.Option(min=0.0, max=1.0, help="Keep tokens with this share of the largest probability; 0 is off.")
]
DeviceOption: TypeAlias = Annotated[str, typer.Option(help="Device to run on: cpu, cuda, cuda:1.")]
QuietOption: TypeAlias = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress bar and no remarks.")]
SeedOption: TypeAlias = Annotated[
    int, typer.Option(help="Seed of all random numbers: those of the drafts and those of the decisions.")
]
TargetOption: TypeAlias = Annotated[
    str | None,
    typer.Option(metavar="PATH", help="Target model, a folder or a name on the hub; the bundled one if left out."),
]
DraftOption: TypeAlias = Annotated[
    str | None,
    typer.Option(metavar="PATH", help="Draft model, a folder or a name on the hub; the bundled one if left out."),
]


def names_of(option: str, text: str) -> list[str]:
    """Return what commas separate, once each.

    Raises:
        CommandError: There is nothing before or behind a comma.
    """
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        msg = f"{option}: expected names separated by commas, got {text!r}"
        raise CommandError(msg)
    return list(dict.fromkeys(names))


def parse_value(text: str) -> Any:
    """Return `text` as the TOML value it is, or as a string where it is none, so that `a=word` needs no quotes.

    Raises:
        CommandError: It begins as a list, a table or a text of TOML, and is none.
    """
    try:
        table = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError) as error:  # no TOML, or more digits or brackets than Python reads
        if text.startswith(("[", "{", '"', "'")):
            msg = f"-o: expected a value as in TOML, got {short_repr(text)}: {one_line(error)}"
            raise CommandError(msg) from None
        return text
    return table["value"] if len(table) == 1 else text


def parse_assignments(assignments: Sequence[str]) -> dict[str, Any]:
    """Return the options given as `key=value`.

    Raises:
        CommandError: One has no `=` or no key, is given twice, is `backend`, or has a value that only begins as TOML.
    """
    values: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        key = key.strip()
        if not equals or not key:
            msg = f"-o: expected key=value, got {assignment!r}"
            raise CommandError(msg)
        if key in values:
            msg = f"-o: option {key!r} is given twice"
            raise CommandError(msg)
        if key == "backend":  # which `create` takes beside the options
            msg = "-o: 'backend' is no option of a strategy: set it in a --config file"
            raise CommandError(msg)
        values[key] = parse_value(text.strip())
    return values


def strategy_of(name: str | None, file: Path | None, assignments: Sequence[str]) -> AcceptanceStrategy:
    """Return the strategy of `--strategy` or `--config`, or `rejection`, with the options of `-o` on top.

    Raises:
        CommandError: Both were given.
    """
    options = parse_assignments(assignments)
    if file is None:
        return registry.create("rejection" if name is None else name, **options)
    if name is not None:
        msg = "--strategy and --config both name a strategy: give one"
        raise CommandError(msg)
    found = config.load(file)
    # Not a deep copy: what a few YAML aliases stand for may have no end.
    return config.create(found.model_copy(update={"options": {**found.options, **options}}), file)


def labels_of(configured: Sequence[AcceptanceStrategy], files: Sequence[Path], names: Sequence[str]) -> list[str]:
    """Return the names of config files' strategies: with options, then the file, while others share them.

    Args:
        configured: The strategies.
        files: The file of each.
        names: Names that are taken.

    Raises:
        CommandError: A file is given twice.
    """
    for file, count in Counter(files).items():
        if count > 1:
            msg = f"--config: expected each file once, got {file} {count} times"
            raise CommandError(msg)
    labels = [strategy.name for strategy in configured]
    options = [strategy.options.model_dump(exclude_defaults=True).items() for strategy in configured]
    for details in ([[f"{name}={value}" for name, value in some] for some in options], [[str(file)] for file in files]):
        often = Counter([*names, *labels])
        labels = [
            " ".join([label, *detail]) if often[label] > 1 else label
            for label, detail in zip(labels, details, strict=True)
        ]
    return labels


def device_of(name: str | None) -> torch.device:
    """Return the device of a command line; a GPU if it names none and there is one.

    Raises:
        CommandError: It does not exist.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = re.fullmatch(r"cpu|cuda(?::(0|[1-9][0-9]*))?", name)
    if found is None:
        msg = f"--device: expected cpu, cuda or cuda:N, got {name!r}"
        raise CommandError(msg)
    index = found[1] or "0"  # torch keeps its lowest 8 bits alone: cuda:256 would be cuda:0
    if name != "cpu" and (len(index) > LONGEST_INDEX or int(index) >= torch.cuda.device_count()):
        msg = f"--device: {name} does not exist; this machine has {torch.cuda.device_count()} GPUs that torch can use"
        raise CommandError(msg)
    return torch.device(name)
