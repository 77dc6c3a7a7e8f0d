"""What the pages say: code in them runs, what exists is documented, and their numbers are those of records."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import typer
import yaml
from typer.testing import CliRunner

import acceptlib
from acceptlib import config, hookspecs, registry
from acceptlib.benchmarks.peers import PEERS
from acceptlib.cli import comparison
from acceptlib.cli.app import app
from acceptlib.config import AcceptanceConfig
from acceptlib.rules import ELEMENTS, SCALARS

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("**/*.md"))]
RUN_ELSEWHERE = {"write-a-strategy.md": "test_write_a_strategy.py"}
"""Pages whose code needs an environment of its own, and the tests that run it there."""
COMMANDS: Any = typer.main.get_command(app)
BUILT_IN = [name for name in acceptlib.available() if registry.find(name).distribution.startswith("acceptlib ")]


def module(path: Path) -> ModuleType:
    """Return a script as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = loaded
    spec.loader.exec_module(loaded)
    return loaded


HOOKS = module(DOCS / "hooks.py")
RENDER = module(ROOT / "bench" / "render.py")


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    code: str
    line: int
    runs: bool


def blocks(path: Path) -> Iterator[Block]:
    """Return the blocks of a page; `<!-- not run: REASON -->` before one keeps it from running."""
    text = path.read_text(encoding="utf-8")
    for match in re.finditer(r"(<!-- not run: \S.* -->\n)?^```(\w+)[^\n]*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        line = text.count("\n", 0, match.start(3)) + 1
        yield Block(match[2], match[3], line, match[1] is None)


def run_python(block: Block, page: Path, namespace: dict[str, Any]) -> None:
    # Blank lines before it, so that a traceback names the page's line.
    code = compile("\n" * (block.line - 1) + block.code, str(page), "exec")
    if block.runs:
        exec(code, namespace)  # noqa: S102 - the page's own code


def run_console(block: Block) -> None:
    """Run the package's own commands; of the others, check that there is such a thing."""
    for line in block.code.splitlines():
        program, *arguments = shlex.split(line, comments=True)
        if program == "make":
            assert re.search(rf"^{arguments[0]}:", read("Makefile"), re.MULTILINE), f"no make {arguments[0]}"
        elif program == "acceptlib" and block.runs:
            result = CliRunner().invoke(app, arguments)
            assert result.exit_code == 0, result.output
        elif program == "acceptlib":
            known = {flag for parameter in COMMANDS.commands[arguments[0]].params for flag in parameter.opts}
            assert {part for part in arguments if part.startswith("-")} <= known


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in RUN_ELSEWHERE], ids=lambda page: page.name)
def test_code_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page's blocks one after the other, in one namespace and in a folder with the files that it shows."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "page"}
    for block in blocks(page):
        name = re.match(r"# (\S+\.\w+)\n", block.code)
        if name is not None:
            target = tmp_path / name[1]
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(block.code, encoding="utf-8")
        if block.language == "python":
            run_python(block, page, namespace)
        elif block.language == "console":
            run_console(block)
        elif block.language == "toml" and "[acceptance]" in block.code:
            config.from_config(tmp_path / name[1] if name else {})


def test_pages_run_elsewhere_are_run() -> None:
    here = [page.name for page in PAGES if page.name in RUN_ELSEWHERE]
    assert [name for name in here if name not in read(f"tests/{RUN_ELSEWHERE[name]}")] == []


def test_runner_fails_what_is_wrong(tmp_path: Path) -> None:
    """The runner finds blocks, names their line, and does not skip what it cannot run."""
    page = tmp_path / "page.md"
    page.write_text("text\n\n```python\n1 / 0\n```\n\n<!-- not run: why -->\n```python\n1 / 0\n```\n", encoding="utf-8")
    first, second = blocks(page)
    assert (first.line, first.runs, second.runs) == (4, True, False)
    with pytest.raises(ZeroDivisionError):
        run_python(first, page, {})
    run_python(second, page, {})
    with pytest.raises(SyntaxError):
        run_python(second._replace(code="1 /"), page, {})
    for wrong in ("make nothing", "acceptlib list --formt json"):
        with pytest.raises(AssertionError):
            run_console(Block("console", wrong, 1, runs=True))
    with pytest.raises(AssertionError):
        run_console(Block("console", "acceptlib bench --shape 1x3", 1, runs=False))


