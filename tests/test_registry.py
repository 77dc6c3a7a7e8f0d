"""Names, aliases and plugins: what loads, what is reported, and that nothing broken breaks the rest."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import acceptlib
from acceptlib import registry
from acceptlib.cli.options import strategy_of
from acceptlib.errors import ConfigError, OptionError, UnknownStrategyError
from acceptlib.plugins import DISABLE_VARIABLE, Plugin, discover

BUILT_IN = ["block", "fly", "greedy", "lenience", "mixture", "rejection", "synthetic", "typical"]

HEADER = """
import acceptlib
from acceptlib import AcceptanceStrategy, Traits, rule

class Coin(AcceptanceStrategy):
    name = {name!r}
    aliases = {aliases!r}
    traits = Traits(guarantee="lossy", bound="none")
    interface_version = {version}

    @rule
    def accept(target_prob):
        return target_prob
"""

HOOK = """
@acceptlib.hookimpl
def acceptlib_strategies():
    return [Coin]
"""


def source(name: str, *, aliases: tuple[str, ...] = (), version: int = 1, hook: str = HOOK) -> str:
    """Return the module of a plugin that brings one strategy."""
    return HEADER.format(name=name, aliases=aliases, version=version) + hook


Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Return a function that installs a package: a module and the metadata that pip would write beside it."""
    monkeypatch.delenv(DISABLE_VARIABLE, raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    modules: list[str] = []

    def write(distribution: str, text: str, *, version: str = "1.2", entry: str | None = None) -> None:
        module = distribution.replace("-", "_")
        modules.append(module)
        (tmp_path / f"{module}.py").write_text(text, encoding="utf-8")
        info = tmp_path / f"{module}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[acceptlib]\n{distribution} = {entry or module}\n")
        registry._load.cache_clear()

    registry._load.cache_clear()
    yield write
    for module in modules:
        sys.modules.pop(module, None)
    registry._load.cache_clear()


