"""Strategies from config files and mappings. A config is data: nothing in it is evaluated."""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pydantic
import yaml

from acceptlib import registry
from acceptlib.engine.backends import Choice
from acceptlib.errors import ConfigError, OptionError, problems_of, short_repr, suggest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

    from acceptlib.strategy import AcceptanceStrategy

TABLE: Final = "acceptance"
"""The table of a file that holds the config, so that it can share a file with other settings."""


DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
"""What pydantic writes JSON Schemas in."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a table of JSON.

    Raises:
        ValueError: A key is given twice; TOML's reader sees to that by itself.
    """
    table = dict(pairs)
    if len(table) < len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        msg = f"key {short_repr(twice)} is given twice: expected each key once in a table"
        raise ValueError(msg)
    return table


class _YamlLoader(yaml.SafeLoader):
    """Refuses a key that is given twice, and reads numbers like 1e-3, which are texts to YAML 1.1, as YAML 1.2 does."""

    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        """Compose a table as it is written, before `<<` merges others into it: their keys may be given here too."""
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    msg = f"key {short_repr(key.value)} is given twice: expected each key once in a table"
                    raise yaml.MarkedYAMLError(problem=msg, problem_mark=key.start_mark)
                seen.add((key.tag, key.value))
        return node


_YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$", re.ASCII), list("-+.0123456789")
)

READERS: dict[str, Callable[[bytes], Any]] = {
    ".toml": lambda data: tomllib.loads(data.decode("utf-8-sig")),  # with a byte order mark, as the others are
    ".json": lambda data: json.loads(data, object_pairs_hook=_unique),
    ".yaml": lambda data: yaml.load(data, _YamlLoader),  # noqa: S506 - of safe loading
    ".yml": lambda data: yaml.load(data, _YamlLoader),  # noqa: S506 - as above
}


class AcceptanceConfig(pydantic.BaseModel):
    """Which strategy verifies, with which options."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    strategy: str = pydantic.Field(description="name or alias of a strategy, see `acceptlib list`")
    backend: Choice = pydantic.Field("auto", description="engine that runs it")
    options: dict[str, Any] = pydantic.Field(default_factory=dict, description="see `acceptlib show NAME`")
    plugins: pydantic.StrictBool = pydantic.Field(
        default=True, description="whether installed packages' strategies are loaded"
    )

    @pydantic.field_validator("options", mode="before")
    @classmethod
    def _or_none(cls, options: object) -> object:
        """Take a key without a value, which is null in YAML, as no options."""
        return {} if options is None else options


def from_config(source: str | os.PathLike[str] | Mapping[str, Any]) -> AcceptanceStrategy:
    """Create the strategy that a config names.

    Args:
        source: Path of a .toml, .json or .yaml file with a table `acceptance`, or that table as a mapping: `strategy`
            (a name), and optionally `backend`, `options` (a table) and `plugins` (false: built-in names only).

    Raises:
        ConfigError: The file cannot be read or does not fit.
        UnknownStrategyError: No strategy has the name.
        PluginError: Two packages provide it, or one twice, or the package's own code raised something else.
        OptionError: An option does not exist or is out of range.
        StrategyDefinitionError: The strategy's class does not fit the interface under these options.
    """
    return create(load(source), source)


def create(config: AcceptanceConfig, source: str | os.PathLike[str] | Mapping[str, Any]) -> AcceptanceStrategy:
    """Create a config's strategy; see `from_config`. If its source is a file, errors name it."""
    try:
        entry = registry.find(config.strategy, third_parties=config.plugins)
        if "backend" in config.options:
            msg = f"Strategy {config.strategy!r} has no option 'backend': it is a key beside 'options'."
            raise OptionError(msg)
        return entry.create(backend=config.backend, **config.options)
    except ConfigError as error:
        if isinstance(source, Mapping):
            raise
        msg = f"{source}: {error}"
        raise type(error)(msg) from None