# What exists is documented


@pytest.mark.parametrize("page", ["README.md", "docs/choose.md"])
def test_every_strategy_is_in_the_tables(page: str) -> None:
    text = read(page)
    named = set(re.findall(r"^\| `([\w-]+)` \|", text, re.MULTILINE)) | set(
        re.findall(r"strategies/([\w-]+)\.md", text)
    )
    assert named >= {*BUILT_IN}


@pytest.mark.parametrize("name", BUILT_IN)
def test_strategy_page_says_everything(name: str) -> None:
    """Guarantee, formula, source and every option, from the docstring; the exact figures, from its law."""
    page = HOOKS.strategy_page(name)
    for heading in ("## Guarantee", "## Formula", "## Source", "## Options", "## Worked example"):
        assert heading in page
    cls = registry.find(name).strategy
    assert all(f"`{option}`" in page for option in cls.Options.model_fields)
    assert all(field.description for field in cls.Options.model_fields.values())
    text = page.split("??? example")[0]
    assert not re.search(r"_\{|`[^`\n]*\\\|[^`\n]*`|VLLM", text)  # every index set, every bar and name as it is
    first = HOOKS.first_token(cls())
    assert sum(first) == pytest.approx(1, abs=1e-12)
    if cls.traits.guarantee == "lossless":
        assert first == pytest.approx(HOOKS.TARGET[0].tolist(), abs=1e-12)
        assert re.search(r"total variation from the target, three tokens \| 0 \| 0 \|", page)


def test_every_public_name_is_in_the_reference() -> None:
    """Modules with names of their own are shown whole; of `acceptlib.errors`, the docstring lists them all."""
    entries = re.findall(r"^::: ([\w.]+)\n((?: +.*\n)*)", read("docs/api.md"), re.MULTILINE)
    named = {name for name, _ in entries} | {"acceptlib.ops"}
    assert named >= {f"acceptlib.{name}" for name in acceptlib.__all__}
    assert [name for name, options in entries if "members:" in options] == ["acceptlib.errors"]
    drop_ins = {f"acceptlib.compat.{path.stem}" for path in (ROOT / "acceptlib" / "compat").glob("[a-z]*.py")}
    assert named >= {"acceptlib.exact", "acceptlib.testing", "acceptlib.integrations.transformers"} | drop_ins


def test_every_command_and_option_is_documented() -> None:
    page = HOOKS.command_page()
    for heading, command in [("# Command line", COMMANDS)] + [
        (f"## acceptlib {name}", command) for name, command in COMMANDS.commands.items()
    ]:
        section = page.split(f"{heading}\n")[1].split("\n## ")[0]
        assert command.help in section
        for parameter in command.params:
            assert parameter.help
            assert all(flag in section for flag in parameter.opts if flag.startswith("-"))
    peers = next(parameter for parameter in COMMANDS.commands["bench"].params if parameter.name == "peers")
    assert all(name in peers.help for name in PEERS)


def test_every_field_of_a_comparison_is_documented() -> None:
    section = read("docs/choose.md").split("<!-- fields -->")[1].split("<!-- /fields -->")[0]
    cells = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    assert re.findall(r"`(\w+)`", " ".join(cells)) == [field.name for field in fields(comparison.Row)]


def test_every_hook_and_quantity_is_documented() -> None:
    page = HOOKS.rules_page()
    hooks = [name for name in vars(hookspecs) if name.startswith("acceptlib_")]
    assert hooks
    for name in (*hooks, *SCALARS, *ELEMENTS):
        assert f"`{name}" in page
    assert all(SCALARS.values())
    assert all(ELEMENTS.values())