def test_threads_that_ask_first_load_packages_once(install: Install) -> None:
    """Each would redirect what packages print, and one would put the other's redirection back."""
    install("slow", "import time\nimported = time.sleep(0.2)\n")
    before, calls = sys.stdout, []
    with mock.patch.object(registry.plugins, "discover", side_effect=registry.plugins.discover) as discover:
        threads = [threading.Thread(target=lambda: calls.append(acceptlib.create("rejection"))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sys.stdout is before
    assert len(calls) == 4
    assert discover.call_count == 1


def test_a_message_is_no_longer_than_a_line_or_two() -> None:
    """Config files are data, of any size: in YAML a few hundred bytes can stand for gigabytes."""
    bomb: object = "lol"
    for _ in range(40):
        bomb = [bomb] * 9
    long, number = "x" * 5_000_000, 1 << 100_000  # which Python refuses to write
    for config in (
        {"strategy": bomb},
        {"strategy": long},
        {"strategy": number},
        {"strategy": "block", "backend": bomb},
        {"strategy": "block", long: 1},
        {"strategy": "block", "options": {long: 1}},
        {"strategy": "block", "options": {f"option{index}": 1 for index in range(10_000)}},
        {"strategy": "block", "options": {number: 1}},
        {"strategy": [["x" * 80] * 6] * 6},
        *({"strategy": "fly", "options": {"fly_window": value}} for value in (bomb, long, -number)),
        {"strategy": "synthetic", "options": {"synthetic_acceptance_rates": bomb}},
        {"strategy": "synthetic", "options": {"synthetic_acceptance_rates": [0.1, *[0.2] * 100_000]}},
        {"strategy": "synthetic", "options": {"synthetic_acceptance_rates": [2] * 10_000}},
        {"acceptance": {long: bomb}, "strategy": "fly", **{f"key{index}": 1 for index in range(10_000)}},
        bomb,
    ):
        with pytest.raises(ConfigError) as caught:
            acceptlib.from_config(config)  # type: ignore[arg-type]
        assert len(str(caught.value)) < 2000
    for refuse in (acceptlib.create, registry.as_strategy, lambda value: acceptlib.create("block", backend=value)):
        with pytest.raises(acceptlib.AcceptlibError) as refused:
            refuse(bomb)  # type: ignore[arg-type]
        assert len(str(refused.value)) < 1000


ALIASES = "a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol]\n" + "".join(
    f"a{depth}: &a{depth} [{', '.join([f'*a{depth - 1}'] * 9)}]\n" for depth in range(1, 10)
)


@pytest.mark.parametrize(
    "table", ["strategy: *a9", "{strategy: fly, options: {fly_window: *a9}}", "*a9"], ids=["key", "option", "table"]
)
def test_a_file_that_stands_for_gigabytes(tmp_path: Path, table: str) -> None:
    """The command line reads it too, and adds options of its own."""
    path = tmp_path / "a.yaml"
    path.write_text(f"{ALIASES}acceptance:\n  {table}\n", encoding="utf-8")
    for refuse in (acceptlib.from_config, lambda path: strategy_of(None, path, ["fly_entropy_top_k=2"])):
        with pytest.raises(ConfigError) as caught:
            refuse(path)
        assert len(str(caught.value)) < 1000


def test_keys_of_a_file_that_is_no_config_are_shortened(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(f"? {'x' * 100_000}\n: 1\n? 0x{'f' * 100_000}\n: 2\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="expected a table 'acceptance'") as caught:
        acceptlib.from_config(path)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("said", ["no", "false", 0])
def test_plugins_are_on_or_off(said: object) -> None:
    """A word would be taken for true."""
    with pytest.raises(ConfigError, match="key 'plugins': Input should be a valid boolean"):
        acceptlib.from_config({"strategy": "block", "plugins": said})


def test_what_is_turned_off_is_said() -> None:
    with pytest.raises(UnknownStrategyError, match="Those of installed packages are turned off"):
        acceptlib.from_config({"strategy": "demo", "plugins": False})


def loaded(distribution: str) -> Plugin:
    """Return the record of one distribution."""
    return next(plugin for plugin in registry.loaded_plugins() if plugin.distribution == distribution)


def check_others_work(*names: str) -> None:
    """Assert that the built-ins, and `names`, are there and can be created."""
    assert acceptlib.available() == sorted(acceptlib.available())
    for name in (*BUILT_IN, *names):
        assert name in acceptlib.available()
        assert acceptlib.create(name).name == name


# Built-ins


def test_built_ins_come_through_the_hook() -> None:
    (built_in,) = discover(())
    assert built_in.name == "acceptlib"
    assert built_in.distribution == f"acceptlib {metadata.version('acceptlib')}"
    assert sorted(strategy.name for strategy in built_in.strategies) == BUILT_IN
    assert built_in.problems == ()


def test_available_is_sorted_and_holds_no_alias(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DISABLE_VARIABLE, "1")
    assert acceptlib.available() == BUILT_IN
    monkeypatch.delenv(DISABLE_VARIABLE)
    install("zz-coin", source("aaa-coin", aliases=("penny",)))
    names = acceptlib.available()
    assert names == sorted(names)
    assert "aaa-coin" in names
    assert "penny" not in names


@pytest.mark.parametrize(
    ("alias", "name"), [("speculative", "rejection"), ("standard", "rejection"), ("ensemble", "mixture")]
)
def test_alias_creates_the_same_strategy(alias: str, name: str) -> None:
    assert type(acceptlib.create(alias)) is type(acceptlib.create(name))
    assert registry.find(alias).strategy is registry.find(name).strategy


def test_create_binds_options_and_shows_them() -> None:
    strategy = acceptlib.create("lenience", lenience=0.5, backend="torch")
    assert strategy.backend == "torch"
    assert strategy.options.model_dump() == {"lenience": 0.5}
    assert repr(strategy) == "acceptlib.create('lenience', lenience=0.5, backend='torch')"


def test_unknown_name_suggests_and_lists() -> None:
    with pytest.raises(UnknownStrategyError) as caught:
        acceptlib.create("rejecton")
    message = str(caught.value)
    assert message.startswith("Unknown strategy 'rejecton'. Did you mean 'rejection'? Available: ")
    assert ", ".join(BUILT_IN[:3]) in message
    assert isinstance(caught.value, ConfigError)
    assert isinstance(caught.value, LookupError)


@pytest.mark.parametrize("name", [None, 5, ["rejection"], acceptlib.AcceptanceStrategy])
def test_what_is_no_name(name: Any) -> None:
    with pytest.raises(UnknownStrategyError, match="expected the name of a strategy, a str, got"):
        acceptlib.create(name)


def test_unknown_name_far_from_all_suggests_nothing() -> None:
    with pytest.raises(UnknownStrategyError) as caught:
        acceptlib.create("qqq")
    assert "Did you mean" not in str(caught.value)


def test_misspelt_alias_is_suggested() -> None:
    with pytest.raises(UnknownStrategyError, match="Did you mean 'speculative'"):
        acceptlib.create("speculativ")


@pytest.mark.parametrize(
    ("name", "options", "fragments"),
    [
        (
            "typical",
            {"posterior_treshold": 0.1},
            ["no option 'posterior_treshold'", "Did you mean 'posterior_threshold'"],
        ),
        ("rejection", {"lenience": 0.1}, ["no option 'lenience'", "It has none."]),
        ("lenience", {"lenience": 0.0}, ["'lenience', option 'lenience'", "got 0.0", "greater than 0"]),
        ("typical", {"recovery": "best"}, ["option 'recovery'", "got 'best'", "'argmax' or 'sample'"]),
        ("synthetic", {"synthetic_acceptance_rates": [0.2, 0.5]}, ["must not increase, got [0.2, 0.5]"]),
        (
            "synthetic",
            {"synthetic_acceptance_rates": [0.5], "synthetic_acceptance_length": 2},
            ["exclude each other"],
        ),
        ("fly", {"fly_window": 0, "fly_entropy_top_k": 1.5}, ["option 'fly_window'", "option 'fly_entropy_top_k'"]),
        ("fly", {"fly_window": 2**63}, ["option 'fly_window'", "got 9223372036854775808", "equal to 1000000"]),
        ("fly", {"fly_entropy_top_k": 2**63}, ["option 'fly_entropy_top_k'", "equal to 1000000"]),
        ("lenience", {"lenience": float("nan")}, ["option 'lenience'", "nan"]),
        ("lenience", {"lenience": "abc"}, ["option 'lenience': got 'abc'. Expected a number, not a text."]),
        ("rejection", {"self": 1}, ["no option 'self'"]),
    ],
)
def test_option_error(name: str, options: dict[str, object], fragments: list[str]) -> None:
    with pytest.raises(OptionError) as caught:
        acceptlib.create(name, **options)
    for fragment in (*fragments, f"See `acceptlib show {name}`."):
        assert fragment in str(caught.value)


def test_an_option_of_a_class_that_has_no_name_in_the_registry_says_nothing_of_commands() -> None:
    class Unlisted(type(acceptlib.create("lenience"))):  # type: ignore[misc]
        name = "unlisted"

    with pytest.raises(OptionError, match=r"^Strategy 'unlisted', option 'lenience': got 0\. [^`]*$"):
        Unlisted(lenience=0)


# Plugins


@pytest.mark.parametrize("raised", ["SystemExit", "GeneratorExit"])
def test_a_hook_that_exits_is_reported_and_harms_nobody(install: Install, raised: str) -> None:
    hook = f"@acceptlib.hookimpl\ndef acceptlib_strategies():\n    raise {raised}('no licence')\n"
    install("bad-coin", source("bad-coin", hook=hook))
    install("good-coin", source("good-coin"))
    check_others_work("good-coin")
    assert loaded("bad-coin 1.2").problems == (f"its hook raised {raised}: no licence",)


def test_no_name_of_a_package_takes_a_built_in_s_alias(install: Install) -> None:
    install("taking-coin", source("speculative"))
    check_others_work()
    assert registry.find("speculative").distribution.startswith("acceptlib ")
    (problem,) = loaded("taking-coin 1.2").problems
    assert problem.startswith("the name 'speculative' is taken by acceptlib ")


def test_one_class_of_two_entry_points_is_one_strategy(install: Install) -> None:
    """As where a package is split, and the old one hands on what the new one has."""
    install("good-coin", source("good-coin", aliases=("penny",)))
    install("old-coin", "import acceptlib\nfrom good_coin import Coin\n" + HOOK)
    check_others_work("good-coin")
    assert acceptlib.create("penny").name == "good-coin"
    for distribution in ("good-coin 1.2", "old-coin 1.2"):
        assert loaded(distribution).problems == ()


def test_entry_points_of_one_name_are_loaded_in_one_order() -> None:
    """Whichever the installed ones come in, so that messages are the same."""
    entries = [metadata.EntryPoint(name="twin", value=f"no_such_module_{letter}", group="acceptlib") for letter in "ab"]
    for given in (entries, entries[::-1]):
        _, *found = discover(given)
        assert ["_a'" in plugin.problems[0] for plugin in found] == [True, False]


def test_what_a_package_raises_on_several_lines_is_said_on_one(install: Install) -> None:
    install("bad-coin", "raise RuntimeError('no\\n  licence')")
    assert loaded("bad-coin 1.2").problems == ("importing 'bad_coin' raised RuntimeError: no licence",)
