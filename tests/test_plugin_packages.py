"""Real packages, installed by pip into a throw-away environment: four that work, and one that breaks in each way."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_support import BUILT_IN

import acceptlib

ROOT = Path(__file__).parent.parent
OURS = ["cactus", "cascade", "entropy-scaled", "relaxed"]

PYPROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "bad-{name}"
version = "1.0"

[project.entry-points.acceptlib]
{name} = "bad_{name}"
"""

STRATEGY = """
import acceptlib

class Bad(acceptlib.AcceptanceStrategy):
    name = {name!r}
    traits = acceptlib.Traits(guarantee={guarantee!r}, bound="none")
    interface_version = {version}
    {more}
    @acceptlib.rule
    def accept(target_prob):
        {body}

@acceptlib.hookimpl
def {hook}():
    return [Bad]
"""


DEMANDING = """
    class Options(acceptlib.Options):
        strictness: float
"""


def strategy(name: str, **parts: object) -> str:
    """Return the module of a plugin, sound but for what is given."""
    sound = {
        "guarantee": "lossy",
        "version": 1,
        "body": "return target_prob",
        "hook": "acceptlib_strategies",
        "more": "",
    }
    return STRATEGY.format(name=name, **{**sound, **parts})


BROKEN = {
    "import": ("import no_such_module", "raised ModuleNotFoundError: No module named 'no_such_module'"),
    "taken": (strategy("rejection"), "the name 'rejection' is taken by acceptlib "),
    "version": (strategy("version", version=99), "'version' was written for interface version 99; this acceptlib has "),
    "misspelt": (strategy("misspelt", hook="acceptlib_strategy"), "unknown hook 'acceptlib_strategy'. Did you mean"),
    "traits": (strategy("traits", guarantee="loseless"), "expected 'lossless' or 'greedy' or 'lossy', got 'loseless'"),
    "raising": (strategy("raising", body="raise RuntimeError('in a rule')"), ""),
    "demanding": (strategy("demanding", more=DEMANDING), ""),
}
"""Name -> module, and what `acceptlib plugins` says of it; nothing of what shows only when it is made or run."""

FAILURES = {
    "raising": "RuntimeError: in a rule",
    "demanding": "OptionError: Strategy 'demanding' needs option 'strictness', which has no default. "
    "See `acceptlib show demanding`.",
}
"""What is said of it then."""

