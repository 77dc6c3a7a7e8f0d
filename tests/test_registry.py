"""Names, aliases and plugins: what loads, what is reported, and that nothing broken breaks the rest."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from cli_support import BUILT_IN
from typer.testing import CliRunner

import acceptlib
from acceptlib import registry
from acceptlib.cli.app import app
from acceptlib.cli.options import strategy_of
from acceptlib.config import json_schema
from acceptlib.errors import ConfigError, OptionError, PluginError, StrategyDefinitionError, UnknownStrategyError
from acceptlib.plugins import DISABLE_VARIABLE, Plugin, discover

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
        ("rejection", {"name": "block"}, ["no option 'name'"]),
        ("ensemble", {"wait": 0.5}, ["no option 'wait'", "Did you mean 'weight'"]),
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


@pytest.mark.parametrize("raised", ["KeyError('x')", "SystemExit(5)"])
def test_what_a_plugin_raises_as_it_is_created_is_said_with_its_package(raised: str, install: Install) -> None:
    text = source("bad-coin", hook="")
    text += f"    def __init__(self, **options):\n        raise {raised}\n" + HOOK
    install("bad-coin", text)
    what = raised.replace("(", ": ").replace(")", "")
    with pytest.raises(PluginError, match=f"^strategy 'bad-coin' of bad-coin 1.2: creating it raised {what}$"):
        acceptlib.create("bad-coin")


def test_a_plugin_s_strategy_calls_the_init_that_it_overrides(install: Install) -> None:
    install("bad-coin", source("bad-coin", hook="") + "    def __init__(self, **options):\n        pass\n" + HOOK)
    check_others_work()
    message = r"^strategy 'bad-coin' of bad-coin 1.2: expected an `__init__` that calls super\(\)'s$"
    with pytest.raises(StrategyDefinitionError, match=message):
        acceptlib.create("bad-coin")
    result = CliRunner().invoke(app, ["check", "--only", "padding", "-f", "json"])
    failed = [row for row in json.loads(result.stdout) if row["status"] == "failed"]
    assert [(row["strategy"], row["check"]) for row in failed] == [("bad-coin", "creation")]


def test_plugin_is_found_with_its_provenance(install: Install) -> None:
    install("good-coin", source("good-coin", aliases=("good-penny",)), version="3.1")
    check_others_work("good-coin")
    assert acceptlib.create("good-penny").name == "good-coin"
    assert registry.find("good-coin").distribution == "good-coin 3.1"
    assert loaded("good-coin 3.1").problems == ()
    assert [entry.name for entry in metadata.entry_points(group="acceptlib") if entry.name == "good-coin"]


def test_plugin_may_be_an_object_of_a_module(install: Install) -> None:
    hook = """
class Plugin:
    @acceptlib.hookimpl
    def acceptlib_strategies(self):
        return (Coin,)

