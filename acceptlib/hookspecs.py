"""The one hook that a package implements to provide strategies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pluggy

if TYPE_CHECKING:
    from collections.abc import Iterable

    from acceptlib.strategy import AcceptanceStrategy

NAMESPACE: Final = "acceptlib"
"""Namespace of the hooks, and the entry-point group that packages declare."""

hookspec = pluggy.HookspecMarker(NAMESPACE)
hookimpl = pluggy.HookimplMarker(NAMESPACE)
"""Marks a package's `acceptlib_strategies`, which returns its strategy classes."""


@hookspec
def acceptlib_strategies() -> Iterable[type[AcceptanceStrategy]]:
    """Return the strategy classes of a package.

    Called once, when strategies are first looked up. An empty list provides none; None is reported as a missing
    `return`. Since acceptlib 0.1.
    """
    raise NotImplementedError  # pluggy calls implementations, never the specification
