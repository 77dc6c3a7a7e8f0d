"""What every command shares: consoles, progress, the error of a command line, and how errors leave the program."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any, Final, NoReturn

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text
from typer import Exit
from typer.core import TyperGroup

from acceptlib.errors import AcceptlibError

FAILED: Final = 1
"""Exit code where a part of the work failed."""

REFUSED: Final = 2
"""Exit code where nothing was done, as for any other usage error."""

COUNTED_WIDTH: Final = 45
"""Columns of a progress bar without its label, which is cut to leave room for them."""

INTERRUPTED: Final = 130
"""Exit code after Ctrl-C: 128 + SIGINT, as shells report it."""


class CommandError(AcceptlibError):
    """A command line that cannot be carried out."""


class Group(TyperGroup):
    """Commands whose errors are one line on stderr, not a traceback."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run the command line; `--help` and `--version` print before any command, and stdout may be full by then."""
        try:
            return super().main(*args, **extra)
        except OSError as error:
            if error.filename is not None:  # a file's, not that of stdout
                raise
            complain(f"cannot write the output: {error.strerror}")
            with contextlib.suppress(OSError):
                sys.stdout.close()  # or writing would be tried once more at exit
            sys.exit(FAILED)

    def invoke(self, ctx: Any) -> Any:
        """Run the command and turn what acceptlib raises on purpose into an exit code."""
        try:
            return super().invoke(ctx)
        except AcceptlibError as error:
            complain(str(error))
            raise Exit(REFUSED) from None
        except KeyboardInterrupt:
            complain("interrupted")
            raise Exit(INTERRUPTED) from None


def stdout() -> Console:
    """Return a console on the present stdout."""
    return Console(highlight=False)


def stderr() -> Console:
    """Return a console on the present stderr."""
    return Console(stderr=True, highlight=False)


def use_one_thread() -> None:
    """Have torch compute in one thread: more gain nothing on small tensors, and wait for each other on a busy CPU."""
    torch.set_num_threads(1)


def progress(unit: str, *, quiet: bool) -> Progress:
    """Return a bar on stderr that counts units and leaves nothing behind; none in a pipe."""
    console = stderr()
    label = Column(no_wrap=True, overflow="ellipsis", max_width=max(console.width - COUNTED_WIDTH, 1))
    return Progress(
        TextColumn("{task.description}", table_column=label),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=quiet or not console.is_terminal,
    )


def interrupted(done: str, *files: Path | None) -> NoReturn:
    """Say what was done before Ctrl-C, and which files were not written, since files are written whole or not at all.

    Raises:
        Exit: Always.
    """
    cut_short(f"interrupted after {done}", INTERRUPTED, *files)


def cut_short(why: str, code: int, *files: Path | None) -> NoReturn:
    """Say why a command ends with part of its work done, and which files were not written.

    Raises:
        Exit: Always, with the code.
    """
    unwritten = "".join(f"; {path} not written" for path in files if path is not None)
    complain(f"{why}{unwritten}")
    raise Exit(code)


def complain(message: str) -> None:
    """Print an error as one line, which the terminal may fold but we do not."""
    text = Text("Error: ", style="bold red").append(" ".join(message.split()), style="not bold default")
    stderr().print(text, soft_wrap=True)
