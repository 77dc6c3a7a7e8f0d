"""The script `acceptlib`: outside the package, whose import takes a second, so that Ctrl-C is caught from the start."""

from __future__ import annotations

import sys

INTERRUPTED = 130
"""Exit code after Ctrl-C, as `acceptlib.cli.console` has it."""


def main() -> None:
    """Run the command line."""
    try:
        from acceptlib.cli.app import main as run  # noqa: PLC0415 - so that an interruption of it is caught

        run()
    except KeyboardInterrupt:
        sys.stderr.write("Error: interrupted\n")
        sys.exit(INTERRUPTED)
