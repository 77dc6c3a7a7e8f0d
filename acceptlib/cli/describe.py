"""What there is to say about strategies and their sources, as data."""

from __future__ import annotations

import inspect
import re
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Final

from acceptlib import registry

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from acceptlib.registry import Entry
    from acceptlib.strategy import AcceptanceStrategy

PARTS: Final = ("Guarantee", "Formula", "Source")
"""Labelled paragraphs of a strategy's docstring."""

BOUNDS: Final = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<", "multiple_of": "multiple of", "min_length": "length >="}


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a strategy."""

    name: str
    type: str
    bounds: str
    default: str
    description: str


OPTION_FIELDS: Final = tuple(field.name for field in fields(Option))


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
        Option(name, _type(field), _bounds(field), _default(field), field.description or "")
        for name, field in strategy.Options.model_fields.items()
    ]


def traits(strategy: AcceptanceStrategy) -> dict[str, str]:
    """Return the traits under the strategy's options, those that say something."""
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
    return {"distribution": entry.distribution, "class": _qualified(entry.strategy), "file": file}


def record(entry: Entry, strategy: AcceptanceStrategy | None) -> dict[str, Any]:
    """Return everything about one strategy, for programs."""
    described = parts(entry.strategy)
    return {
        "name": entry.strategy.name,
        "aliases": registry.aliases(entry.strategy),
        **{name.lower(): described.get(name, "") for name in ("Summary", *PARTS, "Notes")},
        "traits": traits(strategy) if strategy else {},
        "reads": reads(strategy) if strategy else [],
        "options": [asdict(option) for option in options(entry.strategy)],
        "origin": origin(entry),
    }


def _paragraphs(strategy: type[AcceptanceStrategy]) -> list[str]:
    # The class's own docstring: inspect.getdoc would show the base class's for one that has none.
    text = inspect.cleandoc(strategy.__dict__.get("__doc__") or "")
    return [" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text) if paragraph.strip()]


def _type(field: FieldInfo) -> str:
    if isinstance(field.annotation, type) and not getattr(field.annotation, "__args__", ()):
        return field.annotation.__name__
    text = str(field.annotation).replace("typing.", "")
    # Annotated[float, FieldInfo(...)] says its bounds elsewhere.
    text = re.sub(r"Annotated\[(\w+), .*?\)\]\)?\]", r"\1", text)
    return text.replace("NoneType", "None")


def _bounds(field: FieldInfo) -> str:
    return ", ".join(_constraints(field.metadata) + _inner(field))


def _inner(field: FieldInfo) -> list[str]:
    """Return the bounds of a container's entries, found in annotations within the annotation."""
    found: list[str] = []
    waiting: list[Any] = [field.annotation]
    while waiting:
        annotation = waiting.pop()
        for metadata in getattr(annotation, "__metadata__", ()):
            found += _constraints(getattr(metadata, "metadata", [metadata]))
        waiting += getattr(annotation, "__args__", ())
    return ["each " + " and ".join(found)] if found else []


def _constraints(metadata: list[Any]) -> list[str]:
    return [
        f"{sign} {getattr(constraint, name):g}"
        for constraint in metadata
        for name, sign in BOUNDS.items()
        if isinstance(getattr(constraint, name, None), int | float)
    ]


def _default(field: FieldInfo) -> str:
    return "required" if field.is_required() else repr(field.get_default(call_default_factory=True))


def _qualified(strategy: type[AcceptanceStrategy]) -> str:
    return f"{strategy.__module__}.{strategy.__qualname__}"
