"""Strategies by name: the built-ins and those of installed packages."""

from __future__ import annotations

import functools
import threading
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from acceptlib import plugins
from acceptlib.errors import (
    AcceptlibError,
    OptionError,
    PluginError,
    StrategyDefinitionError,
    UnknownStrategyError,
    one_line,
    short_repr,
    suggest,
)

if TYPE_CHECKING:
    from acceptlib.engine.backends import Choice
    from acceptlib.strategy import AcceptanceStrategy


MAX_REASONS: Final = 3
"""Most problems of plugins that an error repeats; of more it names the plugins alone."""

_LOADING: ContextVar[bool] = ContextVar("loading", default=False)
"""Whether packages are being loaded: one that looks strategies up meanwhile must not load them all once more."""

_ONE_AT_A_TIME: Final = threading.RLock()
"""Packages are loaded once, whichever threads ask first; one that is being loaded may ask too."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One name of a strategy.

    Attributes:
        name: The name or alias.
        strategy: Its class.
        distribution: Where it came from.
    """

    name: str
    strategy: type[AcceptanceStrategy]
    distribution: str

    def create(self, /, **arguments: Any) -> AcceptanceStrategy:
        """Create the strategy; see `registry.create`."""
        try:
            found = self.strategy(**arguments)
        except OptionError as error:
            msg = f"{error} See `acceptlib show {self.name}`."
            raise OptionError(msg) from None
        except AcceptlibError:
            raise
        except (Exception, SystemExit) as error:
            msg = f"strategy {self.name!r} of {self.distribution}: creating it raised {one_line(error)}"
            raise PluginError(msg) from error
        if not hasattr(found, "_backend"):
            msg = f"strategy {self.name!r} of {self.distribution}: expected an `__init__` that calls super()'s"
            raise StrategyDefinitionError(msg)
        return found


class _Loaded(NamedTuple):
    """Entries by name, what is wrong with names that several provide, and the plugins."""

    entries: dict[str, Entry]
    conflicts: dict[str, str]
    plugins: list[plugins.Plugin]


@functools.cache
def _load(*, third_parties: bool) -> _Loaded:
    """Load the built-ins and, if `third_parties`, the installed packages."""
    token = _LOADING.set(True)
    try:
        loaded = plugins.discover(None if third_parties else ())
    finally:
        _LOADING.reset(token)
    entries: dict[str, Entry] = {}
    conflicts: dict[str, str] = {}
    names = {strategy.name for plugin in loaded for strategy in plugin.strategies}
    for plugin in loaded:
        # A package's alias yields to another's name, which would otherwise cost that one its strategy.
        kept = set() if plugin is loaded[0] else names
        for strategy in plugin.strategies:
            for name in (strategy.name, *(alias for alias in strategy.aliases if alias not in kept)):
                if name in entries and entries[name].strategy is strategy:
                    continue
                if name not in entries:
                    entries[name] = Entry(name, strategy, plugin.distribution)
                    continue
                other, this = entries[name].distribution, plugin.distribution
                both = f"Both {other} and {this} provide a strategy {name!r}; uninstall one."
                conflicts[name] = f"{this} provides two strategies {name!r}; rename one." if other == this else both
    built_in = {name for name, entry in entries.items() if entry.distribution == loaded[0].distribution}
    for name in conflicts.keys() - built_in:
        del entries[name]
    return _Loaded(entries, conflicts, loaded)


def _loaded(*, third_parties: bool = True) -> _Loaded:
    """Return what `_load` does; to a package that is being loaded, the built-ins alone."""
    with _ONE_AT_A_TIME:
        return _load(third_parties=third_parties and plugins.third_parties_enabled() and not _LOADING.get())


def available() -> list[str]:
    """Return the names of all strategies, sorted: built-in ones and those of installed packages; no aliases."""
    return _names(_loaded().entries)


