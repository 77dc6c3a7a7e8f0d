"""The command line, `acceptlib`."""

from __future__ import annotations

from acceptlib.cli.app import main

__all__ = ["main"]
