"""Commands, run to the end that a test expects, which several test files share."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

from typer.testing import CliRunner

from acceptlib.cli.app import app


def run(*arguments: str, code: int = 0, **options: Any) -> Any:
    result = CliRunner().invoke(app, list(arguments), **options)
    assert result.exit_code == code, result.output
    return result


def fails(*arguments: str, **options: Any) -> str:
    """Return the one line of a command that is refused."""
    result = run(*arguments, code=2, **options)
    assert not result.stdout
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("Error: ")
    return str(result.stderr)


def interrupt(*arguments: str, after: bytes, **environment: str) -> tuple[int, bytes, bytes]:
    """Run Python, press Ctrl-C once stderr has `after`, and return the exit code and what was printed."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background would ignore it
    try:
        process = subprocess.Popen(  # noqa: S603 - our own command line
            [sys.executable, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "ACCEPTLIB_DISABLE_PLUGINS": "1", **environment},
        )
    finally:
        signal.signal(signal.SIGINT, handler)
    try:
        assert process.stderr is not None
        seen = b""
        while after not in seen:
            read = os.read(process.stderr.fileno(), 4096)
            assert read, seen
            seen += read
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    return process.returncode, output, errors
