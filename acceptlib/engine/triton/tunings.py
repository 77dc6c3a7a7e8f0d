"""What is chosen for speed, for batches of each size; none of it changes a bit of a result. See docs/kernels.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from acceptlib.engine.triton.call import LANES, Rules
from acceptlib.sampling import FILTERS

if TYPE_CHECKING:
    from acceptlib.engine.triton.forms import RowsForm


class Tuning(NamedTuple):
    """What is chosen for speed, and changes no result.

    Attributes:
        reduce_warps: Warps of a program that reduces rows.
        reduce_registers: Registers of its threads, at most: the fewer, the more programs run at a time. What a row's
            last program does needs more, and spills. 0 for no limit.
        select_registers: The same of a program that finds what is kept of a row.
        collect_programs: Programs that list the entries of a row which a cut may be among.
        emit_warps: Warps of a program of the last stage.
        emit_registers: Registers of its threads, at most, which say how many programs run at a time.
        emit_block: Entries that such a program weighs at a time.
        emit_parts: Parts of a block that are summed up apart; the draw searches one. Either each warp has one, or all
            share one: then warps wait for each other, and the last program reads less.
        loops: Whether programs go through several blocks where there are more than run at a time.
        decides_first: Whether the stop is found before the last stage rather than by every program of it.
        lazy: Whether the stop is found as rows are read, so that rows beyond it are left out, rather than by a stage of
            its own.
        thirds: Whether integers of 64 bits are added up in three parts, which takes fewer instructions.
        row_blocks: Blocks of stopping rows from which on a program that reduces rows goes through two blocks, and four.
        blocks_ahead: Blocks that are on their way while such a program reduces one.
        in_order: Whether a request's last program may wait for those before it, which devices start before it. Else
            programs count who is last.
        looks: How often a program looks for the sums that the others store before it leaves the draw to the last one;
            see `held`.
        runs: Whether programs that reduce rows under min-p alone list runs that may hold what is kept: more work for
            them, and less for the program that finds what is kept.
        law_lanes: Positions that the last stage decides at a time, where it combines the laws of their rows: it is
            fastest with a row for each of its warps.
        shares: Programs that take turns at the rows that may be stopped at, at least, where a mass decides which.
        patience: What `Sizes.large` is multiplied by to tell whether a batch is large enough for this tuning.
    """

    reduce_warps: int
    reduce_registers: int
    select_registers: int
    collect_programs: int
    emit_warps: int
    emit_registers: int
    emit_block: int
    emit_parts: int
    loops: bool
    decides_first: bool
    lazy: bool
    thirds: bool = False
    in_order: bool = False
    looks: int = 64
    runs: bool = False
    row_blocks: tuple[int, int] = (2048, 4096)
    blocks_ahead: int = 0
    law_lanes: int = LANES
    shares: int = 1
    patience: float = 1


SMALL = Tuning(
    reduce_warps=4,
    reduce_registers=0,
    select_registers=0,
    collect_programs=24,
    emit_warps=8,
    emit_registers=128,
    emit_block=4096,
    emit_parts=8,
    loops=False,
    decides_first=False,
    lazy=False,
    in_order=True,
    runs=True,
)
"""For latency: a batch that leaves the device with room to spare."""

SMALL_PROBS = SMALL._replace(emit_warps=4, emit_registers=88, emit_block=2048, emit_parts=4, thirds=True)
"""The same from probabilities, which need no law of a row."""

SMALL_MASSES = SMALL_PROBS._replace(emit_registers=168, loops=True, shares=3)
"""The same where a mass decides, whose programs have more to do before they read: all of them should run at once."""

SMALLER_MASSES = SMALL_MASSES._replace(loops=False, shares=1)
"""The same for requests so few that programs of one block each run at once."""

SMALLER = SMALL._replace(reduce_registers=128, emit_warps=4, emit_block=2048, emit_parts=4, law_lanes=4)
"""For requests so few that twice the programs of the last stage run at a time, of half as many warps."""

SMALLER_FILTERED = SMALLER._replace(reduce_registers=0, emit_warps=SMALL.emit_warps, emit_parts=SMALL.emit_parts)
"""The same under filters, whose cuts a stage finds: the last one has little to decide."""

LARGE = Tuning(
    reduce_warps=4,
    reduce_registers=112,
    select_registers=128,
    collect_programs=8,
    emit_warps=4,
    emit_registers=128,
    emit_block=2048,
    emit_parts=4,
    loops=True,
    decides_first=True,
    lazy=True,
    thirds=True,
    row_blocks=(256, 4096),
)
"""For throughput. So few programs run at a time that stops, found as rows are read, spare rows not yet begun."""

LARGE_FILTERED = LARGE._replace(reduce_registers=104, emit_registers=64, emit_block=1024)
"""The same under filters, which leave little of a row to draw from."""

LARGE_PROBS = LARGE._replace(
    emit_registers=80, emit_block=1024, decides_first=False, lazy=False, row_blocks=(2048, 4096)
)
"""The same from probabilities, where all programs of the last stage decide."""

LARGE_ROWS = LARGE_PROBS._replace(decides_first=True, lazy=True)
"""The same where more is gone through than stopping rows, so much that it pays to find stops meanwhile."""

LARGE_ONE = LARGE._replace(
    reduce_registers=104, emit_registers=64, emit_block=1024, row_blocks=(1024, 4096), patience=1.75
)
"""The same for the rows of one model, which take half as many programs."""

LARGE_ONE_AHEAD = LARGE_ONE._replace(blocks_ahead=2)
"""The same where only the maximum and the sum of a block are found, which leaves registers for the blocks ahead."""

LARGE_BEST = LARGE_ONE._replace(reduce_registers=112, row_blocks=(2048, 4096), patience=1)
"""The same where argmaxes are all that is asked for."""

LARGE_HALF = LARGE._replace(reduce_registers=64, emit_registers=96, patience=1.5)
"""The same for rows of 16-bit numbers, of which a block is half as many bytes."""

LARGE_MIN_P = LARGE_FILTERED._replace(reduce_registers=128, emit_parts=1, patience=1.75)
"""The same under min-p alone, where programs that reduce rows find what is kept of them too."""

LARGE_MASSES = LARGE._replace(reduce_registers=64, emit_registers=152, row_blocks=(2048, 4096), shares=3)
"""The same where a mass decides."""

GROUPS_PATIENCE = 3
"""The patience, at least, where positions go in groups, for rows are searched or summed up once their laws are known,
or where more than argmaxes is found of probabilities."""

MEDIUM = LARGE._replace(
    reduce_registers=64,
    collect_programs=16,
    emit_warps=8,
    emit_block=4096,
    emit_parts=8,
    decides_first=False,
    lazy=False,
    row_blocks=(2048, 4096),
)
"""Between the two: rows are read before a stop would be known."""

MEDIUM_HALF = MEDIUM._replace(reduce_warps=2, reduce_registers=80, emit_warps=4, emit_block=2048, emit_parts=4)
"""The same for both models' rows of 16-bit numbers."""

