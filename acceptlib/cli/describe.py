"""What there is to say about strategies and their sources, as data."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Union, get_args, get_origin

from pydantic_core import to_jsonable_python

from acceptlib import registry

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from acceptlib.registry import Entry
    from acceptlib.strategy import AcceptanceStrategy

PARTS: Final = ("Guarantee", "Formula", "Source")
"""Labelled paragraphs of a strategy's docstring."""

BOUNDS: Final = {
    "ge": ("minimum", ">="),
    "gt": ("exclusive_minimum", ">"),
    "le": ("maximum", "<="),
    "lt": ("exclusive_maximum", "<"),
    "multiple_of": ("multiple_of", "multiple of"),
    "min_length": ("min_length", "length >="),
    "max_length": ("max_length", "length <="),
}
"""Attribute of a pydantic constraint -> its name in a record, as in JSON Schema, and what people read."""

SIGNS: Final = dict(BOUNDS.values())
"""Name in a record -> what people read."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a strategy.

    Attributes:
        name: Its name.
        type: Its annotation, as text.
        required: Whether it has no default.
        default: The default; None where it is required.
        constraints: Numbers that bound it, by the names of `SIGNS`.
        entry_constraints: The same for the entries of a container.
        description: What it does.
    """

    name: str
    type: str
    required: bool
    default: Any
    constraints: Mapping[str, float]
    entry_constraints: Mapping[str, float]
    description: str

    @property
    def cells(self) -> list[str]:
        """What a table shows: name, type, bounds, default, description."""
        entries = " and ".join(_said(self.entry_constraints))
        bounds = ", ".join([*_said(self.constraints), *([f"each {entries}"] if entries else [])])
        default = "required" if self.required else repr(self.default)
        return [self.name, self.type, bounds, default, self.description]

    def record(self) -> dict[str, Any]:
        """Return it for programs: values as JSON has them, and bounds one by one, None where there is none."""
        return {
            "name": self.name,
            "type": self.type,
            "required": self.required,
            "default": to_jsonable_python(self.default, fallback=repr),
            **{name: self.constraints.get(name) for name in SIGNS},
            "entries": dict(self.entry_constraints),
            "description": self.description,
        }


OPTION_FIELDS: Final = ("name", "type", "required", "default", *SIGNS, "entries", "description")


def summary(strategy: type[AcceptanceStrategy]) -> str:
    """Return the first sentence of the docstring, without its full stop."""
    paragraphs = _paragraphs(strategy)
    return re.split(r"\.\s", paragraphs[0] + " ", maxsplit=1)[0].strip() if paragraphs else ""


def parts(strategy: type[AcceptanceStrategy]) -> dict[str, str]:
    """Return the docstring's paragraphs by label; the first is its summary, and unlabelled ones are notes."""
    found: dict[str, str] = {}
    for number, paragraph in enumerate(_paragraphs(strategy)):
        label, colon, text = paragraph.partition(":")
        if number == 0:
            found["Summary"] = paragraph
        elif colon and label in PARTS:
            found[label] = text.strip()
        else:
            found["Notes"] = f"{found['Notes']} {paragraph}" if "Notes" in found else paragraph
    return found


def options(strategy: type[AcceptanceStrategy]) -> list[Option]:
    """Return what the strategy's pydantic model says about each option."""
    return [
        Option(
            name,
            _type(field.annotation),
            field.is_required(),
            None if field.is_required() else field.get_default(call_default_factory=True),
            _constraints(field.metadata),
            _entry_constraints(field),
            field.description or "",
        )
        for name, field in strategy.Options.model_fields.items()
    ]


def traits(strategy: AcceptanceStrategy) -> dict[str, str]:
    """Return the traits under the strategy's options, without those that say nothing."""
    resolved = strategy.resolve_traits()
    neutral = ", ".join(
        f"{name} = {value:g}" if isinstance(value, float) else f"{name} = {value}"
        for name, value in resolved.neutral.items()
    )
    said = {
        "guarantee": resolved.guarantee,
        "bound": resolved.bound,
        "stops at": resolved.stop.replace("_", " "),
        "window": str(resolved.window or ""),
        "top_k": str(resolved.top_k or ""),
        "state": ", ".join(resolved.state),
        "recovered token": resolved.recovered,
        "bonus token": resolved.bonus,
        "topology": resolved.topology,
        "neutral": f"{neutral}, then equal to {resolved.neutral_equals}" if neutral else "",
    }
    return {name: text for name, text in said.items() if text}


def reads(strategy: AcceptanceStrategy) -> list[str]:
    """Return what the rules read, sorted; empty for a strategy that overrides `verify`."""
    return sorted(strategy.plan.reads) if strategy.plan else []


def origin(entry: Entry) -> dict[str, str]:
    """Return where a strategy came from."""
    try:
        file = inspect.getsourcefile(entry.strategy) or "unknown"
    except (OSError, TypeError):  # written in an interactive session
        file = "unknown"
    name = f"{entry.strategy.__module__}.{entry.strategy.__qualname__}"
    return {"distribution": entry.distribution, "class": name, "file": file}


def record(entry: Entry, strategy: AcceptanceStrategy | None) -> dict[str, Any]:
    """Return everything about one strategy, for programs."""
    described = parts(entry.strategy)
    return {
        "name": entry.strategy.name,
        "aliases": registry.aliases(entry.strategy),
        **{name.lower(): described.get(name, "") for name in ("Summary", *PARTS, "Notes")},
        "traits": traits(strategy) if strategy else {},
        "reads": reads(strategy) if strategy else [],
        "options": [option.record() for option in options(entry.strategy)],
        "origin": origin(entry),
    }


def _paragraphs(strategy: type[AcceptanceStrategy]) -> list[str]:
    # The class's own docstring: inspect.getdoc would show the base class's for one that has none.
    text = inspect.cleandoc(strategy.__dict__.get("__doc__") or "")
    return [" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text) if paragraph.strip()]


def _type(annotation: Any) -> str:
    """Return a type in words, without what `Annotated` adds to it: bounds are said elsewhere."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(parts[0])
    if origin in {Union, UnionType}:
        return " | ".join(map(_type, parts))
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, parts))}]"
    if annotation is NoneType:
        return "None"
    name = getattr(origin or annotation, "__name__", str(annotation))
    within = ", ".join("..." if part is ... else _type(part) for part in parts)
    return f"{name}[{within}]" if parts else name


def _entry_constraints(field: FieldInfo) -> dict[str, float]:
    """Return the bounds of a container's entries, found in annotations within the annotation."""
    found: dict[str, float] = {}
    waiting: list[Any] = [field.annotation]
    while waiting:
        annotation = waiting.pop()
        for metadata in getattr(annotation, "__metadata__", ()):
            found |= _constraints(getattr(metadata, "metadata", [metadata]))
        waiting += getattr(annotation, "__args__", ())
    return found


def _constraints(metadata: list[Any]) -> dict[str, float]:
    return {
        name: value
        for constraint in metadata
        for attribute, (name, _) in BOUNDS.items()
        if isinstance(value := getattr(constraint, attribute, None), int | float)
    }


def _said(constraints: Mapping[str, float]) -> list[str]:
    return [f"{SIGNS[name]} {value:g}" for name, value in constraints.items()]
