"""docs/write-a-strategy.md: every block runs; the shell's from a wheel, in an environment that holds nothing else."""

from __future__ import annotations

import ast
import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import pytest

from acceptlib import Traits
from acceptlib.rules import ELEMENTS, SCALARS

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "write-a-strategy.md").read_text(encoding="utf-8")
FENCE = re.compile(r"^(<!-- not run: .+ -->\n)?```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)

PIP = """#!/bin/sh
command=$1
shift
[ "$command" = install ] && set -- --target '{site}' --upgrade "$@"
exec '{python}' -m pip "$command" --quiet --disable-pip-version-check --no-index --find-links '{wheels}' \\
    --no-deps --no-build-isolation "$@"
"""
"""What `pip` is on the page: the real one, offline and into a folder of the test."""


def blocks(language: str) -> list[str]:
    """Return the blocks of a language that are not marked as not run."""
    return [text for marked, name, text in FENCE.findall(PAGE) if name == language and not marked]


@pytest.mark.parametrize("index", range(len(blocks("python"))))
def test_python_runs(index: int) -> None:
    exec(compile(blocks("python")[index], f"block {index}", "exec"), {"__name__": f"page_{index}"})  # noqa: S102


@pytest.mark.long
def test_shell_runs_from_a_wheel(tmp_path: Path) -> None:
    """The whole page, from `pip install acceptlib` on, and the config at its end."""
    site, wheels, programs, work = (tmp_path / name for name in ("site", "wheels", "bin", "work"))
    programs.mkdir()
    work.mkdir()
    pip = programs / "pip"
    pip.write_text(PIP.format(site=site, wheels=wheels, python=sys.executable), encoding="utf-8")
    pip.chmod(0o755)
    path = (programs, site / "bin", Path(sys.executable).parent, os.environ["PATH"])
    environment = {**os.environ, "PATH": os.pathsep.join(map(str, path)), "PYTHONPATH": str(site)}
    said = ""
    for block in [f"pip wheel --wheel-dir '{wheels}' '{ROOT}'", *blocks("console")]:
        done = subprocess.run(  # noqa: S603 - our own page
            ["/bin/sh", "-ec", block], cwd=work, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
        said += done.stdout
    assert re.search(r"^demo +lossy +acceptlib-demo 0\.1\.0 ", said, re.MULTILINE), said
    assert re.search(r"^demo +2 +lossy ", said, re.MULTILINE), said
    assert re.search(r"^logits +1 +5 +demo .* yes$", said, re.MULTILINE), said
    (work / "acceptance.toml").write_text(blocks("toml")[0], encoding="utf-8")
    config = "import acceptlib; print(acceptlib.__file__, acceptlib.from_config('acceptance.toml'))"
    done = subprocess.run(  # noqa: S603 - ourselves
        [sys.executable, "-c", config], cwd=work, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{site / 'acceptlib' / '__init__.py'} acceptlib.create('demo', floor=0.4)\n"


def test_what_the_shell_runs_is_installed_first() -> None:
    """The test above finds the programs of whoever runs it as well."""
    lines = [line for block in blocks("console") for line in block.splitlines()]
    programs = {line.split()[0] for line in lines if "=" not in line.split()[0]}
    assert programs == {"pip", "acceptlib", "pytest"}
    assert lines.index('pip install "./acceptlib-demo[test]"') < lines.index("pytest acceptlib-demo")


def test_only_blocks_with_a_reason_are_left_out() -> None:
    assert {name for _, name, _ in FENCE.findall(PAGE)} == {"console", "python", "toml"}
    assert PAGE.count("<!-- not run: ") == 1


def test_page_says_what_traits_there_are() -> None:
    """Each with its default, and every choice by its name."""
    table = PAGE.split("<!-- traits -->")[1].split("<!-- /traits -->")[0]
    rows = {
        name: (default, text)
        for name, default, text in re.findall(r"^\| `(\w+)` \| (.*?) \| (.*) \|$", table, re.MULTILINE)
    }
    assert [*rows] == [field.name for field in dataclasses.fields(Traits)]
    for name, annotation in get_type_hints(Traits).items():
        default, text = rows[name]
        if default != "required":
            assert getattr(Traits(guarantee="lossy"), name) == ast.literal_eval(default.strip("`"))
        choices = get_args(annotation) if get_origin(annotation) is Literal else ()
        assert [choice for choice in choices if choice not in default + text] == []


def test_page_says_what_rules_read() -> None:
    table = PAGE.split("<!-- scalars -->")[1].split("<!-- /scalars -->")[0]
    assert dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", table, re.MULTILINE)) == SCALARS
    for name in ELEMENTS:
        assert f"`{name}`" in PAGE
