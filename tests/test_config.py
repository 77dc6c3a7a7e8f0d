"""Config files and mappings: what they create, and what is wrong with those that create nothing."""

from __future__ import annotations

import json
import math
from decimal import Decimal
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import numpy as np
import pydantic
import pytest
import torch

import acceptlib
from acceptlib import config, registry, strategy
from acceptlib.cli.format import to_json
from acceptlib.errors import BackendError, ConfigError, OptionError, UnknownStrategyError

TOML = """
[unrelated]
strategy = "of war"

[acceptance]
strategy = "typical"
backend = "torch"

[acceptance.options]
posterior_threshold = 0.2
posterior_alpha = 0.4
"""
YAML = """
unrelated: [1, 2]
acceptance:
  strategy: typical
  backend: torch
  options: {posterior_threshold: 0.2, posterior_alpha: 0.4}
"""
TABLE = {
    "strategy": "typical",
    "backend": "torch",
    "options": {"posterior_threshold": 0.2, "posterior_alpha": 0.4},
}
JSON = json.dumps({"unrelated": None, "acceptance": TABLE})


def written(folder: Path, name: str, text: str) -> Path:
    """Return the path of a new file."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def minimal(extra: str = "") -> str:
    """Return a TOML config."""
    return f'[acceptance]\nstrategy = "rejection"\n{extra}'


# What a config creates


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.toml", TOML), ("a.json", JSON), ("a.yaml", YAML), ("a.yml", YAML), ("A.TOML", TOML), ("a.b.Json", JSON)],
)
def test_every_format_gives_the_same_strategy(tmp_path: Path, name: str, text: str) -> None:
    path = written(tmp_path, name, text)
    for source in (path, str(path), TABLE):
        strategy = acceptlib.from_config(source)
        options = {"posterior_threshold": 0.2, "posterior_alpha": 0.4}
        assert repr(strategy) == repr(acceptlib.create("typical", backend="torch", **options))


def test_defaults(tmp_path: Path) -> None:
    strategy = acceptlib.from_config(written(tmp_path, "a.toml", minimal()))
    assert (strategy.name, strategy.backend) == ("rejection", "auto")
    assert repr(acceptlib.from_config({"strategy": "fly"})) == repr(acceptlib.create("fly"))


@pytest.mark.parametrize(("alias", "name"), [("speculative", "rejection"), ("ensemble", "mixture")])
def test_alias(alias: str, name: str) -> None:
    assert acceptlib.from_config({"strategy": alias}).name == name


@pytest.mark.parametrize("backend", ["auto", "torch", "triton"])
def test_backend_is_handed_on(backend: str) -> None:
    assert acceptlib.from_config({"strategy": "block", "backend": backend}).backend == backend


def test_list_of_a_file_becomes_an_option(tmp_path: Path) -> None:
    text = '[acceptance]\nstrategy = "synthetic"\noptions = {synthetic_acceptance_rates = [0.9, 0.5]}\n'
    strategy = acceptlib.from_config(written(tmp_path, "a.toml", text))
    assert strategy.options.model_dump()["synthetic_acceptance_rates"] == (0.9, 0.5)


def test_source_mapping_is_left_as_it_is() -> None:
    table = {"strategy": "lenience", "options": {"lenience": 0.5}}
    acceptlib.from_config(table)
    assert table == {"strategy": "lenience", "options": {"lenience": 0.5}}


# What is wrong with a mapping


@pytest.mark.parametrize(
    ("table", "error", "fragments"),
    [
        ({"strategi": "block"}, ConfigError, ["unknown key 'strategi'", "Did you mean 'strategy'", "options, plugins"]),
        ({}, ConfigError, ["config: key 'strategy' is required."]),
        ({"strategy": 3}, ConfigError, ["key 'strategy'", "string", "got 3"]),
        ({"strategy": "block", "backend": "cuda"}, ConfigError, ["key 'backend'", "'triton'", "got 'cuda'"]),
        ({"strategy": "block", "options": [1]}, ConfigError, ["key 'options'", "expected a table", "got [1]"]),
        ({"strategy": "block", "options": {3: 1}}, ConfigError, ["key 'options': expected texts as keys, got 3."]),
        ({"strategy": "block", "plugins": "maybe"}, ConfigError, ["key 'plugins'", "boolean", "got 'maybe'"]),
        ({"strategy": "block", "seed": 1}, ConfigError, ["unknown key 'seed'", "backend, options, plugins, strategy"]),
        ({"acceptance": {"strategy": "block"}}, ConfigError, ["'acceptance' table itself", "config['acceptance']"]),
        ({"acceptance": {}, "strategy": "block"}, ConfigError, ["unknown key 'acceptance'"]),
        (
            {"strategy": "rejecton"},
            UnknownStrategyError,
            ["'rejecton'", "Did you mean 'rejection'", "Available: block"],
        ),
        (
            {"strategy": "fly", "options": {"fly_windw": 3}},
            OptionError,
            ["no option 'fly_windw'", "Did you mean 'fly_window'"],
        ),
        (
            {"strategy": "fly", "options": {"fly_window": 0}},
            OptionError,
            ["option 'fly_window'", "got 0", "equal to 1"],
        ),
        (
            {"strategy": "fly", "options": {"fly_window": "x"}},
            OptionError,
            ["option 'fly_window'", "got 'x'", "integer"],
        ),
        (
            {"strategy": "typical", "options": {"posterior_alpha": True}},
            OptionError,
            ["got True", "number, not a flag"],
        ),
        ({"strategy": "lenience", "options": {"lenience": math.nan}}, OptionError, ["got nan", "number, not NaN"]),
        (
            {"strategy": "typical", "options": {"posterior_alpha": np.bool_(True)}},  # noqa: FBT003
            OptionError,
            ["number, not a flag"],
        ),
        (
            {"strategy": "typical", "options": {"posterior_alpha": torch.ones((), dtype=torch.bool)}},
            OptionError,
            ["number, not a flag"],
        ),
        ({"strategy": "lenience", "options": {"lenience": np.float32("nan")}}, OptionError, ["number, not NaN"]),
        ({"strategy": "lenience", "options": {"lenience": torch.tensor(math.nan)}}, OptionError, ["number, not NaN"]),
        ({"strategy": "lenience", "options": {"lenience": Decimal("nan")}}, OptionError, ["number, not NaN"]),
        ({"strategy": "lenience", "options": {"lenience": b"1"}}, OptionError, ["got b'1'", "number, not bytes"]),
        ({"strategy": "lenience", "options": {"lenience": np.str_("1")}}, OptionError, ["number, not a text"]),
        ({"strategy": "typical", "options": {"posterior_alpha": "1"}}, OptionError, ["got '1'", "number, not a text"]),
        (
            {"strategy": "synthetic", "options": {"synthetic_acceptance_length": "2"}},
            OptionError,
            ["number, not a text"],
        ),
        ({"strategy": "block", "options": {"lenience": 1}}, OptionError, ["no option 'lenience'", "It has none"]),
        ({"strategy": "block", "options": {"backend": "torch"}}, OptionError, ["no option 'backend'"]),
        ({"strategy": "block", "options": {"self": 1}}, OptionError, ["no option 'self'"]),
    ],
)
def test_bad_mapping(table: dict[str, Any], error: type[ConfigError], fragments: list[str]) -> None:
    with pytest.raises(error) as caught:
        acceptlib.from_config(table)
    assert isinstance(caught.value, ConfigError)
    assert isinstance(caught.value, ValueError)
    for fragment in fragments:
        assert fragment in str(caught.value)


# What is wrong with a file


@pytest.mark.parametrize(
    ("name", "text", "fragments"),
    [
        ("a.ini", "", ["a.ini", "expected a file ending in .toml, .json, .yaml, .yml", "'.ini'"]),
        ("acceptance", "", ["acceptance", "got no ending; for a strategy's name use acceptlib.create"]),
        ("a.toml", "[acceptance\nstrategy = 3", ["a.toml", "not valid TOML", "line 1"]),
        ("a.json", '{"acceptance": }', ["a.json", "not valid JSON", "line 1"]),
        ("a.yaml", "acceptance: [", ["a.yaml", "not valid YAML", "line 1"]),
        ("a.toml", "", ["a.toml", "'acceptance'", "'strategy'", "nothing"]),
        ("a.yaml", "", ["a.yaml", "'acceptance'", "nothing"]),
        ("a.toml", "[accept]\nstrategy = 'block'", ["table 'acceptance'", "['accept']"]),
        ("a.toml", "acceptance = 'block'", ["table 'acceptance'"]),
        ("a.json", "[]", ["table 'acceptance'", "got a list"]),
        ("a.yaml", "acceptance: block", ["table 'acceptance'", "got acceptance: 'block'"]),
        ("a.json", "[" * 100000, ["a.json", "too deep"]),
        ("a.json", "5", ["table 'acceptance'"]),
        ("a.json", '[{"a": 1}, {"b": 2}]', ["table 'acceptance'"]),
        ("a.yaml", "block", ["table 'acceptance'"]),
        ("a.yaml", "1: x\na: y", ["table 'acceptance'"]),
        ("a.yaml", "acceptance:\n", ["table 'acceptance'"]),
        ("a.toml", minimal("backends = 'torch'"), ["a.toml", "unknown key 'backends'", "Did you mean 'backend'"]),
        ("a.yaml", "acceptance: {strategy: block, 3: x}", ["a.yaml", "3"]),
        ("a.yml", "acceptance: [", ["a.yml", "not valid YAML"]),
        ("a.yaml", "acceptance: {strategy: blok}", ["a.yaml: Unknown strategy 'blok'"]),
        ("a.yaml", "acceptance: {strategy: block, options: {x: 1}}", ["a.yaml: Strategy 'block' has no option 'x'"]),
        ("a.yaml", "acceptance: {strategy: block, options: {backend: torch}}", ["a.yaml: Strategy 'block'", "a key"]),
    ],
)
def test_bad_file(tmp_path: Path, name: str, text: str, fragments: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        acceptlib.from_config(written(tmp_path, name, text))
    for fragment in fragments:
        assert fragment in str(caught.value)


def test_options_that_are_all_left_out(tmp_path: Path) -> None:
    path = written(tmp_path, "a.yaml", "acceptance:\n  strategy: lenience\n  options:\n    # lenience: 0.3\n")
    assert repr(acceptlib.from_config(path)) == repr(acceptlib.create("lenience"))


@pytest.mark.parametrize("name", ["a.toml", "a.json", "a.yaml"])
def test_file_that_is_no_text(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"\xff\xfe\x00acceptance")
    with pytest.raises(ConfigError, match="not valid"):
        acceptlib.from_config(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: cannot be read: No such file") as caught:
        acceptlib.from_config(tmp_path / "none.toml")
    assert isinstance(caught.value.__cause__, FileNotFoundError)


def test_a_path_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match=r"cannot be read: embedded null byte"):
        acceptlib.from_config("a\0.toml")


def test_directory(tmp_path: Path) -> None:
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(ConfigError, match=r"folder\.yaml: cannot be read: Is a directory"):
        acceptlib.from_config(tmp_path / "folder.yaml")


@pytest.mark.parametrize(
    "tag", ["!!python/object/apply:os.mkdir [{}]", "!!python/object/new:os.mkdir [{}]", "!!python/name:os.mkdir"]
)
def test_yaml_is_data(tmp_path: Path, tag: str) -> None:
    """A tag that would call a function is an error, and calls nothing."""
    proof = tmp_path / "evaluated"
    path = written(tmp_path, "a.yaml", f"acceptance:\n  strategy: {tag.format(proof)}\n")
    with pytest.raises(ConfigError, match="not valid YAML"):
        acceptlib.from_config(path)
    assert not proof.exists()


@pytest.mark.parametrize(
    ("name", "text", "where"),
    [
        ("a.toml", minimal("strategy = 'block'"), "Cannot overwrite a value"),
        ("a.json", '{"acceptance": {"strategy": "rejection", "strategy": "block"}}', "key 'strategy' is given twice"),
        ("a.json", '{"acceptance": {}, "acceptance": {"strategy": "block"}}', "key 'acceptance' is given twice"),
        ("a.yaml", "acceptance:\n  strategy: rejection\n  strategy: block\n", "key 'strategy' is given twice"),
        ("a.yaml", "acceptance:\n  strategy: rejection\n  'strategy': block\n", "line 3, column 3"),
        ("a.yml", "acceptance: {strategy: fly, options: {fly_window: 1, fly_window: 2}}", "key 'fly_window' is given"),
    ],
)
def test_a_key_is_given_once(tmp_path: Path, name: str, text: str, where: str) -> None:
    """The last would win without a word."""
    with pytest.raises(ConfigError, match="not valid") as caught:
        acceptlib.from_config(written(tmp_path, name, text))
    assert where in str(caught.value)


def test_what_yaml_merges_may_be_given_again(tmp_path: Path) -> None:
    """Wherever the table that is merged stands, and whatever was merged into that one."""
    text = """
        outer: {inner: &table {<<: &base {fly_window: 1, fly_entropy_top_k: 2}, fly_window: 4}}
        acceptance: {strategy: fly, options: {<<: *table, fly_entropy_top_k: 5}}
        more: {1: a, "1": b}
    """
    options = acceptlib.from_config(written(tmp_path, "a.yaml", text)).options.model_dump()
    assert (options["fly_window"], options["fly_entropy_top_k"]) == (4, 5)


# Backends


def test_a_byte_order_mark_is_no_content(tmp_path: Path) -> None:
    assert acceptlib.from_config(written(tmp_path, "a.toml", "\ufeff" + minimal())).name == "rejection"


@pytest.mark.parametrize("value", ["!!bool abc", "!!timestamp abc", '!!int ""', '!!float ""', '!!int "-"'])
def test_yaml_tag_that_does_not_fit_its_text(tmp_path: Path, value: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(f"acceptance: {{strategy: block}}\nother: {value}\n")
    with pytest.raises(ConfigError, match=r"a\.yaml: not valid YAML"):
        acceptlib.from_config(path)


@pytest.mark.parametrize("source", [None, 5, ["a.toml"]])
def test_no_config_at_all(source: Any) -> None:
    with pytest.raises(ConfigError, match="config: expected a path or a mapping, got"):
        acceptlib.from_config(source)


def test_schema_of_options_that_are_types_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their definitions are found from the root, and those of strategies do not mix."""
    strategies = {}
    for name, values in (("gentle", ["low", "high"]), ("rough", ["on"])):
        mode = Enum("Mode", {value: value for value in values}, type=str)  # type: ignore[misc]
        options = pydantic.create_model(
            "Options", __base__=strategy.Options, mode=(mode, mode(values[0])), cap=(float, math.inf)
        )
        body = {
            "name": name,
            "traits": acceptlib.Traits(guarantee="lossy"),
            "Options": options,
            "accept": acceptlib.create("rejection").accept,
        }
        strategies[name] = registry.Entry(name, type("Own", (acceptlib.AcceptanceStrategy,), body), "test")
    monkeypatch.setattr(registry, "available", lambda: [*strategies])
    monkeypatch.setattr(registry, "find", strategies.__getitem__)
    schema = json.loads(to_json(config.json_schema()))
    branches = schema["properties"]["acceptance"]["allOf"]
    for branch, (name, values) in zip(branches, (("gentle", ["low", "high"]), ("rough", ["on"])), strict=True):
        options = branch["then"]["properties"]["options"]
        assert f'"#/$defs/{name}.Mode"' in json.dumps(options["properties"]["mode"])
        mode = schema["$defs"][f"{name}.Mode"]
        assert mode.get("enum", [mode.get("const")]) == values
        assert options["properties"]["cap"]["default"] is None  # JSON has no infinity


