"""What the pages say: code in them runs, and what exists is documented."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import acceptlib
from acceptlib.rules import ELEMENTS, SCALARS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("index", range(len(blocks("python"))))
def test_readme_code_runs(index: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block by itself, in a folder that holds the config shown."""
    (tmp_path / "acceptance.toml").write_text(blocks("toml")[0], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    exec(compile(blocks("python")[index], f"README block {index}", "exec"), {"__name__": "readme"})  # noqa: S102


def test_readme_names_every_strategy() -> None:
    table = README.split("## What is in the box")[1]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == acceptlib.available()


def test_readme_shows_the_comparison() -> None:
    shown = README.split("<!-- compare -->")[1].split("<!-- /compare -->")[0]
    assert {row.split("|")[1].strip() for row in shown.splitlines()[3:] if row.startswith("|")} == {
        *acceptlib.available()
    }


def test_design_page_names_the_rules() -> None:
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    for name in ("accept", "residual", "carry", "forgive", "row_sum", "SCALARS", "ELEMENTS"):
        assert name in page
    assert all(SCALARS.values())
    assert all(ELEMENTS.values())


def test_performance_page_shows_the_record() -> None:
    """The GPU table is that of the record beside it."""
    record = json.loads((ROOT / "bench" / "results" / "h200-probs.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    for row in record["rows"]:
        assert row["match"]
        times = f"{row['microseconds']:.1f} | {row['read_floor']:.1f} | {row['ratio']:.1f}"
        assert f"| {row['B']}, {row['K']} | {row['mean_emitted']:.2f} | {times} |" in page