def test_every_key_and_variable_is_documented() -> None:
    page = read("docs/configuration.md")
    assert all(f"| `{key}` |" in page for key in AcceptanceConfig.model_fields)
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "acceptlib").glob("**/*.py"))
    variables = set(re.findall(r"\"(ACCEPTLIB_[A-Z_]+)\"", sources))
    assert variables
    assert all(f"| `{variable}` |" in page for variable in variables)


def test_every_make_target_is_documented() -> None:
    targets = re.search(r"^\.PHONY: (.*)$", read("Makefile"), re.MULTILINE)
    assert targets
    pages = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert [target for target in targets[1].split() if f"make {target}" not in pages] == []


def test_navigation_is_whole() -> None:
    """Every page is in the navigation once, and every entry exists."""
    text = re.sub(r"!!python/\S+", "", read("mkdocs.yml"))
    waiting, entries = [yaml.safe_load(text)["nav"]], []
    while waiting:
        entry = waiting.pop()
        if isinstance(entry, str):
            entries.append(entry)
        else:
            waiting += entry.values() if isinstance(entry, dict) else entry
    written = {str(path.relative_to(DOCS)) for path in DOCS.glob("**/*.md")}
    generated = {path for path in HOOKS.pages() if not path.startswith("strategies/")} | {"strategies"}
    assert sorted(entries) == sorted(written | generated)


def test_a_broken_link_fails_the_build(tmp_path: Path) -> None:
    """`make docs` counts warnings: `--quiet`, for one, would keep `--strict` from seeing any."""
    recipe = re.search(r"mkdocs (build .*)$", read("Makefile"), re.MULTILINE)
    assert recipe
    validation = yaml.safe_load(re.sub(r"!!python/\S+", "", read("mkdocs.yml")))["validation"]
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump({"site_name": "x", "validation": validation}), encoding="utf-8")
    (tmp_path / "docs").mkdir()
    for text, code in (("text", 0), ("[a](missing.md)", 1), ("[a](folder)", 1), ("[a](#missing)", 1)):
        (tmp_path / "docs" / "index.md").write_text(text, encoding="utf-8")
        done = subprocess.run(  # noqa: S603 - the recipe's own words
            [sys.executable, "-m", "mkdocs", *shlex.split(recipe[1])],
            cwd=tmp_path, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == code, f"{text}\n{done.stderr}"


def test_design_page_names_the_rules() -> None:
    page = read("docs/design.md")
    for name in ("accept", "residual", "carry", "forgive", "row_sum", "SCALARS", "ELEMENTS"):
        assert name in page


# Numbers and figures are those of records


@pytest.mark.parametrize("page", RENDER.PAGES, ids=lambda page: page.name)
def test_pages_show_the_records(page: Path) -> None:
    """`python bench/render.py` would change nothing."""
    text = page.read_text(encoding="utf-8")
    assert RENDER.MARKED.search(text)
    assert RENDER.page(text) == text


@pytest.mark.parametrize("path", sorted(RENDER.RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_record_names_its_origin(path: Path) -> None:
    """Machine, versions and commit; of committed code."""
    record = json.loads(path.read_text(encoding="utf-8"))
    assert record["machine"]
    assert record["torch"]
    assert re.fullmatch(r"[0-9a-f]{40}", record["commit"])


def test_every_record_is_shown() -> None:
    found = (match for page in RENDER.PAGES for match in RENDER.MARKED.finditer(page.read_text(encoding="utf-8")))
    shown = {match[3] for match in found if match[2] == "record"}
    assert shown >= {path.stem for path in RENDER.RESULTS.glob("*.json")}


def test_comparison_has_every_strategy() -> None:
    assert set(re.findall(r"^\| ([\w-]+) ", RENDER.of_file("compare", "record"), re.MULTILINE)) - {"strategy"} == {
        *BUILT_IN
    }


def test_a_note_stays_where_runs_are_added(tmp_path: Path) -> None:
    """And the runs before, as long as machine, versions and commit are the same."""
    ratios = module(ROOT / "bench" / "ratios.py")
    path = tmp_path / "r.json"
    ratios.add_to(path, [ratios.Figure("a", "at most 4", 3.0)])
    record = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**record, "note": "By hand."}), encoding="utf-8")
    ratios.add_to(path, [ratios.Figure("a", "at most 4", 2.0)])
    record = json.loads(path.read_text(encoding="utf-8"))
    assert record["note"] == "By hand."
    assert record["ratios"][0]["runs"] == [3.0, 2.0]