def _names(entries: dict[str, Entry]) -> list[str]:
    """Return the names among entries, sorted, without aliases: a strategy may have lost its name and kept these."""
    return sorted(name for name, entry in entries.items() if name == entry.strategy.name)


def aliases(strategy: type[AcceptanceStrategy]) -> list[str]:
    """Return the aliases under which a strategy is found: without those that are another's names."""
    entries = _loaded().entries
    return [alias for alias in strategy.aliases if alias in entries and entries[alias].strategy is strategy]


def loaded_plugins() -> list[plugins.Plugin]:
    """Return every source of strategies, with what went wrong."""
    entries, conflicts, loaded = _loaded()
    found = []
    for plugin in loaded:
        problems = {
            name: f"the name {name!r} is taken by {entries[name].distribution}" if name in entries else conflicts[name]
            for strategy in plugin.strategies
            for name in (strategy.name, *strategy.aliases)
            if name not in entries or entries[name].strategy is not strategy
        }
        usable = tuple(
            strategy
            for strategy in plugin.strategies
            if strategy.name in entries and entries[strategy.name].strategy is strategy
        )
        found.append(replace(plugin, strategies=usable, problems=(*plugin.problems, *problems.values())))
    return found


def find(name: str, *, third_parties: bool = True) -> Entry:
    """Return the entry of a name or alias.

    Args:
        name: What to look up.
        third_parties: Whether installed packages count, unless the environment turns them off.

    Raises:
        UnknownStrategyError: There is none; the message names what there is.
        PluginError: Two packages, or one twice, provide it.
    """
    if not isinstance(name, str):
        msg = f"expected the name of a strategy, a str, got {short_repr(name)}"
        raise UnknownStrategyError(msg)
    entries, conflicts, loaded = _loaded(third_parties=third_parties)
    if name in entries:
        return entries[name]
    if name in conflicts:
        raise PluginError(conflicts[name])
    names = _names(entries)
    broken = [plugin for plugin in loaded if plugin.problems]
    found = [(plugin, problem) for plugin in broken for problem in plugin.problems]
    # If no problem mentions the name, any of the broken plugins might have provided it.
    likely = [(plugin, problem) for plugin, problem in found if name == plugin.name or repr(name) in problem]
    reasons = [f"{plugin.distribution}: {problem.removesuffix('.')}" for plugin, problem in likely or found]
    if len(reasons) > MAX_REASONS:
        reasons = [plugin.distribution for plugin in broken]
    hint = f" Plugins with problems: {'; '.join(reasons)}. See `acceptlib plugins`." if broken else ""
    if not (third_parties and plugins.third_parties_enabled()):
        hint += " Those of installed packages are turned off."
    msg = f"Unknown strategy {short_repr(name)}.{suggest(name, entries)} Available: {', '.join(names)}.{hint}"
    raise UnknownStrategyError(msg)


def create(name: str, /, *, backend: Choice = "auto", **options: Any) -> AcceptanceStrategy:
    """Create a strategy by name.

    Args:
        name: A name from `available()`, or an alias.
        backend: `auto`, `torch` or `triton`.
        **options: The strategy's options; `acceptlib show NAME` lists them.

    Raises:
        UnknownStrategyError: No strategy has this name.
        PluginError: Two packages, or one twice, provide it, or the package's own code raised something else.
        OptionError: An option does not exist or is out of range.
        BackendError: There is no such backend.
        StrategyDefinitionError: The strategy's class does not fit the interface under these options.
    """
    return find(name).create(backend=backend, **options)


def as_strategy(strategy: str | AcceptanceStrategy) -> AcceptanceStrategy:
    """Return a strategy, or the one of a name.

    Raises:
        InputError: `strategy` is neither a name nor a strategy.
        UnknownStrategyError: No strategy has this name.
    """
    from acceptlib.strategy import expect_strategy  # noqa: PLC0415 - a module that packages import as they are loaded

    found = create(strategy) if isinstance(strategy, str) else strategy
    return expect_strategy(found, "a name or what acceptlib.create returns")
