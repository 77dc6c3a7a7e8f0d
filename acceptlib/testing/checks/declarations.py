"""What a strategy says about itself: what it promises, and that what it declares is of use."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from acceptlib.errors import OptionError
from acceptlib.strategy import AcceptanceStrategy, Options
from acceptlib.testing.subject import Skipped, Subject, require


def check_promise(subject: Subject) -> None:
    """Lossy: the strategy says what it promises instead: a bound that can be checked, a neutral setting, or `none`.

    Catches what no number can: a rule that quietly is no rejection sampling any more, such as thresholds other than 1
    in an engine's default settings.
    """
    traits = subject.traits
    require(
        bool(traits.bound or traits.neutral),
        "Traits declares neither a bound nor a neutral setting: say bound='none' if there is none",
    )
    row, strategy = torch.full((4,), 1 / 4, dtype=torch.float64), type(subject.strategy)
    checkable, own = subject.strategy.bound_excess(row, row, row) is not None, "bound_excess" in vars(strategy)
    declared = f"Traits declares bound={traits.bound!r}"
    if traits.bound in {"", "none"}:
        require(not (checkable and own), f"{declared}, and bound_excess checks one: say in a few words which")
    else:
        instead = "bound_excess returned None" if own else "nothing can check it: override bound_excess"
        require(checkable, f"{declared}, and {instead}")


def check_options_are_read(subject: Subject) -> None:
    """Every option, row sum and carry is read by a rule; an option may be read by a method instead.

    Catches an option that is silently ignored: two settings of it are then one strategy under two names. Also a rule
    that reads a quantity of acceptlib's by mistake, where it has a sum or a carry of its own.
    """
    plan = subject.plan
    for row_sum in plan.row_sums:
        require(
            row_sum in plan.reads, f"no rule reads the row sum {row_sum!r}: read it in a rule by name, or remove it"
        )
    if plan.carry is not None:
        readers = [rule for rule in (plan.accept, plan.forgive, plan.residual) if rule is not None]
        read = any("carry" in rule.names for rule in readers)
        require(read, "no rule but `carry` itself reads the carry: read it in a rule by name, or remove it")
    by_methods = _read_by_methods(subject)
    for option in type(subject.strategy).Options.model_fields:
        read = option in plan.reads | by_methods
        require(read, f"no rule or method reads the option {option!r}: read it in a rule by name, or remove it")


def _read_by_methods(subject: Subject) -> set[str]:
    """Return the options that a strategy asks itself for as it is created, and as its state begins and advances.

    Under these options or by default: one option may stand in for another.
    """
    read: set[str] = set()
    strategy, base = subject.strategy, type(subject.strategy)
    if base.__init__ is not AcceptanceStrategy.__init__:
        msg = "what `__init__` makes of the options is not looked into"
        raise Skipped(msg)
    noting = type(base.__name__, (base,), {"options": property(lambda made: _Noted(vars(made)["_options"], read))})
    for options in ({}, strategy.options.model_dump()):
        with contextlib.suppress(OptionError):  # some have no default
            made = noting(backend=strategy.backend, **options)
            subject.with_strategy(made).state([0])
    return read


class _Noted:
    """Options that note which ones are asked for: all of them where they are asked for together."""

    def __init__(self, options: Options, read: set[str]) -> None:
        """Note in `read`."""
        self._options, self._read = options, read

    def __getattr__(self, name: str) -> Any:
        """Return an option, or whatever else the options have."""
        names = {*type(self._options).model_fields}
        self._read |= names & {name} or names
        return getattr(self._options, name)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Return names and values, as the options do."""
        self._read |= {*type(self._options).model_fields}
        return iter(self._options)
