"""Guarded discovery of strategies: what loaded, from which distribution, and what failed and why.

pluggy's own loader stops at the first entry point that fails to import and passes over a second plugin of the same
name. Here each entry point is loaded by itself, and a failure is a record, never fatal to the others.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Final

import pluggy

from acceptlib import hookspecs, strategies
from acceptlib.errors import one_line, suggest
from acceptlib.strategy import INTERFACE_VERSION, AcceptanceStrategy

DISABLE_VARIABLE: Final = "ACCEPTLIB_DISABLE_PLUGINS"
"""Set to anything but an empty string or 0, this environment variable keeps third-party packages from loading."""

BUILT_IN: Final = "acceptlib"


@dataclass(frozen=True, slots=True)
class Plugin:
    """One source of strategies.

    Attributes:
        name: Name of the entry point; `acceptlib` for the built-ins.
        distribution: Distribution and version it came from.
        strategies: The classes it brought that can be used.
        problems: What went wrong, in sentences.
    """

    name: str
    distribution: str
    strategies: tuple[type[AcceptanceStrategy], ...]
    problems: tuple[str, ...]


def third_parties_enabled() -> bool:
    """Return whether the environment lets third-party packages load."""
    return os.environ.get(DISABLE_VARIABLE, "") in {"", "0"}


def discover(entry_points: Iterable[metadata.EntryPoint] | None) -> list[Plugin]:
    """Load the built-ins and every entry point in group `acceptlib`.

    Args:
        entry_points: Instead of the installed ones; None for these.

    Returns:
        One record a source, the built-ins first.
    """
    found = [_collect(BUILT_IN, _own_distribution(), strategies)]
    if entry_points is None:
        entry_points = metadata.entry_points(group=hookspecs.NAMESPACE)
    for entry_point in sorted(entry_points, key=lambda entry_point: (entry_point.name, entry_point.value)):
        with contextlib.redirect_stdout(sys.stderr):  # what a package prints is no part of a command's JSON
            found.append(_load(entry_point))
    return found


def _load(entry_point: metadata.EntryPoint) -> Plugin:
    """Import what an entry point names, and collect its strategies."""
    distribution = f"{entry_point.dist.name} {entry_point.dist.version}" if entry_point.dist else "unknown"
    try:
        plugin = entry_point.load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - an import may exit, or panic in Rust; it is recorded
        problem = f"importing {entry_point.value!r} raised {one_line(error)}"
        return Plugin(entry_point.name, distribution, (), (problem,))
    return _collect(entry_point.name, distribution, plugin)


def _own_distribution() -> str:
    try:
        return f"acceptlib {metadata.version('acceptlib')}"
    except metadata.PackageNotFoundError:
        return "acceptlib (not installed)"  # run from its sources


def _collect(name: str, distribution: str, plugin: object) -> Plugin:
    """Register one plugin by itself and call its hook."""
    manager = pluggy.PluginManager(hookspecs.NAMESPACE)
    manager.add_hookspecs(hookspecs)
    problems: list[str] = []
    classes: list[type[AcceptanceStrategy]] = []
    try:
        manager.register(plugin, name)
        problems += _unknown_hooks(manager, plugin)
        implements = bool(manager.get_hookcallers(plugin))
        hook = manager.hook.acceptlib_strategies
        results = hook()
        if len(results) < len(hook.get_hookimpls()):  # pluggy leaves out what is None
            problems.append(
                "its hook returned None: expected a list of strategy classes, [] for none; is a `return` missing?"
            )
        for returned in results:
            listed = isinstance(returned, Iterable) and not isinstance(returned, str)
            if not listed:
                problems.append(f"its hook returned {returned!r}: expected a list of strategy classes")
            for candidate in returned if listed else ():
                problem = _reject(candidate, classes)
                if problem:
                    problems.append(problem)
                else:
                    classes.append(candidate)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - as above
        problems.append(f"its hook raised {one_line(error)}")
    if not problems and not implements:
        problems.append(
            "it implements no hook: expected a function acceptlib_strategies marked with acceptlib.hookimpl"
        )
    return Plugin(name, distribution, tuple(classes), tuple(problems))


def _unknown_hooks(manager: pluggy.PluginManager, plugin: object) -> list[str]:
    """Name implementations of hooks that do not exist, as a misspelt name makes them."""
    known = hookspecs.acceptlib_strategies.__name__
    return [
        f"it implements an unknown hook {caller.name!r}.{suggest(caller.name, [known])} Available: {known}."
        for caller in manager.get_hookcallers(plugin) or ()
        if not caller.has_spec()
    ]


def _reject(candidate: object, earlier: Sequence[type[AcceptanceStrategy]]) -> str | None:
    """Return why `candidate` cannot be used as a strategy class beside those before it."""
    if (
        not isinstance(candidate, type)
        or not issubclass(candidate, AcceptanceStrategy)
        or candidate is AcceptanceStrategy
    ):
        return f"its hook returned {candidate!r}: expected subclasses of acceptlib.AcceptanceStrategy"
    if candidate in earlier:
        return f"its hook returned {candidate!r} twice: expected each class once"
    if candidate.interface_version != INTERFACE_VERSION:
        return (
            f"strategy {candidate.name!r} was written for interface version {candidate.interface_version!r}; this "
            f"acceptlib has {INTERFACE_VERSION}: upgrade the older of the two"
        )
    return None
