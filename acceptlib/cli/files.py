"""Files that commands write: whole or not at all, and refused before any work is done for them."""

from __future__ import annotations

import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Collection
from pathlib import Path

from acceptlib.cli.console import CommandError
from acceptlib.errors import short_repr


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all: an interruption leaves what was there before. Links and modes stay.

    If the path is no regular file, such as a pipe, it is written into directly.

    Raises:
        CommandError: The folder does not exist or cannot be written.
    """
    data = content.encode() if isinstance(content, str) else content
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)
            return
        path = path.resolve()
        # Beside the file, since a rename is atomic within one file system only.
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        try:
            temporary.write_bytes(data)
            if path.exists():
                shutil.copymode(path, temporary)
            os.replace(temporary, path)  # noqa: PTH105 - the call that is atomic, by its name
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        msg = f"{path}: cannot be written: {error.strerror}"
        raise CommandError(msg) from error


def check_ending(path: Path | None, endings: Collection[str], option: str) -> None:
    """Refuse a path of another format, before any work is done for it.

    Raises:
        CommandError: The ending is unknown, the path is a folder, or the folder it is in is missing or not writable.
    """
    if path is None:
        return
    if path.suffix.lower() not in endings:
        msg = f"{option}: expected a file ending in {', '.join(endings)}, got {str(path)!r}"
        raise CommandError(msg)
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        mode = 0
    except OSError as error:
        msg = f"{option}: {short_repr(str(path))} cannot be written: {error.strerror}"
        raise CommandError(msg) from None
    if stat.S_ISDIR(mode):
        msg = f"{option}: {str(path)!r} is a folder: give the name of a file"
        raise CommandError(msg)
    if mode and not stat.S_ISREG(mode):
        return
    folder = path.resolve().parent  # of the file that a link leads to
    if not folder.is_dir():
        msg = f"{option}: folder {str(folder)!r} does not exist"
        raise CommandError(msg)
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        msg = f"{option}: folder {str(folder)!r} cannot be written: {error.strerror}"
        raise CommandError(msg) from None
