"""`acceptlib new-plugin`: what it writes, and when it writes nothing. That the package works is in test_docs.py."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from unittest import mock

import pytest
from typer.testing import CliRunner

import acceptlib
from acceptlib import registry
from acceptlib.cli import scaffold
from acceptlib.cli.app import app
from acceptlib.errors import PluginError
from acceptlib.strategy import INTERFACE_VERSION

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def new_plugin(*arguments: str, code: int = 0) -> str:
    """Return what the command prints, on stdout or, if it is refused, on stderr."""
    result = CliRunner().invoke(app, ["new-plugin", *arguments])
    assert result.exit_code == code, result.output
    return str(result.stderr if code else result.stdout)


def test_writes_a_package(tmp_path: Path) -> None:
    said = new_plugin("my-rule2", "--path", str(tmp_path))
    folder = tmp_path / "acceptlib-my-rule2"
    assert said == (
        f"Wrote {folder}. The rule is in acceptlib_my_rule2.py. Next:\n\n"
        f"  pip install {folder}\n"
        "  acceptlib check my-rule2\n"
        "  acceptlib compare --strategies rejection,my-rule2\n"
    )
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert files == {
        "pyproject.toml",
        "README.md",
        "acceptlib_my_rule2.py",
        "tests/test_acceptlib_my_rule2.py",
    }
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["name"] == folder.name
    assert project["dependencies"] == [f"acceptlib>={acceptlib.__version__}"]
    assert project["optional-dependencies"] == {"test": ["pytest"]}
    assert project["entry-points"] == {"acceptlib": {"my-rule2": "acceptlib_my_rule2"}}
    code = (folder / "acceptlib_my_rule2.py").read_text(encoding="utf-8")
    assert f"\n    interface_version = {INTERFACE_VERSION}\n" in code
    module = ast.parse(code)
    assert "MyRule2" in [node.name for node in module.body if isinstance(node, ast.ClassDef)]
    assert not [path for path in folder.rglob("*") if "$" in path.name or (path.is_file() and "$" in path.read_text())]


def test_only_the_first_word_must_begin_with_a_letter(tmp_path: Path) -> None:
    new_plugin("my-2nd-rule", "--path", str(tmp_path))
    assert "\nclass My2ndRule(" in (tmp_path / "acceptlib-my-2nd-rule" / "acceptlib_my_2nd_rule.py").read_text()


def test_a_strategy_may_be_called_as_its_test_s_base_class(tmp_path: Path) -> None:
    """Else the test imports two classes by one name, and runs nothing."""
    new_plugin("strategy-conformance", "--path", str(tmp_path))
    (written,) = tmp_path.rglob("test_*.py")
    module = ast.parse(written.read_text(encoding="utf-8"))
    names = [name.name for node in module.body if isinstance(node, ast.ImportFrom) for name in node.names]
    assert names == ["testing", "StrategyConformance"]
    (test,) = (node for node in module.body if isinstance(node, ast.ClassDef))
    assert [ast.unparse(base) for base in test.bases] == ["testing.StrategyConformance"]


def test_suggests_a_path_that_pip_takes_for_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "pip install ./acceptlib-demo\n" in new_plugin("demo")
    (tmp_path / "my dir").mkdir()
    assert "pip install './my dir/acceptlib-demo'\n" in new_plugin("demo", "--path", "my dir")


@pytest.mark.parametrize(("version", "requirement"), [("0.3.1", "acceptlib>=0.3.1"), ("0+unknown", "acceptlib")])
def test_requires_the_version_that_wrote_it_if_it_has_one(
    version: str, requirement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaffold, "__version__", version)
    new_plugin("demo", "--path", str(tmp_path))
    assert f'dependencies = ["{requirement}"]\n' in (tmp_path / "acceptlib-demo" / "pyproject.toml").read_text()


@pytest.mark.parametrize("name", ["Demo", "my_rule", "2fast", "a--b", "-a", "a-", "", "../a", "a b", "é"])
def test_refuses_a_name(name: str, tmp_path: Path) -> None:
    said = new_plugin("--path", str(tmp_path), "--", name, code=2)
    assert said.startswith("Error: NAME: expected lower-case words")
    assert repr(name) in said
    assert not list(tmp_path.iterdir())


def test_refuses_a_name_whose_class_python_would_not_take(tmp_path: Path) -> None:
    said = new_plugin("none", "--path", str(tmp_path), code=2)
    assert said == "Error: NAME: the class of 'none' would be named None, a word of Python: choose another\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["test", "testing-rule", "my-test"])
def test_refuses_a_name_that_pytest_would_take_for_tests(name: str, tmp_path: Path) -> None:
    said = new_plugin(name, "--path", str(tmp_path), code=2)
    assert said.startswith(f"Error: NAME: pytest would take acceptlib_{name.replace('-', '_')}.py or its ")
    assert not list(tmp_path.iterdir())


def test_refuses_a_name_that_is_too_long(tmp_path: Path) -> None:
    for length in (101, 300):
        said = new_plugin("a" * length, "--path", str(tmp_path), code=2)
        assert said == f"Error: NAME: expected at most 100 letters, since files are named after it, got {length}\n"
    assert len(new_plugin("A" * 300, "--path", str(tmp_path), code=2)) < 300
    new_plugin("a" * 100, "--path", str(tmp_path))


def test_refuses_a_folder_that_is_too_long(tmp_path: Path) -> None:
    assert "cannot be written: File name too long" in new_plugin("demo", "--path", str(tmp_path / ("a" * 300)), code=2)


@pytest.mark.parametrize("name", ["rejection", "standard"])
def test_refuses_a_name_that_is_taken(name: str, tmp_path: Path) -> None:
    assert f"has a strategy {name!r} already" in new_plugin(name, "--path", str(tmp_path), code=2)
    assert not list(tmp_path.iterdir())


def test_refuses_a_name_that_a_broken_plugin_has_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "find", mock.Mock(side_effect=PluginError("demo: cannot be loaded")))
    assert new_plugin("demo", "--path", str(tmp_path), code=2) == "Error: demo: cannot be loaded\n"
    assert not list(tmp_path.iterdir())


def test_never_overwrites(tmp_path: Path) -> None:
    (tmp_path / "acceptlib-demo").mkdir()
    (tmp_path / "acceptlib-empty").symlink_to(tmp_path / "nowhere")
    for name in ("demo", "empty"):
        assert "exists already, and nothing was written" in new_plugin(name, "--path", str(tmp_path), code=2)
    assert not list((tmp_path / "acceptlib-demo").iterdir())
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize(
    ("failure", "code", "message"),
    [
        (OSError(28, "No space left on device"), 2, "cannot be written: No space left"),
        (KeyboardInterrupt(), 130, "Error: interrupted\n"),
    ],
    ids=["full-disk", "ctrl-c"],
)
def test_writes_all_or_nothing(
    failure: BaseException, code: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What goes wrong after the first file takes that one with it."""
    write_text, written = Path.write_text, []

    def fail_second(self: Path, *arguments: str, **options: str) -> int:
        written.append(self)
        if len(written) > 1:
            raise failure
        return write_text(self, *arguments, **options)

    monkeypatch.setattr(Path, "write_text", fail_second)
    assert message in new_plugin("demo", "--path", str(tmp_path), code=code)
    assert len(written) == 2
    # Hidden, and in the file system of its place.
    assert all(path.relative_to(tmp_path).parts[0].startswith(".acceptlib-demo.") for path in written)
    assert not list(tmp_path.iterdir())


def test_missing_folder_is_an_error(tmp_path: Path) -> None:
    assert "cannot be written: No such file" in new_plugin("demo", "--path", str(tmp_path / "none"), code=2)


def test_every_template_is_used() -> None:
    folder = Path(scaffold.__file__).parent / "templates"
    assert sorted(path.name for path in folder.iterdir()) == sorted(scaffold.FILES.values())