plugin = Plugin()
"""
    install("object-coin", source("object-coin", hook=hook), entry="object_coin:plugin")
    check_others_work("object-coin")


HOOKS = {
    "misspelt": (
        "@acceptlib.hookimpl\ndef acceptlib_strategy():\n    return [Coin]\n",
        ["unknown hook 'acceptlib_strategy'", "Did you mean 'acceptlib_strategies'"],
    ),
    "unmarked": ("def acceptlib_strategies():\n    return [Coin]\n", ["implements no hook"]),
    "raises": (
        "@acceptlib.hookimpl\ndef acceptlib_strategies():\n    raise ValueError('out of coins')\n",
        ["its hook raised ValueError: out of coins"],
    ),
    "takes-arguments": (
        "@acceptlib.hookimpl\ndef acceptlib_strategies(config):\n    return [Coin]\n",
        ["its hook raised", "config"],
    ),
    "returns-instance": (
        "@acceptlib.hookimpl\ndef acceptlib_strategies():\n    return [Coin()]\n",
        ["its hook returned", "expected subclasses of acceptlib.AcceptanceStrategy"],
    ),
    "returns-other-class": (
        "@acceptlib.hookimpl\ndef acceptlib_strategies():\n    return [dict]\n",
        ["its hook returned <class 'dict'>", "expected subclasses of acceptlib.AcceptanceStrategy"],
    ),
    "returns-the-interface": (
        "@acceptlib.hookimpl\ndef acceptlib_strategies():\n    return [AcceptanceStrategy]\n",
        ["its hook returned", "expected subclasses of acceptlib.AcceptanceStrategy"],
    ),
    "returns-no-list": (
        "@acceptlib.hookimpl\ndef acceptlib_strategies():\n    return Coin\n",
        ["its hook returned <class 'bad_coin.Coin'>: expected a list of strategy classes"],
    ),
    "returns-nothing": (
        "@acceptlib.hookimpl\ndef acceptlib_strategies():\n    [Coin]\n",
        ["its hook returned None: expected a list of strategy classes", "is a `return` missing?"],
    ),
    "returns-a-name": (
        "@acceptlib.hookimpl\ndef acceptlib_strategies():\n    return 'coin'\n",
        ["its hook returned 'coin': expected a list of strategy classes"],
    ),
}


@pytest.mark.parametrize("case", HOOKS)
def test_broken_hook_is_reported_and_harms_nobody(install: Install, case: str) -> None:
    hook, fragments = HOOKS[case]
    install("bad-coin", source("bad-coin", hook=hook))
    install("good-coin", source("good-coin"))
    check_others_work("good-coin")
    assert "bad-coin" not in acceptlib.available()
    problems = loaded("bad-coin 1.2").problems
    for fragment in fragments:
        assert fragment in " ".join(problems)
    with pytest.raises(UnknownStrategyError, match=r"(?s)problems: bad-coin 1\.2: .*See `acceptlib plugins`"):
        acceptlib.create("bad-coin")


def test_a_problem_that_is_a_sentence_ends_once(install: Install) -> None:
    install("bad-coin", "raise RuntimeError('no licence.')")
    with pytest.raises(UnknownStrategyError, match=r"no licence\. See `acceptlib plugins`\.$"):
        acceptlib.create("bad-coin")


def test_error_gives_the_problems_of_the_name_asked_for(install: Install) -> None:
    """Of an entry point or a strategy of that name; of any other name, those of all who might have brought it."""
    install("bad-coin", "raise RuntimeError('no licence')")
    install("future-coin", source("dime", version=2))
    bad = "bad-coin 1.2: importing 'bad_coin' raised RuntimeError: no licence"
    future = f"future-coin 1.2: {loaded('future-coin 1.2').problems[0]}"
    assert problems_named("bad-coin") == f"{bad}. See `acceptlib plugins`."
    assert problems_named("dime") == f"{future}. See `acceptlib plugins`."
    for other in ("penny", "coin"):  # a part of a name is none
        assert problems_named(other) == f"{bad}; {future}. See `acceptlib plugins`."


@pytest.mark.parametrize("count", [3, 4])
def test_of_many_problems_the_packages_are_named(count: int, install: Install) -> None:
    for number in range(count):
        install(f"bad{number}", "raise RuntimeError('no licence')")
    said = problems_named("penny")
    assert said.startswith("bad0 1.2; bad1 1.2; bad2 1.2; bad3 1.2." if count > 3 else "bad0 1.2: importing")
    assert ("no licence" in said) == (count <= 3)


def problems_named(name: str) -> str:
    """Return what the error of a strategy that there is not says of plugins."""
    with pytest.raises(UnknownStrategyError) as caught:
        acceptlib.create(name)
    return str(caught.value).partition(" Plugins with problems: ")[2]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("import no_such_module_of_acceptlib", "raised ModuleNotFoundError: No module named"),
        ("def broken(:", "raised SyntaxError"),
        ("raise RuntimeError('no licence')", "raised RuntimeError: no licence"),
        ("import sys\nsys.exit('no licence')", "raised SystemExit: no licence"),
        ("class Panic(BaseException): ...\nraise Panic('no licence')", "raised Panic: no licence"),
        ("import acceptlib\nclass C(acceptlib.AcceptanceStrategy):\n    name = 'c'", "raised StrategyDefinitionError"),
    ],
    ids=["missing-module", "syntax", "raises", "exits", "panics", "strategy-without-traits"],
)
def test_plugin_that_fails_to_import_is_reported_and_harms_nobody(install: Install, text: str, problem: str) -> None:
    install("bad-coin", text)
    install("good-coin", source("good-coin"))
    check_others_work("good-coin")
    (reported,) = loaded("bad-coin 1.2").problems
    assert reported.startswith("importing 'bad_coin' ")
    assert problem in reported


@pytest.mark.parametrize(
    "text",
    [
        "raise KeyboardInterrupt",
        "import acceptlib\n@acceptlib.hookimpl\ndef acceptlib_strategies():\n    raise KeyboardInterrupt",
    ],
    ids=["import", "hook"],
)
def test_ctrl_c_while_a_plugin_is_loaded_ends_the_program(install: Install, text: str) -> None:
    """It is no problem of the plugin's: the next look-up loads it."""
    install("slow-coin", text)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            acceptlib.available()


