"""What is published: wheel and sdist have what they need, and the wheel works without the repository."""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def call(*command: str, cwd: Path, **environment: str) -> str:
    done = subprocess.run(  # noqa: S603 - this package and its builder
        command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wheel and sdist of the working tree; the wheel is built from the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    call(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), cwd=ROOT)
    return folder


def test_wheel(dist: Path) -> None:
    (path,) = dist.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        names = set(wheel.namelist())
        (metadata,) = (email.message_from_bytes(wheel.read(name)) for name in names if name.endswith("/METADATA"))
    sources = {str(file.relative_to(ROOT)) for file in (ROOT / "acceptlib").glob("**/*") if file.is_file()}
    wanted = {name for name in sources if "__pycache__" not in name and ".checkpoints" not in name}
    assert {name for name in names if name.startswith("acceptlib/")} == wanted
    assert {"acceptlib/py.typed", "acceptlib/demo/target/model.safetensors", "acceptlib/demo/prompts.json"} <= names
    assert not {name.partition("/")[0] for name in names} & {"tests", "bench", "docs"}
    for licence in ("LICENSE", "acceptlib/demo/LICENSE-PSF.txt"):
        assert any(name.endswith(f".dist-info/licenses/{licence}") for name in names)
    assert metadata["License-Expression"] == "Apache-2.0 AND PSF-2.0"
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])
    assert metadata["Version"] in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_sdist_can_test_itself(dist: Path) -> None:
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    wanted = {"tests/test_docs.py", "bench/render.py", "docs/hooks.py", "mkdocs.yml", "Makefile", "constraints.txt"}
    assert wanted | {"README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"} <= names


def test_wheel_works_alone(dist: Path, tmp_path: Path) -> None:
    """Installed by itself, it compares and knows its version, from a folder that is not the repository."""
    (path,) = dist.glob("*.whl")
    place = tmp_path / "place"
    install = ("pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(place), str(path))
    call(sys.executable, "-m", *install, cwd=tmp_path)
    alone = {"PYTHONPATH": str(place), "ACCEPTLIB_DISABLE_PLUGINS": "1"}
    where = call(sys.executable, "-c", "import acceptlib; print(acceptlib.__file__)", cwd=tmp_path, **alone)
    assert Path(where.strip()).is_relative_to(place)
    version = call(sys.executable, "-m", "acceptlib", "--version", cwd=tmp_path, **alone)
    assert re.fullmatch(r"acceptlib \d+\.\d+\.\d+\S*\n", version)
    text = call(
        sys.executable, "-m", "acceptlib", "compare", "--strategies", "rejection,block", "--prompts", "2",
        "--max-new-tokens", "8", "--num-draft-tokens", "2", "--format", "csv", cwd=tmp_path, **alone,
    )  # fmt: skip
    assert [line.partition(",")[0] for line in text.splitlines()] == ["strategy", "rejection", "block"]