def test_backend_that_cannot_run_says_why() -> None:
    strategy = acceptlib.from_config({"strategy": "rejection", "backend": "triton"})
    with pytest.raises(BackendError, match=r"backend='triton' cannot run on cpu: .+ Use backend='auto' or 'torch'"):
        strategy.verify(torch.zeros(1, 1, dtype=torch.int64), target_probs=torch.ones(1, 2, 1))


def test_unknown_backend_suggests() -> None:
    with pytest.raises(BackendError, match=r"Unknown backend 'tritn'\. Did you mean 'triton'\? Available: auto, torch"):
        acceptlib.create("rejection", backend="tritn")


# JSON Schema

TYPES = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}
KEYWORDS = {
    *(
        "$defs",
        "$schema",
        "allOf",
        "anyOf",
        "additionalProperties",
        "const",
        "default",
        "description",
        "enum",
        "examples",
    ),
    *("exclusiveMinimum", "exclusiveMaximum", "if", "items", "maximum", "minimum", "properties", "required", "then"),
    *("title", "type"),
}


def fits(value: Any, schema: Any) -> bool:
    """Return whether `value` satisfies `schema`: the part of JSON Schema 2020-12 that is used here."""
    if isinstance(schema, bool):
        return schema
    assert {*schema} <= KEYWORDS, {*schema} - KEYWORDS
    number = isinstance(value, int | float) and not isinstance(value, bool)
    checks = [
        "type" not in schema
        or (isinstance(value, TYPES[schema["type"]]) and (isinstance(value, bool) <= (schema["type"] == "boolean"))),
        "enum" not in schema or value in schema["enum"],
        "const" not in schema or value == schema["const"],
        not number or value >= schema.get("minimum", value),
        not number or value <= schema.get("maximum", value),
        not number or "exclusiveMinimum" not in schema or value > schema["exclusiveMinimum"],
        not number or "exclusiveMaximum" not in schema or value < schema["exclusiveMaximum"],
        "anyOf" not in schema or any(fits(value, option) for option in schema["anyOf"]),
        all(fits(value, part) for part in schema.get("allOf", [])),
        "if" not in schema or not fits(value, schema["if"]) or fits(value, schema["then"]),
    ]
    if isinstance(value, list):
        checks += [fits(item, schema.get("items", True)) for item in value]
    if isinstance(value, dict):
        known = schema.get("properties", {})
        checks += [key in value for key in schema.get("required", [])]
        checks += [fits(item, known.get(key, schema.get("additionalProperties", True))) for key, item in value.items()]
    return all(checks)


