"""The built-in strategies, one file each, registered through the hook that third parties use."""

from __future__ import annotations

from acceptlib.hookspecs import hookimpl
from acceptlib.strategies.block import Block
from acceptlib.strategies.fly import Fly
from acceptlib.strategies.greedy import Greedy
from acceptlib.strategies.lenience import Lenience
from acceptlib.strategies.mixture import Mixture
from acceptlib.strategies.rejection import Rejection
from acceptlib.strategies.synthetic import Synthetic
from acceptlib.strategies.target_only import TargetOnly
from acceptlib.strategies.tv_budget import TVBudget
from acceptlib.strategies.typical import Typical
from acceptlib.strategy import AcceptanceStrategy


@hookimpl
def acceptlib_strategies() -> list[type[AcceptanceStrategy]]:
    """Return the built-in strategies."""
    return [Block, Fly, Greedy, Lenience, Mixture, Rejection, Synthetic, TargetOnly, TVBudget, Typical]
