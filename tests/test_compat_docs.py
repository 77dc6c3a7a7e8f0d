"""The drop-ins' pages: their code runs, and every new import they show exists."""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest

from acceptlib import compat

PAGES = sorted((Path(__file__).parent.parent / "docs" / "compat").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_runs(page: Path) -> None:
    """Every block in order, as one program; of a change, what is imported after it."""
    namespace: dict[str, Any] = {"__name__": page.stem}
    for language, block in re.findall(
        r"^```(python|diff)\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL
    ):
        code = block if language == "python" else "\n".join(re.findall(r"^\+(from .*)$", block, re.MULTILINE))
        exec(compile(code, str(page), "exec"), namespace)  # noqa: S102 - the page's own code


def test_every_drop_in_has_a_page() -> None:
    modules = {module.name for module in pkgutil.iter_modules(compat.__path__) if not module.name.startswith("_")}
    assert {page.stem for page in PAGES} == modules