def test_a_summary_says_what_is_missed() -> None:
    common = {"B": 8, "K": 3, "name": "rejection"}
    rows = [
        {**common, "path": "probabilities", "microseconds": 10.0, "goal": 6},
        {**common, "path": "probabilities", "microseconds": 50.0, "name": "FlashInfer", "peer": True},
        {**common, "path": "masked", "microseconds": 11.0, "beside": "probabilities", "most": 1.15},
    ]
    text = RENDER.summary({"machine": "GPU", "commit": "0123456789abcdef", "rows": rows})
    assert "GPU, commit `0123456789ab`: 1 of 2 goals reached" in text
    assert "| probabilities | speed of FlashInfer | **5.00** |" in text
    assert "| masked | time of probabilities, at most 1.15 | 1.10 |" in text


def test_rendering() -> None:
    """Peers become columns beside the strategies of their path and batch; a wrong result is never shown."""
    common = {"path": "probabilities", "B": 8, "K": 3, "vocab_size": 1000, "dtype": "float32"}
    rows = [
        {**common, "name": "rejection", "microseconds": 10.0, "read_floor": 4.0, "mean_emitted": 2.0, "match": True}
        | {"goal": 6},
        {**common, "name": "block", "microseconds": 20.0, "read_floor": 5.0, "mean_emitted": 2.1, "match": True},
        {**common, "name": "FlashInfer chain", "microseconds": 50.0, "peer": True},
        {**common, "path": "logits", "B": 1, "name": "rejection", "microseconds": 30.0, "match": True},
        {**common, "path": "masked", "name": "rejection", "microseconds": 12.0, "match": True}
        | {"beside": "probabilities", "most": 1.15},
    ]
    text = RENDER.section(
        "x", {"machine": "GPU", "torch": "2", "driver": "5", "commit": "0123456789abcdef", "rows": rows}
    )
    assert "GPU; torch 2, driver 5; commit `0123456789ab`" in text
    assert "| B, K | strategy | tau | us | times floor | FlashInfer chain us | times ours | goal |" in text
    assert "| 8, 3 | `rejection` | 2.00 | 10.0 | 2.50 | 50.0 | 5.00 | 6 |" in text
    assert "| 8, 3 | `block` | 2.10 | 20.0 | 4.00 | 50.0 | 2.50 | - |" in text
    assert "| 1, 3 | 30.0 |\n" in text
    assert "| 8, 3 | 12.0 | 1.20 | 1.15 |" in text
    with pytest.raises(AssertionError, match="wrong results"):
        RENDER.section("x", {"machine": "GPU", "rows": [{**rows[0], "match": False}]})
    ratios = [{"name": "a", "goal": "at most 4", "runs": [3.0, 5.0, 3.5]}]
    text = RENDER.section("x", {"machine": "CPU", "ratios": ratios})
    assert "| a | at most 4 | 3.50 | 3.00 to 5.00, 3 runs |" in text


def test_figures_are_drawn() -> None:
    figures = HOOKS.figures()
    assert {f"figures/law-{name}.svg" for name in BUILT_IN} <= set(figures)
    for path in ("figures/step.svg", "figures/row.svg", "figures/law-block.svg", "figures/compare.svg"):
        assert figures[path]().startswith(b"<?xml")
    records = [
        path for path in figures if path.removeprefix("figures/")[:-4] in {p.stem for p in RENDER.RESULTS.glob("*")}
    ]
    assert all(figures[path]() == figures[path]() for path in records)  # equal records, equal files