def test_entry_point_without_a_target_is_reported(install: Install) -> None:
    install("bad-coin", source("bad-coin"), entry="bad_coin:missing")
    check_others_work()
    assert "AttributeError" in " ".join(loaded("bad-coin 1.2").problems)


ASKS = """
import acceptlib
NAMES = acceptlib.available()
BASE = acceptlib.create("rejection")
try:
    acceptlib.create("good-coin")
except acceptlib.AcceptlibError as error:
    SAID = str(error)
"""


@pytest.mark.parametrize("entry", ["asking-coin", "zz-asking-coin"])
def test_plugin_that_looks_strategies_up_while_it_is_loaded_sees_the_built_ins(install: Install, entry: str) -> None:
    """Whether it comes before or behind the others."""
    install("good-coin", source("good-coin"))
    install(entry, ASKS + source(entry))
    check_others_work("good-coin", entry)
    module = sys.modules[entry.replace("-", "_")]
    assert module.NAMES == BUILT_IN
    assert module.SAID.startswith("Unknown strategy 'good-coin'.")
    assert all(plugin.problems == () for plugin in registry.loaded_plugins())


def test_what_a_plugin_prints_while_it_is_loaded_goes_to_stderr(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    """On stdout it would be in the midst of a command's JSON."""
    hook = "@acceptlib.hookimpl\ndef acceptlib_strategies():\n    print('tails')\n    return [Coin]\n"
    install("loud-coin", "print('heads')\n" + source("loud-coin", hook=hook))
    check_others_work("loud-coin")
    assert capsys.readouterr() == ("", "heads\ntails\n")


@pytest.mark.parametrize("returned", ["[]", "()"])
def test_hook_that_brings_none_is_no_problem(install: Install, returned: str) -> None:
    install(
        "empty-coin", source("x", hook=f"@acceptlib.hookimpl\ndef acceptlib_strategies():\n    return {returned}\n")
    )
    check_others_work()
    assert loaded("empty-coin 1.2").strategies == ()
    assert loaded("empty-coin 1.2").problems == ()


def test_other_interface_version_is_reported(install: Install) -> None:
    install("future-coin", source("future-coin", version=2))
    check_others_work()
    assert "future-coin" not in acceptlib.available()
    (problem,) = loaded("future-coin 1.2").problems
    assert problem.endswith("interface version 2; this acceptlib has 1: upgrade the older of the two")


def test_built_in_name_cannot_be_taken(install: Install) -> None:
    install("taking-coin", source("rejection", aliases=("speculative", "taking-penny")))
    check_others_work("rejection")
    for name in ("rejection", "speculative"):
        assert registry.find(name).distribution.startswith("acceptlib ")
    problems = " ".join(loaded("taking-coin 1.2").problems)
    for name in ("rejection", "speculative"):
        assert f"the name {name!r} is taken by acceptlib " in problems
    assert loaded("taking-coin 1.2").strategies == ()
    assert all(plugin.problems == () for plugin in registry.loaded_plugins() if plugin.name == "acceptlib")


def test_an_alias_that_is_refused_is_shown_nowhere(install: Install) -> None:
    """In the schema it would put the package's options upon a built-in."""
    install("taking-coin", source("coin", aliases=("lenience", "speculative", "penny")))
    assert registry.aliases(registry.find("coin").strategy) == ["penny"]
    rows, listed, shown, record = (
        CliRunner().invoke(app, command.split()).stdout
        for command in ("list -f json", "list", "show coin", "show coin -f json")
    )
    assert [row["aliases"] for row in json.loads(rows) if row["name"] == "coin"] == [["penny"]]
    assert json.loads(record)["aliases"] == ["penny"]
    assert re.search(r"^coin +lossy +taking-coin 1\.2 +penny *$", listed, re.MULTILINE)
    assert shown.startswith("coin (also penny)\n")
    branches = json_schema()["properties"]["acceptance"]["allOf"]
    named = [name for branch in branches for name in branch["if"]["properties"]["strategy"]["enum"]]
    assert len(named) == len({*named})
    assert "penny" in named


def test_one_name_of_two_packages_is_an_error_that_names_both(install: Install) -> None:
    install("first-coin", source("twin", aliases=("first-penny",)))
    install("second-coin", source("twin"), version="0.9")
    check_others_work()
    assert "twin" not in acceptlib.available()
    with pytest.raises(PluginError) as caught:
        acceptlib.create("twin")
    assert str(caught.value) == "Both first-coin 1.2 and second-coin 0.9 provide a strategy 'twin'; uninstall one."
    assert acceptlib.create("first-penny").name == "twin"
    with pytest.raises(UnknownStrategyError) as unknown:
        acceptlib.create("none")
    assert "twin" not in str(unknown.value).partition("Plugins with problems")[0]
    for distribution in ("first-coin 1.2", "second-coin 0.9"):
        assert loaded(distribution).problems == (str(caught.value),)


def test_one_name_twice_in_a_package_is_an_error_that_names_it(install: Install) -> None:
    """And does not ask to uninstall one of it."""
    hook = """
class Other(Coin):
    name = "twin"

@acceptlib.hookimpl
def acceptlib_strategies():
    return [Coin, Other]
"""
    install("twin-coin", source("twin", hook=hook))
    check_others_work()
    with pytest.raises(PluginError) as caught:
        acceptlib.create("twin")
    assert str(caught.value) == "twin-coin 1.2 provides two strategies 'twin'; rename one."
    assert loaded("twin-coin 1.2").problems == (str(caught.value),)


@pytest.mark.parametrize("other", ["aaa-coin", "zzz-coin"])
def test_alias_yields_to_another_package_s_name(install: Install, other: str) -> None:
    """Whichever is loaded first."""
    install("good-coin", source("good-coin"))
    install(other, source(other, aliases=("good-coin", "penny")))
    check_others_work("good-coin", other)
    assert registry.find("good-coin").distribution == "good-coin 1.2"
    assert acceptlib.create("penny").name == other
    assert loaded(f"{other} 1.2").problems == ("the name 'good-coin' is taken by good-coin 1.2",)
    assert loaded("good-coin 1.2").problems == ()


def test_plugins_says_what_is_wrong_with_a_rule(install: Install) -> None:
    """It shows only when the strategy is created; one whose options have no default is not at fault."""
    hook = """
class Misspelt(Coin):
    name = "misspelt-coin"

    @acceptlib.rule
    def accept(target_porb):
        return target_porb

class Choosy(Coin):
    name = "choosy-coin"

    class Options(acceptlib.Options):
        side: int

@acceptlib.hookimpl
def acceptlib_strategies():
    return [Coin, Misspelt, Choosy]
"""
    install("fine-coin", source("fine-coin", hook=hook))
    records = json.loads(CliRunner().invoke(app, ["plugins", "-f", "json"]).stdout)
    found = {record["entry_point"]: record for record in records}
    assert found["fine-coin"]["strategies"] == ["fine-coin", "misspelt-coin", "choosy-coin"]
    (problem,) = found["fine-coin"]["problems"]
    assert "'misspelt-coin'" in problem
    assert "'target_porb'" in problem
    assert found["acceptlib"]["problems"] == []


def test_one_class_given_twice_is_one_strategy_and_reported(install: Install) -> None:
    hook = """
class Other(Coin):
    name = "other-coin"

@acceptlib.hookimpl
def acceptlib_strategies():
    return [Coin, Coin, Other]
"""
    install("double-coin", source("double-coin", hook=hook))
    check_others_work("double-coin", "other-coin")
    assert [strategy.name for strategy in loaded("double-coin 1.2").strategies] == ["double-coin", "other-coin"]
    assert loaded("double-coin 1.2").problems == (
        "its hook returned <class 'double_coin.Coin'> twice: expected each class once",
    )


@pytest.mark.parametrize("value", ["1", "yes", "true"])
def test_environment_turns_plugins_off(install: Install, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    install("good-coin", source("good-coin"))
    monkeypatch.setenv(DISABLE_VARIABLE, value)
    assert acceptlib.available() == BUILT_IN
    assert [plugin.name for plugin in registry.loaded_plugins()] == ["acceptlib"]
    with pytest.raises(UnknownStrategyError, match="Those of installed packages are turned off"):
        acceptlib.create("good-coin")


@pytest.mark.parametrize("value", ["", "0"])
def test_environment_leaves_plugins_on(install: Install, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    install("good-coin", source("good-coin"))
    monkeypatch.setenv(DISABLE_VARIABLE, value)
    check_others_work("good-coin")


def test_plugin_that_is_turned_off_is_not_imported(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("loud-coin", "raise SystemExit('imported')")
    monkeypatch.setenv(DISABLE_VARIABLE, "1")
    check_others_work()
    assert "loud_coin" not in sys.modules


def test_config_turns_plugins_off(install: Install) -> None:
    install("good-coin", source("good-coin"))
    assert acceptlib.from_config({"strategy": "good-coin"}).name == "good-coin"
    assert acceptlib.from_config({"strategy": "good-coin", "plugins": True}).name == "good-coin"
    assert acceptlib.from_config({"strategy": "block", "plugins": False}).name == "block"
    with pytest.raises(UnknownStrategyError, match="'good-coin'"):
        acceptlib.from_config({"strategy": "good-coin", "plugins": False})


def test_config_cannot_turn_on_what_the_environment_turned_off(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("good-coin", source("good-coin"))
    monkeypatch.setenv(DISABLE_VARIABLE, "1")
    with pytest.raises(UnknownStrategyError):
        acceptlib.from_config({"strategy": "good-coin", "plugins": True})


def test_entry_point_of_no_distribution() -> None:
    """As a host application makes them by hand."""
    entry = metadata.EntryPoint(name="by-hand", value="no_such_module_of_acceptlib", group="acceptlib")
    _, plugin = discover([entry])
    assert (plugin.name, plugin.distribution, plugin.strategies) == ("by-hand", "unknown", ())
    assert "ModuleNotFoundError" in plugin.problems[0]


@pytest.mark.parametrize("version", [0, "1"])
def test_a_strategy_of_an_older_interface_is_reported(install: Install, version: object) -> None:
    install("old-coin", HEADER.format(name="old-coin", aliases=(), version=repr(version)) + HOOK)
    check_others_work()
    assert "old-coin" not in acceptlib.available()
    (problem,) = loaded("old-coin 1.2").problems
    assert f"was written for interface version {version!r}; this acceptlib has 1" in problem


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