GOOD_TABLES: list[dict[str, Any]] = [
    TABLE,
    {"strategy": "rejection"},
    {"strategy": "speculative", "options": {}},
    {"strategy": "block", "backend": "auto", "plugins": False},
    {"strategy": "lenience", "options": {"lenience": 1}},
    {"strategy": "ensemble", "options": {"weight": 0.0}},
    {"strategy": "fly", "options": {"fly_window": 1, "fly_entropy_top_k": 2, "fly_entropy_threshold": 0}},
    {"strategy": "typical", "options": {"recovery": "sample"}},
    {"strategy": "synthetic", "options": {"synthetic_acceptance_rates": [0.5, 0.25]}},
    {"strategy": "synthetic", "options": {"synthetic_acceptance_length": 2.5}},
    {"strategy": "synthetic", "options": {"synthetic_acceptance_rates": None}},
]
BAD_TABLES: list[dict[str, Any]] = [
    {},
    {"options": {}},
    {"strategy": 3},
    {"strategy": "block", "backend": "cuda"},
    {"strategy": "block", "plugins": "maybe"},
    {"strategy": "block", "seed": 1},
    {"strategy": "block", "options": {"lenience": 1.0}},
    {"strategy": "speculative", "options": {"lenience": 1.0}},
    {"strategy": "lenience", "options": {"lenience": 0}},
    {"strategy": "lenience", "options": {"lenience": 1.5}},
    {"strategy": "ensemble", "options": {"weight": -0.1}},
    {"strategy": "fly", "options": {"fly_window": 0}},
    {"strategy": "fly", "options": {"fly_window": 2.5}},
    {"strategy": "typical", "options": {"recovery": "best"}},
    {"strategy": "synthetic", "options": {"synthetic_acceptance_rates": [1.5]}},
    {"strategy": "synthetic", "options": {"synthetic_acceptance_length": 0.5}},
]


