"""`acceptlib new-plugin`: a package with one strategy, to start from."""

from __future__ import annotations

import keyword
import re
import shlex
import tempfile
from importlib import resources
from pathlib import Path
from string import Template
from typing import Annotated, Final

import typer

from acceptlib import __version__, registry
from acceptlib.cli.console import CommandError
from acceptlib.cli.format import stdout_write
from acceptlib.errors import PluginError, UnknownStrategyError, short_repr
from acceptlib.strategy import INTERFACE_VERSION

NAME: Final = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
"""What a distribution, a module (with `_` for `-`) and a class can all be made of."""

LONGEST_NAME: Final = 100
"""Letters of a name. File names have at most 255, and those of the package's files and its wheel add to this name."""

FILES: Final = {
    "pyproject.toml": "pyproject.toml.template",
    "README.md": "README.md.template",
    "$module.py": "module.py.template",
    "tests/test_$module.py": "test.py.template",
}
"""Path in the package -> template beside this module."""


def command(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the new strategy: lower case, with '-' between words.")
    ],
    path: Annotated[Path, typer.Option(metavar="DIR", help="Folder to make the folder acceptlib-NAME in.")] = Path(),
) -> None:
    """Write a package acceptlib-NAME with a strategy that works, to start from."""
    folder = create(name, path)
    stdout_write(
        f"Wrote {folder}. The rule is in {module_of(name)}.py. Next:\n\n"
        f"  pip install {shlex.quote(str(folder) if folder.is_absolute() else f'./{folder}')}\n"
        f"  acceptlib check {name}\n"
        f"  acceptlib compare --strategies rejection,{name}"
    )


def module_of(name: str) -> str:
    """Return the module of the package for a strategy."""
    return f"acceptlib_{name.replace('-', '_')}"


def class_of(name: str) -> str:
    """Return the class of a strategy."""
    return "".join(word.capitalize() for word in name.split("-"))


def create(name: str, parent: Path) -> Path:
    """Write the package into `parent` and return its folder: all of it or nothing, and never over what is there.

    Raises:
        CommandError: The name cannot be used, the folder exists, or `parent` cannot be written.
    """
    if not NAME.fullmatch(name):
        expected = "lower-case words of letters and digits with '-' between them, as my-rule"
        msg = f"NAME: expected {expected}, got {short_repr(name)}"
        raise CommandError(msg)
    if keyword.iskeyword(class_of(name)):
        msg = f"NAME: the class of {name!r} would be named {class_of(name)}, a word of Python: choose another"
        raise CommandError(msg)
    if name.startswith("test") or name.endswith("-test"):
        msg = f"NAME: pytest would take {module_of(name)}.py or its {class_of(name)} for tests: choose another"
        raise CommandError(msg)
    if len(name) > LONGEST_NAME:
        msg = f"NAME: expected at most {LONGEST_NAME} letters, since files are named after it, got {len(name)}"
        raise CommandError(msg)
    _check_free(name)
    folder = parent / f"acceptlib-{name}"
    try:
        if folder.exists() or folder.is_symlink():
            msg = f"{folder}: exists already, and nothing was written: choose another NAME or --path"
            raise CommandError(msg)
        # Beside its place, since a rename is atomic within one file system only.
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=parent) as temporary:
            whole = Path(temporary) / folder.name
            for file, text in _files(name).items():
                (whole / file).parent.mkdir(parents=True, exist_ok=True)
                (whole / file).write_text(text, encoding="utf-8")
            whole.rename(folder)
    except OSError as error:
        msg = f"{folder}: cannot be written: {error.strerror}"
        raise CommandError(msg) from error
    return folder


def _check_free(name: str) -> None:
    try:
        entry = registry.find(name)
    except UnknownStrategyError:
        return
    except PluginError as error:
        raise CommandError(str(error)) from error
    msg = f"NAME: {entry.distribution} has a strategy {name!r} already: choose another name"
    raise CommandError(msg)


def _files(name: str) -> dict[str, str]:
    """Return the text of each file by its path in the package."""
    words = {
        "name": name,
        "distribution": f"acceptlib-{name}",
        "module": module_of(name),
        "class_name": class_of(name),
        "requirement": "acceptlib" if "unknown" in __version__ else f"acceptlib>={__version__}",
        "interface_version": str(INTERFACE_VERSION),
    }
    templates = resources.files("acceptlib.cli") / "templates"
    return {
        Template(file).substitute(words): Template((templates / template).read_text(encoding="utf-8")).substitute(words)
        for file, template in FILES.items()
    }