def load(source: str | os.PathLike[str] | Mapping[str, Any]) -> AcceptanceConfig:
    """Return the validated config behind `source`; see `from_config`."""
    if isinstance(source, Mapping):
        where, table = "config", source
        if TABLE in table and "strategy" not in table:
            msg = f"config: a mapping is the {TABLE!r} table itself, pass config[{TABLE!r}]"
            raise ConfigError(msg)
    elif isinstance(source, str | os.PathLike):
        where, table = str(source), _read(Path(source))
    else:
        msg = f"config: expected a path or a mapping, got {short_repr(source)}"
        raise ConfigError(msg)
    try:
        return AcceptanceConfig.model_validate(dict(table))
    except pydantic.ValidationError as error:
        msg = f"{where}: {problems_of(error, _say)}"
        raise ConfigError(msg) from None


def _say(key: str, detail: ErrorDetails) -> str:
    known = sorted(AcceptanceConfig.model_fields)
    if detail["type"] == "extra_forbidden":
        return f"unknown key {key}.{suggest(detail['loc'][-1], known)} Available: {', '.join(known)}."
    if detail["type"] == "missing":
        return f"key {key} is required."
    if detail["loc"][-1:] == ("[key]",):  # not a key of the config, but of a table in it
        table = ".".join(map(str, detail["loc"][:-2]))
        return f"key {table!r}: expected texts as keys, got {short_repr(detail['input'])}."
    problem = "expected a table" if detail["type"] == "dict_type" else detail["msg"]
    return f"key {key}: {problem}, got {short_repr(detail['input'])}."


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a config file, with the options of every available strategy."""
    table = AcceptanceConfig.model_json_schema()
    definitions = table.pop("$defs", {})
    names = registry.available()
    table["properties"]["strategy"]["examples"] = names
    table["allOf"] = []
    for name in names:
        strategy = registry.find(name).strategy
        options = _options_schema(strategy)
        # References start from the root of the whole schema.
        definitions |= {f"{name}.{key}": value for key, value in options.pop("$defs", {}).items()}
        table["allOf"].append(
            {
                "if": {"properties": {"strategy": {"enum": [name, *registry.aliases(strategy)]}}},
                "then": {"properties": {"options": options}},
            }
        )
    return {
        "$schema": DIALECT,
        "$defs": definitions,
        "type": "object",
        "properties": {TABLE: table},
        "required": [TABLE],
    }


def _options_schema(strategy: type[AcceptanceStrategy]) -> dict[str, Any]:
    try:
        schema = strategy.Options.model_json_schema(ref_template=f"#/$defs/{strategy.name}.{{model}}")
    except Exception:  # noqa: BLE001 - a third party's type without a schema must not cost the others theirs
        return {"type": "object"}
    if not strategy.Options.model_fields:
        schema["description"] = "No options."
    return schema


def _read(path: Path) -> Mapping[str, Any]:
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        got = repr(path.suffix) if path.suffix else "no ending; for a strategy's name use acceptlib.create"
        msg = f"{path}: expected a file ending in {', '.join(READERS)}, got {got}"
        raise ConfigError(msg)
    try:
        data = path.read_bytes()
    except (OSError, ValueError) as error:  # the latter for a path with a null byte
        msg = f"{path}: cannot be read: {getattr(error, 'strerror', error)}"
        raise ConfigError(msg) from error
    try:
        content = reader(data)
    # tomllib's and json's errors are ValueErrors; PyYAML lets others out where a tag does not fit its text.
    except (ValueError, LookupError, AttributeError, yaml.YAMLError) as error:
        msg = f"{path}: not valid {path.suffix[1:].upper().replace('YML', 'YAML')}: {error}"
        raise ConfigError(msg) from error
    except RecursionError:
        msg = f"{path}: tables in tables too deep to read"
        raise ConfigError(msg) from None
    table = content.get(TABLE) if isinstance(content, Mapping) else None
    if not isinstance(table, Mapping):
        msg = f"{path}: expected a table {TABLE!r} with a key 'strategy', got {_shape(content)}"
        raise ConfigError(msg)
    return table


def _shape(content: object) -> str:
    if isinstance(content, Mapping) and TABLE in content:
        return f"{TABLE}: {short_repr(content[TABLE])}"
    if isinstance(content, Mapping) and content:
        return short_repr(list(content))
    return "nothing" if content is None or isinstance(content, Mapping) else f"a {type(content).__name__}"