MEDIUM_MIN_P = MEDIUM._replace(reduce_registers=80, runs=True)
"""The same under min-p alone, as long as what listing runs adds to reading rows is less than it spares afterwards."""


class Tunings(NamedTuple):
    """One for each kind of batch; see the constants of these names."""

    smaller: Tuning = SMALLER
    smaller_filtered: Tuning = SMALLER_FILTERED
    small: Tuning = SMALL
    small_probs: Tuning = SMALL_PROBS
    small_masses: Tuning = SMALL_MASSES
    smaller_masses: Tuning = SMALLER_MASSES
    medium: Tuning = MEDIUM
    medium_half: Tuning = MEDIUM_HALF
    medium_min_p: Tuning = MEDIUM_MIN_P
    large: Tuning = LARGE
    large_filtered: Tuning = LARGE_FILTERED
    large_probs: Tuning = LARGE_PROBS
    large_rows: Tuning = LARGE_ROWS
    large_one: Tuning = LARGE_ONE
    large_one_ahead: Tuning = LARGE_ONE_AHEAD
    large_best: Tuning = LARGE_BEST
    large_half: Tuning = LARGE_HALF
    large_min_p: Tuning = LARGE_MIN_P
    large_masses: Tuning = LARGE_MASSES


TUNINGS = Tunings()