Python = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Python:
    """Return a function that runs Python in an environment with all these packages."""
    folder = tmp_path_factory.mktemp("packages")
    sources = [ROOT / "plugins" / f"acceptlib-{name}" for name in OURS]
    for name, (module, _) in BROKEN.items():
        source = folder / f"bad-{name}"
        source.mkdir()
        (source / "pyproject.toml").write_text(PYPROJECT.format(name=name), encoding="utf-8")
        (source / f"bad_{name}.py").write_text(module, encoding="utf-8")
        sources.append(source)
    site = folder / "site"
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check"]
    subprocess.run(  # noqa: S603 - our own packages
        [sys.executable, "-m", "pip", "install", *options, "--target", site, *sources], check=True
    )

    def run(*arguments: str, code: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(site), str(ROOT))), **variables}
        done = subprocess.run(  # noqa: S603 - ourselves
            [sys.executable, *arguments], capture_output=True, text=True, env=environment, cwd=folder, check=False
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done

    return run


def test_plugins_names_every_problem(python: Python) -> None:
    records = json.loads(python("-m", "acceptlib", "plugins", "--format", "json").stdout)
    problems = {record["entry_point"]: record["problems"] for record in records}
    assert problems.keys() == {"acceptlib", *OURS, *BROKEN}
    for name in ("acceptlib", *OURS, *FAILURES):
        assert problems[name] == []
    for name, (_, said) in BROKEN.items():
        assert said in " ".join(problems[name])
        assert len(problems[name]) == (1 if said else 0)


def test_list_and_compare_go_on_without_the_broken(python: Python) -> None:
    """Every strategy that loaded is listed and compared; the rule that raises costs its own row."""
    listed = json.loads(python("-m", "acceptlib", "list", "--format", "json").stdout)
    assert sorted(row["name"] for row in listed) == sorted([*BUILT_IN, *OURS, *FAILURES])
    origins = {"acceptlib", *(f"bad-{name}" for name in FAILURES), *(f"acceptlib-{name}" for name in OURS)}
    assert {row["origin"].split()[0] for row in listed} == origins
    tiny = ["--prompts", "1", "--max-new-tokens", "8", "--num-draft-tokens", "2", "--format", "json", "--quiet"]
    rows = json.loads(python("-m", "acceptlib", "compare", *tiny, code=1).stdout)["rows"]
    errors = {row["strategy"]: row["error"] for row in rows}
    assert errors == {**dict.fromkeys([*BUILT_IN, *OURS]), **FAILURES}
    assert all(row["tv"] is not None for row in rows if row["strategy"] not in FAILURES)


def test_check_goes_on_without_the_broken(python: Python) -> None:
    rows = json.loads(python("-m", "acceptlib", "check", "--only", "counts", "--format", "json", "-q", code=1).stdout)
    found = {row["strategy"]: (row["check"], row["status"], row["message"]) for row in rows}
    assert found.pop("demanding") == ("creation", "failed", FAILURES["demanding"])
    assert found.pop("raising") == ("counts", "failed", f"accept raised {FAILURES['raising']}")
    assert found == dict.fromkeys([*BUILT_IN, *OURS], ("counts", "passed", ""))


ASK = """
import json, sys, acceptlib
said = {}
for name in sys.argv[1:]:
    try:
        said[name] = repr(acceptlib.create(name))
    except acceptlib.AcceptlibError as error:
        said[name] = f"{type(error).__name__}: {error}"
print(json.dumps(said))
"""


def test_error_by_name_gives_the_reason(python: Python) -> None:
    """Asked for by name, a broken package's own problem is in the message; others can still be created."""
    said = json.loads(python("-c", ASK, *BROKEN, *OURS, "rejection").stdout)
    for name in ("import", "version", "misspelt", "traits"):
        assert said[name].startswith(f"UnknownStrategyError: Unknown strategy {name!r}.")
        assert f"bad-{name} 1.0: " in said[name]
        assert BROKEN[name][1] in said[name]
    assert said["demanding"] == FAILURES["demanding"]
    for name in (*OURS, "rejection", "raising"):
        assert said[name].startswith(f"acceptlib.create({name!r}")


def test_third_parties_can_be_turned_off(python: Python) -> None:
    """By a variable for a whole process, by a key for one config."""
    off = python("-m", "acceptlib", "list", "--format", "json", ACCEPTLIB_DISABLE_PLUGINS="1")
    assert [row["name"] for row in json.loads(off.stdout) if row["name"] not in BUILT_IN] == []
    config = "import acceptlib; acceptlib.from_config({'strategy': 'cactus', 'plugins': False})"
    assert "UnknownStrategyError: Unknown strategy 'cactus'." in python("-c", config, code=1).stderr


@pytest.mark.parametrize("name", OURS)
def test_ours_use_the_public_interface_alone(name: str) -> None:
    """One module, one hook; of acceptlib nothing but the top of the package and what is documented beside it."""
    folder = ROOT / "plugins" / f"acceptlib-{name}"
    (module,) = folder.glob("*.py")
    assert len(re.findall(r"^@acceptlib\.hookimpl$", module.read_text(encoding="utf-8"), re.MULTILINE)) == 1
    allowed = {"acceptlib": acceptlib.__all__, "acceptlib.ops": ["Value"], "acceptlib.testing": ["StrategyConformance"]}
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "acceptlib":
                imported = {alias.name for alias in node.names}
                assert imported <= {*allowed.get(node.module or "", ()), *(["exact"] if "tests" in file.parts else [])}
            if isinstance(node, ast.Import):
                assert not [alias.name for alias in node.names if alias.name.startswith("acceptlib.")]
