"""The stages of a call, in the order of their launches."""

import math
from collections.abc import Iterator
from typing import NamedTuple

from acceptlib.engine.triton.call import Call
from acceptlib.engine.triton.rows import BOTH, DRAFT, TARGET

READERS = frozenset({"reduce", "sum"})
"""Stages that go through whole rows."""

GROUP_BLOCKS = 4096
"""Blocks of stopping rows that a group of positions is meant to have where their rows take more than one launch.

Groups are read one after the other: the smaller they are, the fewer rows beyond a stop are read, and the more launches
wait in line.
"""

ACCEPTANCE = 0.6
"""Share of drafted tokens that is assumed to be accepted, to estimate how many requests get to a position."""


class Stage(NamedTuple):
    """One launch of the kernel: `name` is what it does.

    Attributes:
        first, end: The positions of its grid, from the first to before the end; 0 where it has none.
        rows: Whose rows it goes through: TARGET, DRAFT or BOTH.
        late: Whether it runs beside the stage before, and ends after it.
    """

    name: str
    first: int = 0
    end: int = 0
    rows: int = BOTH.value
    late: bool = False


def stages(call: Call, most: int, num_blocks: int, *, beside: bool) -> tuple[Stage, ...]:
    """Return the stages of a call in order, given the blocks of stopping rows at a position.

    With `beside`, rows without filters are reduced while what is kept of the others is searched for.
    """
    reduces = (any(call.logits) or any(call.best)) and not call.in_one_pass
    num_positions = 1 if call.foreseen else most + 1  # whichever row is at the stop
    end_of_sums = most + 1 if call.sums_bonus_rows else most
    in_groups = call.lazy and reduces and (call.needs_sums or call.selects)
    found = []
    filtered, rest = (TARGET, DRAFT) if call.filtered[TARGET] else (DRAFT, TARGET)
    for first, end in groups(num_positions, num_blocks) if in_groups else [(0, num_positions)]:
        if reduces:
            found.append(Stage("reduce", first, end, rows=(filtered if beside else BOTH).value))
        if call.selects:
            found.append(Stage("select", first, end))
        if beside:
            found.append(Stage("reduce", first, end, rows=rest.value, late=True))
        if call.num_collected:
            found += [Stage("collect", first, end), Stage("finish", first, end)]
        if call.needs_sums and first < end_of_sums:
            found.append(Stage("sum", first, min(end, end_of_sums)))
    if call.decided and not call.lazy:
        found.append(Stage("decide"))
    return (*found, Stage("emit"))


def groups(num_positions: int, num_blocks: int) -> Iterator[tuple[int, int]]:
    """Yield the first position of each group and its end, given the blocks of stopping rows at a position.

    The fewer requests are expected to get there, the more positions a group has. Where tokens are drafted there are two
    groups at least: how many tokens are drafted must not decide whether any stage waits for the group before.
    """
    first = 0
    while first < num_positions:
        expected = max(num_blocks * ACCEPTANCE**first, 1)
        limit = num_positions if first else max(num_positions - 1, 1)
        end = min(first + math.ceil(GROUP_BLOCKS / expected), limit)
        yield first, end
        first = end