class Sizes(NamedTuple):
    """Numbers of blocks, of BLOCK entries each, from which on a batch is run in another way.

    Attributes:
        small: Blocks of stopping rows, from logits where no mass decides: `SMALLER` or `SMALLER_FILTERED` below, and
            from here on `SMALL`.
        masses: Blocks of stopping rows where a mass decides: `SMALLER_MASSES` below, and from here on `SMALL_MASSES`.
        large_masses: The same: from here on `LARGE_MASSES`.
        medium: Blocks of stopping rows where no mass decides, from which on a batch is not small.
        runs: The same in float32 under min-p alone: `MEDIUM_MIN_P` below, and from here on `MEDIUM`.
        large: Blocks of one model's rows behind the first, which an early stop may spare. As many, times the
            `patience` of the tuning for large batches, make a batch of logits large, whatever else it is, and let one
            of probabilities leave rows out.
    """

    small: int = 133  # more blocks than half the programs that run at a time
    masses: int = 97  # four requests': programs of a block each, for two rows, then do not all run at a time
    large_masses: int = 513  # more than 16 requests'
    medium: int = 265  # more blocks than programs of `SMALL` run at a time on 132 multiprocessors
    runs: int = 577  # more than 18 requests
    large: int = 2048


SIZES = Sizes()


def tuning_of(rules: Rules, num_blocks: int, num_spared: int, target: RowsForm, draft: RowsForm | None) -> Tuning:
    """Return how to run a plan on a batch.

    Args:
        rules: The plan's.
        num_blocks: Blocks of stopping rows.
        num_spared: Blocks of a model's rows that are left out if all requests stop at their first position.
        target: The target's rows.
        draft: The draft's, if there are any.
    """
    if rules.mass_scalar >= 0:
        few = TUNINGS.smaller_masses if num_blocks < SIZES.masses else TUNINGS.small_masses
        return few if num_blocks < SIZES.large_masses else TUNINGS.large_masses
    small = num_blocks < SIZES.medium
    if not target.is_logits:
        if small:
            return TUNINGS.small_probs
        goes_through_rows = rules.goes_through_rows or (draft is not None and draft.is_logits)
        patience = GROUPS_PATIENCE if rules.sums or rules.top_k else TUNINGS.large_rows.patience
        leaves_rows = goes_through_rows and num_spared >= SIZES.large * patience
        return TUNINGS.large_rows if leaves_rows else TUNINGS.large_probs
    large = _large(rules, target, draft)
    patience = max(large.patience, GROUPS_PATIENCE) if _in_groups(rules, target, draft) else large.patience
    if num_spared >= SIZES.large * patience:
        return large
    if small and _draws_listed(rules, target, draft):
        return TUNINGS.small  # with few programs, since only one of them has anything to do
    if num_blocks < SIZES.small and small:
        return TUNINGS.smaller_filtered if filters_of(target, draft) else TUNINGS.smaller
    if small:
        return TUNINGS.small
    if num_blocks < SIZES.runs and target.dtype == torch.float32 and filters_of(target, draft) == {"min_p"}:
        return TUNINGS.medium_min_p
    return TUNINGS.medium if draft is None or target.dtype == torch.float32 else TUNINGS.medium_half


def _large(rules: Rules, target: RowsForm, draft: RowsForm | None) -> Tuning:
    """Return how to run a plan on a large batch of logits."""
    filters = filters_of(target, draft)
    if filters == {"min_p"}:
        return TUNINGS.large_min_p
    if target.dtype != torch.float32:
        return TUNINGS.large_half
    if draft is not None:
        return TUNINGS.large_filtered if filters else TUNINGS.large
    if rules.draws or rules.reads_target:
        more = filters or rules.entropy_scalar >= 0 or rules.top_k
        return TUNINGS.large_one if more else TUNINGS.large_one_ahead
    return TUNINGS.large_best


def _draws_listed(rules: Rules, target: RowsForm, draft: RowsForm | None) -> bool:
    """Return whether a draw goes through what is listed of a row, as long as that is little; see `Call.lists`."""
    lists = target.top_k or (target.min_p and not target.top_p)
    return bool(lists and rules.draws and rules.within_target and (draft is None or draft.is_logits))


def _in_groups(rules: Rules, target: RowsForm, draft: RowsForm | None) -> bool:
    """Return whether a large batch of logits takes a stage after the one that reads rows."""
    filters, sums = filters_of(target, draft), len(rules.sums)
    with_laws = not filters and sums <= (rules.entropy_scalar >= 0)  # entropies, and largest entries
    return not filters <= {"min_p"} or ((sums > 0 or rules.top_k > 0) and not with_laws)


def filters_of(target: RowsForm, draft: RowsForm | None) -> set[str]:
    """Return what filters rows of either model."""
    models = (target,) if draft is None else (target, draft)
    return {name for name in FILTERS for model in models if getattr(model, name)}