def test_schema_is_json() -> None:
    assert json.loads(json.dumps(config.json_schema(), allow_nan=False)) == config.json_schema()


def test_schema_names_every_strategy() -> None:
    schema = config.json_schema()
    table = schema["properties"]["acceptance"]
    assert table["properties"]["strategy"]["examples"] == acceptlib.available()
    assert table["required"] == ["strategy"]
    assert len(table["allOf"]) == len(acceptlib.available())
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    options = {
        part["if"]["properties"]["strategy"]["enum"][0]: part["then"]["properties"]["options"]
        for part in table["allOf"]
    }
    assert options["block"]["description"] == "No options."
    assert options["lenience"]["description"] != "No options."


@pytest.mark.parametrize("table", GOOD_TABLES, ids=json.dumps)
def test_schema_accepts_what_loads(table: dict[str, Any]) -> None:
    acceptlib.from_config(table)
    assert fits({"acceptance": table}, config.json_schema())


@pytest.mark.parametrize("table", BAD_TABLES, ids=json.dumps)
def test_schema_rejects_what_does_not(table: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        acceptlib.from_config(table)
    assert not fits({"acceptance": table}, config.json_schema())


def test_schema_is_of_a_file(tmp_path: Path) -> None:
    """The table is under its key there, beside what other programs read."""
    file = {"model": "other", "acceptance": {"strategy": "block"}}
    acceptlib.from_config(written(tmp_path, "a.json", json.dumps(file)))
    assert fits(file, config.json_schema())
    assert not fits(file["acceptance"], config.json_schema())


@pytest.mark.parametrize("number", ["1e-3", "1E-3", "+1.e-3", "0.1e-2", ".001e0", "1.0e-3"])
def test_yaml_has_numbers_with_exponents(tmp_path: Path, number: str) -> None:
    """As YAML 1.2, JSON and TOML have; a text in quotes is none."""
    path = tmp_path / "a.yaml"
    path.write_text(
        f"acceptance: {{strategy: typical, options: {{posterior_threshold: {number}}}}}\n", encoding="utf-8"
    )
    assert acceptlib.from_config(path).options.posterior_threshold == 0.001  # type: ignore[attr-defined]
    path.write_text(
        f"acceptance: {{strategy: typical, options: {{posterior_threshold: '{number}'}}}}\n", encoding="utf-8"
    )
    with pytest.raises(OptionError, match="not a text"):
        acceptlib.from_config(path)


@pytest.mark.parametrize("text", ["1e4d5c", "1e5-model", "2024e1.bin", "1e3:4"])
def test_yaml_has_texts_that_begin_like_numbers(tmp_path: Path, text: str) -> None:
    """Beside the table there may be anything, as a revision of a model."""
    path = tmp_path / "a.yaml"
    path.write_text(f"acceptance: {{strategy: {text}}}\n", encoding="utf-8")
    with pytest.raises(UnknownStrategyError, match=f"Unknown strategy '{text}'"):
        acceptlib.from_config(path)


@pytest.mark.parametrize(
    ("annotation", "good", "bad"),
    [
        (Literal["auto"] | tuple[float, ...], ["auto", [0.5]], [["0.5"], [True]]),
        (float | tuple[str, ...], [0.5, ["a"]], ["0.5", True]),
        (Literal["auto"] | float, ["auto", 0.5], [True, math.nan]),
        (Path | tuple[float, ...], ["here", [math.nan]], [["here"]]),
        (list[int], [[1]], [[True], ["1"]]),
        (Annotated[float, pydantic.Field(ge=0)] | None, [0.5, None], [True, "0.5"]),
        (tuple[Annotated[float, pydantic.Field(ge=0)], ...], [[0.5]], [[True], ["0.5"]]),
        (tuple[float | None, ...], [[0.5, None]], [[True], ["0.5"]]),
    ],
)
def test_flags_and_texts_are_no_numbers(annotation: Any, good: list[Any], bad: list[Any]) -> None:
    """Where an option may be several things, a text is refused only in the place of a number."""
    options = pydantic.create_model("Some", __base__=acceptlib.Options, value=(annotation, ...))
    for value in good:
        options(value=value)
    for value in bad:
        with pytest.raises(pydantic.ValidationError, match=r"expected (a number|an integer), not"):
            options(value=value)


@pytest.mark.parametrize("options", [False, 0, "", []])
def test_what_is_empty_is_no_table_of_options(options: object) -> None:
    """Only null is a key without a value."""
    with pytest.raises(ConfigError, match="key 'options': expected a table, got"):
        acceptlib.from_config({"strategy": "block", "options": options})


def test_the_key_that_is_given_twice_is_named_wherever_it_stands(tmp_path: Path) -> None:
    path = written(tmp_path, "a.json", '{"other": 1, "acceptance": {}, "acceptance": {}}')
    with pytest.raises(ConfigError, match="key 'acceptance' is given twice"):
        acceptlib.from_config(path)


def test_a_mapping_that_is_no_dict_is_not_shown_as_a_file() -> None:
    with pytest.raises(UnknownStrategyError, match=r"^Unknown strategy 'blok'\."):
        acceptlib.from_config(MappingProxyType({"strategy": "blok"}))


def test_a_config_that_was_read_stays_as_it_is() -> None:
    found = config.load({"strategy": "block"})
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        found.strategy = "fly"  # type: ignore[misc]


@pytest.mark.parametrize(("count", "ending"), [(5, "plugins, strategy."), (6, " And 1 more.")])
def test_problems_beyond_the_fifth_are_counted(count: int, ending: str) -> None:
    with pytest.raises(ConfigError) as caught:
        acceptlib.from_config({"strategy": "block", **{f"key{index}": 1 for index in range(count)}})
    assert str(caught.value).endswith(ending)
