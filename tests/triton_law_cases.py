"""Laws and sums of rows as the kernels find them: what `test_triton_engine.py` checks, in a process of its own.

TRITON_INTERPRET=1 python triton_law_cases.py interpreted:laws results.json
"""

# ruff: noqa: ANN001, ANN201, N803, PLR0917 - jit functions; their constants are in capitals

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import quick_interpreter
import torch
import triton
import triton.language as tl
import triton_calls
import triton_engine_cases as cases

import acceptlib
from acceptlib import AcceptanceStrategy, Traits, VerifyResult, ops, row_sum, rule
from acceptlib.engine import process, torch_engine
from acceptlib.engine.triton import bins, engine, held, listed, lists, min_p, partials, records, select, sums, tunings
from acceptlib.engine.triton import call as engine_call
from acceptlib.engine.triton import laws as kernel_laws
from acceptlib.engine.triton import pairs as kernel_pairs
from acceptlib.engine.triton import rows as kernel_rows
from acceptlib.ops import Value


def law_rows() -> dict[str, torch.Tensor]:
    """Return rows [V] of logits by what they are like."""
    vocab_size = triton_calls.FILTERED_SHAPE[2]
    generator = torch.Generator().manual_seed(1)
    normal = torch.randn(vocab_size, generator=generator)
    return {
        "random": 3 * normal,
        "tied": (2 * normal).round(),
        "constant": torch.full((vocab_size,), -7.0),
        "flat": normal / 100,
        "nearly-one-hot": torch.where(torch.arange(vocab_size) == 17, 12.0, normal),
        "masked": torch.where(torch.arange(vocab_size) % 3 == 0, normal.bfloat16().float(), -math.inf),
        "one-left": torch.where(torch.arange(vocab_size) == 17, 0.0, -math.inf),
        "signed-zeros": torch.tensor([0.0, -0.0, 1.0, -1.0]).repeat(vocab_size // 4),
        "no-law": torch.full((vocab_size,), -math.inf),
    }


def wide_rows() -> dict[str, torch.Tensor]:
    """Return rows [V] of more sub-blocks than a program has threads."""
    generator = torch.Generator().manual_seed(4)
    normal = torch.randn(9000, generator=generator)
    apart, together = normal - 20, normal - 20
    apart[torch.arange(7, 9000, 100)] = 30 - torch.arange(90) / 8  # each in a sub-block of its own
    together[torch.arange(4000, 4120)] = 30 - torch.arange(120) / 8
    uneven = normal / 3 + 3 * (torch.arange(9000) // 32 % 3 == 0)  # a sample sees what weighs most alone
    rows = {"normal": 3 * normal, "apart": apart, "together": together, "tied": normal.round(), "uneven": uneven}
    # One more entry is left than a bin's are compared at a time.
    one_more = torch.arange(9000) % 250 == 3
    rows["one-more"] = torch.where(one_more & (one_more.cumsum(0) <= lists.COMPARED.value + 1), 0.0, -math.inf)
    # Few sub-blocks have any entry left: fewer than k are wanted, and some more.
    masked = {f"masked-{n}": torch.where(torch.arange(9000) % n < 3, normal, -math.inf) for n in (300, 100)}
    return rows | masked


class Expecting(AcceptanceStrategy):
    """Accepts where the entropy of the target's row is the one that the caller expects, but for rounding."""

    name = "expecting"
    traits = Traits(guarantee="lossy", bound="none", state=("expected",))

    @rule
    def accept(target_entropy: Value, expected: Value) -> Value:
        """Return h."""
        return ops.where(ops.abs(target_entropy - expected) < 2e-6, 1.0, 0.0)


class ExpectingTops(Expecting):
    """The same of the entropy of the row's largest entries."""

    name = "expecting-tops"

    class Options(acceptlib.Options):
        """How many."""

        top: int

    def resolve_traits(self) -> Traits:
        """Take as many."""
        return dataclasses.replace(self.traits, top_k=self.options.top)

    @rule
    def accept(target_top_entropy: Value, expected: Value) -> Value:
        """Return h."""
        return ops.where(ops.abs(target_top_entropy - expected) < 2e-6, 1.0, 0.0)


ENTROPY_TEMPERATURES = (0.7, 0.0, 0.02)


def entropy_calls() -> dict[str, tuple[torch.Tensor, dict[str, object]]]:
    """Return calls of every kind of row at every temperature, with the rows' entropies [B] in nats, by name."""
    rows = torch.stack([*law_rows().values()]).repeat_interleave(len(ENTROPY_TEMPERATURES), 0)
    (count, vocab_size), generator = rows.shape, torch.Generator().manual_seed(2)
    temperature = torch.tensor(ENTROPY_TEMPERATURES).repeat(len(law_rows()))
    mask = torch.randint(-(2**31), 2**31 - 1, (count, -(-vocab_size // 32)), generator=generator).int()
    ids = torch.randint(vocab_size, (count, 1), generator=generator)
    bias = acceptlib.LogitBias(ids, torch.full(ids.shape, 1.5))
    entry = torch.arange(vocab_size)
    allowed = (mask[:, entry // 32] >> (entry % 32)) & 1 == 1
    constrained = rows.double().scatter_add(1, ids, bias.values.double()).where(allowed, -math.inf)
    heat = acceptlib.SamplingParams(temperature=temperature)
    constraints = dataclasses.replace(heat, allowed_token_bitmask=mask[:, None].expand(-1, 2, -1), logit_bias=bias)
    filters = acceptlib.SamplingParams(temperature=ENTROPY_TEMPERATURES[0], top_k=9, top_p=0.9)
    probs, logits = (twice[:, None].expand(-1, 2, -1).contiguous() for twice in (rows.softmax(-1), rows))
    few = slice(None, None, len(ENTROPY_TEMPERATURES))  # searches for cuts take long
    return {
        "logits": (entropy(rows, temperature), {"target_logits": logits, "sampling": heat, "logprobs": True}),
        "constrained": (entropy(constrained, temperature), {"target_logits": logits, "sampling": constraints}),
        "filtered": (
            entropy(process.law(rows[few], filters).log()),
            {"target_logits": logits[few], "sampling": filters},
        ),
        "probs": (entropy(rows), {"target_probs": probs}),
    }


def entropy(logits: torch.Tensor, temperature: torch.Tensor | None = None) -> torch.Tensor:
    """Return the entropies [B] of the softmax of rows [B, V] in nats, in float64; 0 at temperature 0."""
    heat = torch.ones(len(logits)) if temperature is None else temperature
    logits = logits.double() - logits.amax(1, keepdim=True).double()
    p = (logits / heat.double().where(heat > 0, 1)[:, None]).softmax(1)
    return torch.special.entr(p).sum(1) * (heat > 0)


def compare_tops() -> str:
    """Return an empty string if both engines find the entropies of largest entries, tied ones too, else where not."""
    rows = torch.stack([*law_rows().values()])
    twice = rows[:, None].expand(-1, 2, -1).contiguous()
    problems = []
    for top in (1, 2, 3, 4, 5, 9):
        expected = entropy(rows.topk(top, 1).values)
        kinds = ({"target_logits": twice}, {"target_probs": twice.softmax(-1)})
        problems += [compare_entropies(expected, given, ExpectingTops(top=top)) for given in kinds]
    return "; ".join(filter(None, problems))


def compare_entropies(
    expected: torch.Tensor, arguments: dict[str, object], strategy: AcceptanceStrategy | None = None
) -> str:
    """Return an empty string if both engines find these entropies [B], and none where they are NaN, else where not."""
    count = len(expected)
    given = {
        "uniforms": acceptlib.Uniforms(
            accept=torch.zeros(count, 1).double(), emit=torch.zeros(count, dtype=torch.int64)
        ),
        "state_names": ("expected",),
        "state": {"expected": expected},
    }
    call = cases.inputs(torch.zeros(count, 1, dtype=torch.int64), **arguments, **given)
    found = {
        verify.__module__: verify((strategy or Expecting()).plan, call).num_accepted
        for verify in (torch_engine.verify, engine.verify)
    }
    wrong = {name: (accepted == expected.isnan()).nonzero()[:, 0].tolist() for name, accepted in found.items()}
    return "; ".join(f"{name}: requests {requests}" for name, requests in wrong.items() if requests)


LAWS = (
    (0.7, 5, 0.9, 0.0),
    (1.0, 0, 0.9, 0.0),
    (1.0, 50, 1.0, 0.02),
    (1.6, 0, 1.0, 0.1),
    (1.0, 70, 0.5, 0.3),
    (1, 0, 1, 0),
)
"""Temperature, top-k, top-p and min-p."""

WIDE_LAWS = (
    (0.7, 50, 0.9, 0.0),
    (1.0, 70, 1.0, 0.0),
    (0.9, 200, 0.8, 0.0),
    (1.0, 300, 1.0, 0.01),
    (1.0, 0, 0.9, 0.0),
)
"""The same: k of few and of many entries, and more than there are threads."""

MIN_PS = tuple(
    (temperature, None, None, min_p)
    for temperature, min_p in ((0.7, 0.1), (1.0, 0.02), (1.6, 0.5), (1.0, 1.0), (0.5, 1e-30), (1, 0))
)
"""The same of min-p alone."""

TOP_PS = tuple(
    (temperature, None, top_p, None)
    for temperature, top_p in ((0.7, 0.9), (1.0, 0.5), (1.6, 0.99), (0.3, 1e-9), (1.0, 1.0), (1, 0.999))
)
"""The same of top-p alone."""

MIXED = (
    (1.0, None, 0.9, 0.0),
    (0.7, None, 0.9, 0.02),
    (1.6, None, 1.0, 0.1),
    (1.6, None, 0.99, 0.0),
    (1.0, None, 0.5, 0.3),
)
"""The same of both, of which a row may have either."""

LISTED = (records.LISTED.value, 1)
"""Sub-blocks that a list has room for, for each of a tile, and runs for each block: some, and so few that not all that
is kept fit."""


def filtered(laws: tuple[tuple[float | None, ...], ...]) -> acceptlib.SamplingParams:
    """Return the parameters of each of several laws; all of them have the same."""
    dtypes = {"temperature": torch.float32, "top_k": torch.int64, "top_p": torch.float64, "min_p": torch.float64}
    columns = zip(dtypes.items(), zip(*laws, strict=True), strict=True)
    return acceptlib.SamplingParams(
        **{name: torch.tensor(column, dtype=dtype) for (name, dtype), column in columns if None not in column}
    )


def compare_min_p(logits: torch.Tensor) -> str:
    """Return what `compare_laws` does under min-p alone, whether blocks list runs or leave maxima of sub-blocks."""
    differences = []
    for sizes in (*cases.EVERY_SIZE[:2], cases.RUNS):
        with mock.patch.object(tunings, "SIZES", sizes):
            differences.append(compare_laws(logits, MIN_PS))
    return "; ".join(filter(None, differences))


def compare_laws(logits: torch.Tensor, laws: tuple[tuple[float | None, ...], ...]) -> str:
    """Return an empty string if the kernels and the torch engine keep the same of a row [V], else what differs."""
    sampling = filtered(laws)
    rows = logits.expand(len(laws), -1).contiguous()
    expected = process.law(rows, sampling)
    launched: list[tuple[Any, ...]] = []
    ids = torch.zeros(len(rows), 0, dtype=torch.int64)
    given_call = {"ids": ids, "target_logits": rows[:, None], "sampling": sampling}
    with mock.patch.object(engine, "launch", cases.each(lambda *launch: launched.append(launch))):
        cases.run(engine.verify, triton_calls.strategies()["rejection"], given_call)
    found = torch.empty_like(rows)
    call, num_blocks = launched[0][0][0], -(-rows.shape[1] // engine.BLOCK)
    words = torch.full((engine.words_of(call, len(rows), 0, 0, num_blocks, 0),), 0x7FFFFFFF7FFFFFFF)  # nothing is 0
    given = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
    parameters = (rows if value is None else value for value in given)  # what is not given is not read
    law_kernel[(len(rows),)](found, rows, *parameters, words, len(rows), rows.shape[1], num_blocks, call)
    different = (found > 0) != (expected > 0)
    if different.any():
        return f"kept otherwise: {different.nonzero().tolist()}"
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-9, equal_nan=True)
    return ""


def room_rows() -> dict[str, tuple[torch.Tensor, tuple[tuple[float | None, ...], ...]]]:
    """Return rows [V] that just fill what there is room for, or just reach a bound, and laws of theirs."""
    entry = torch.arange(triton_calls.FILTERED_SHAPE[2])
    slope = -entry / 1000
    one_each = (entry == 0) | (entry == 4) | (entry == 64) | (entry == 68)  # the first of each sub-block
    little = torch.full_like(slope, -20.0)
    little[[0, 4, 64, 68]] = torch.tensor([0.0, 0.0, 0.0, -0.5])
    p = 3.000003 / float(little.double().exp().sum())
    near = math.log(0.1) + (entry * 37 % 100 - 49.5) * 6e-6
    floor = torch.tensor(math.log(0.5)).float() + torch.arange(-40, 41).float() * 2.0**-24
    floor = floor[torch.exp2(floor * 1.44269504) >= 0.5].min()  # the least logit that min-p of 0.5 keeps beside 0
    # As many entries as are compared or searched at once, and one more.
    found = {
        f"left-{n}": (torch.where(entry < n, slope, -math.inf), (*LAWS, (1.0, 99, 1.0, 0.0))) for n in (1, 2, 3, 64, 65)
    }
    found |= {
        "apart": (torch.where(one_each, 0.1, slope), LAWS),  # a k is one more than there are sub-blocks
        "three-apart": (torch.where(one_each & (entry < 68), 0.1 + slope, -math.inf), LAWS),
        "a-little-more": (little, ((1.0, None, p, 0.02),)),  # than three maxima weigh
        # Top-p's cut lies below min-p's, and both among entries that reach min-p's bound.
        "near-floor": (torch.where(entry == 17, 0.0, near), ((1.0, None, 0.8, 0.1),)),
        "least-one": (torch.where(entry < 2, slope, -math.inf), ((1.0, 99, 1.0, 1.0),)),
        "tied-at-floor": (
            torch.where(entry % 3 == 0, floor, torch.where(entry == 50, 0.0, -1.5)),
            ((1.0, 99, 0.9, 0.5),),
        ),
    }
    top_ps = tuple((1.0, None, top_p, None) for top_p in (0.4, 0.45, 0.5))
    for depth in (0.1, 0.15):  # a bin runs over, and the cut is in the next one
        rest = torch.where(entry > 96, -entry / 1e5, -3.0)
        found[f"over-{depth}"] = (torch.where(entry == 0, -depth, rest), top_ps)
    return found


def compare_rooms() -> str:
    """Return what `compare_laws` does of each such row, with more and with less room in lists."""
    differences = []
    for room in LISTED:
        with listing(room):
            differences += [compare_laws(*given) for given in room_rows().values()]
    return "; ".join(filter(None, differences))


def compare_unlisted() -> str:
    """Return what differs where sub-blocks find no room in lists, or each draft's row is another one's neighbour."""
    given = triton_calls.calls(triton_calls.FILTERED_SHAPE)["filtered"]
    unlisted = {**given, "sampling": acceptlib.SamplingParams(top_k=20)}
    generator = torch.Generator().manual_seed(3)
    target = torch.randn(24, 3, 100, generator=generator)
    draft = target[:, :2] + torch.randn(24, 2, 100, generator=generator) / 2
    many = {"ids": draft.argmax(-1), "target_logits": target, "draft_logits": draft}
    many["sampling"] = acceptlib.SamplingParams(top_p=0.1)
    differences = []
    for room, call in ((1, unlisted), (LISTED[0], many)):
        with listing(room), mock.patch.object(engine_call, "MAX_LISTED", 16):
            differences.append(cases.compare(triton_calls.strategies()["rejection"], call, cases.EVERY_SIZE[::2]))
    return "; ".join(filter(None, differences))


def compare_bins(kind: str, logits: torch.Tensor) -> str:
    """Return what `compare_laws` does under top-p alone, or that a search had to find what bins did not hold.

    Where many entries are equal, no bin has room for them, and where a sample is not like its row, bins miss the cut.
    """
    with mock.patch.object(bins, "search_row", side_effect=bins.search_row) as searched:
        difference = compare_laws(logits, TOP_PS)
    return difference or ("" if searched.called == (kind in {"tied", "uneven"}) else f"{searched.call_count} searches")


@triton.jit
def law_kernel(
    probs_ptr,  # [n, V] float32
    rows_ptr,  # [n, V]
    temperature_ptr,  # [n] each
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    workspace_ptr,
    num_rows,
    width,
    num_blocks,
    CALL: tl.constexpr,
):
    """Store the law of one row, found as a row of the target is."""
    number = tl.program_id(0).to(tl.int64)
    zero = (number * 0).to(tl.int32)
    cut_words = CALL.tile_words + num_blocks * CALL.block_words
    model = kernel_rows.open_model(
        kernel_rows.Given(
            rows_ptr=rows_ptr,
            request_stride=width,
            row_stride=zero,
            stride=1,
            width=width,
            temperature_ptr=temperature_ptr,
            top_k_ptr=top_k_ptr,
            top_p_ptr=top_p_ptr,
            min_p_ptr=min_p_ptr,
            mask_ptr=rows_ptr,
            mask_request_stride=zero,
            mask_row_stride=zero,
            mask_stride=zero,
            bias_ids_ptr=rows_ptr,
            bias_values_ptr=rows_ptr,
            num_biases=zero,
        ),
        request=number,
        slot=number,
        first_row=zero,
        num_rows=1,
        num_kept_rows=num_rows,
        num_blocks=num_blocks,
        blocks_ptr=workspace_ptr,
        cuts_ptr=workspace_ptr + 2 * num_rows * num_blocks + number * cut_words,
        cut_words=cut_words,
        extra_ptr=workspace_ptr,
        CALL=CALL,
        MODEL=kernel_rows.TARGET,
    )
    for block in range(num_blocks):
        entry = block * CALL.block + tl.arange(0, CALL.block)
        x = kernel_rows.load(model, zero, entry, zero == 0, float("-inf"), CALL, kernel_rows.TARGET)
        if CALL.lists_runs:
            min_p.store_block(x, entry, model, zero, block, zero == 0, CALL, kernel_rows.TARGET)
        else:
            kernel_laws.store_block(x, entry, model, zero, block, zero == 0, CALL, kernel_rows.TARGET)
    if CALL.lists_runs:
        min_p.store_law(zero, model, CALL, kernel_rows.TARGET)
    else:
        select.store_law(zero, model, CALL, kernel_rows.TARGET)
    if CALL.num_collected:
        for program in range(3):
            laid_out = bins.load_laid_out(zero, zero == 0, zero + program, model, CALL)
            bins.collect_row(laid_out, zero, zero + program, zero + 3, model, CALL, kernel_rows.TARGET)
        bins.finish_row(zero, model, CALL, kernel_rows.TARGET)
    one = tl.zeros((1,), tl.int32)
    parts = kernel_laws.load_parts(model, one + zero, one == 0, CALL, kernel_rows.TARGET)
    found = kernel_laws.one(model, parts, CALL, kernel_rows.TARGET)
    found = kernel_pairs.pair_at(kernel_pairs.Pair(found, found), one == 0, CALL).target
    for block in range(num_blocks):
        entry = block * CALL.block + tl.arange(0, CALL.block)
        x = kernel_rows.load(model, zero, entry, zero == 0, float("-inf"), CALL, kernel_rows.TARGET)
        p = kernel_laws.prob(x, entry, model, found, CALL, kernel_rows.TARGET)
        tl.store(probs_ptr + number * width + entry, p, mask=entry < width)


def compare_thirds() -> str:
    """Return an empty string if sums in thirds are those of 64 bits, of any numbers and as many as there may be."""
    generator = torch.Generator().manual_seed(3)
    numbers = torch.randint(-(2**63), 2**63 - 1, (4, 1024), generator=generator)
    numbers[1], numbers[2], numbers[3] = 2**63 - 1, numbers[2].abs() >> 20, -(2**63)
    found = torch.empty(len(numbers), dtype=torch.int64)
    thirds_kernel[1,](found, numbers, *numbers.shape)
    return "" if torch.equal(found, numbers.sum(1)) else f"{found.tolist()} and {numbers.sum(1).tolist()}"


@triton.jit
def thirds_kernel(sums_ptr, numbers_ptr, COUNT: tl.constexpr, LENGTH: tl.constexpr):
    """Store the sums [COUNT] of rows of numbers [COUNT, LENGTH]."""
    row = tl.arange(0, COUNT)
    numbers = tl.load(numbers_ptr + row[:, None] * LENGTH + tl.arange(0, LENGTH)[None, :])
    tl.store(sums_ptr + row, sums.in_thirds(numbers))


def compare_running() -> str:
    """Return an empty string if running sums of weights end each four where the sums of parts do, and never fall."""
    generator = torch.Generator().manual_seed(8)
    weights = torch.rand(16, 64, generator=generator).ldexp(torch.randint(-40, 1, (16, 64), generator=generator))
    weights *= torch.randint(0, 2, weights.shape, generator=generator) / weights.sum(1, keepdim=True)
    ends, fours = (torch.empty(2, 16, length, dtype=torch.int64) for length in (64, 16))
    running_kernel[16,](ends, fours, weights, 64)
    exact = (weights.double() * 2.0**60).long().cumsum(1)
    wrong = {
        "a four ends elsewhere": not torch.equal(ends[:, :, 3::4], fours.cumsum(2)),
        "a sum falls": (ends.diff(dim=2) < 0).any(),
        "integers one by one": not torch.equal(ends[0], exact),
        "sums in fours are the same": torch.equal(fours[1], fours[0]),
        "sums in fours are others": (ends[1] - exact).abs().max() > 2**60 * 1e-6,
    }
    return "; ".join(name for name, is_wrong in wrong.items() if is_wrong)


@triton.jit
def running_kernel(ends_ptr, fours_ptr, weights_ptr, LENGTH: tl.constexpr):
    """Store running sums [2, RUNS, LENGTH] and sums of fours [2, RUNS, LENGTH/4] of weights: one by one, in fours."""
    run = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, LENGTH)
    four = tl.arange(0, LENGTH // 4)
    weights = tl.load(weights_ptr + run * LENGTH + index)
    for in_fours in tl.static_range(2):
        row = in_fours * tl.num_programs(0) + run
        tl.store(ends_ptr + row * LENGTH + index, sums.running(weights, in_fours))
        tl.store(fours_ptr + row * (LENGTH // 4) + four, sums.fixed_fours(weights, in_fours))


def compare_parts() -> str:
    """Return an empty string if of each number of parts in lanes, the one that r falls into is found for each r."""
    generator = torch.Generator().manual_seed(10)
    problems = []
    for size, num_lanes, count in ((8, 8, 5), (8, 4, 8), (64, 8, 63), (64, 16, 40)):
        parts = torch.randint(0, 2**50, (size,), generator=generator)
        parts *= torch.randint(0, 2, (size,), generator=generator) * (torch.arange(size) < count)
        parts[3], changed = 5, parts.clone()
        changed[3] = 2**40
        ends = changed.cumsum(0)
        numbers = torch.cat((ends[:count], ends[:count] - 1, torch.zeros(1, dtype=torch.int64))).clamp(0)
        found = torch.empty(3, len(numbers), dtype=torch.int64)
        parts_kernel[len(numbers),](found, parts, numbers, count, size, num_lanes)
        at = torch.searchsorted(ends, numbers, right=True).clamp(max=count - 1)
        expected = torch.stack((at, torch.cat((ends[:1] * 0, ends))[at], ends[-1].expand_as(at)))
        expected[1] = torch.where(numbers >= ends[-1], ends[-1], expected[1])  # beyond all, which no draw is
        problems += [f"{count} of {size} in {num_lanes}"] if not torch.equal(found, expected) else []
    return "; ".join(problems)


@triton.jit
def parts_kernel(found_ptr, parts_ptr, numbers_ptr, count, SIZE: tl.constexpr, NUM_LANES: tl.constexpr):
    """Store which part each number falls into, what lies below it, and the total, once the fourth has another sum."""
    parts = partials.in_lanes(tl.load(parts_ptr + tl.arange(0, SIZE)), NUM_LANES)
    total, ends = partials.total_and_ends(partials.with_part(parts, 3, 2**40))
    number, taken = partials.part_at(ends, tl.load(numbers_ptr + tl.program_id(0)), count)
    place = found_ptr + tl.program_id(0)
    tl.store(place, number)
    tl.store(place + tl.num_programs(0), taken)
    tl.store(place + 2 * tl.num_programs(0), total)


def compare_lists() -> str:
    """Return an empty string if a list of each length knows what comes before each of its entries."""
    generator = torch.Generator().manual_seed(9)
    parts = torch.randint(0, 2**59, (16, 16), generator=generator)  # the first of n + 1 entries weigh something
    parts *= torch.arange(16) <= torch.arange(16)[:, None]
    entries = torch.stack([torch.randperm(16, generator=generator) for _ in range(16)])
    found = torch.empty(16, 16, dtype=torch.int64)
    before_kernel[16,](found, entries, parts, 16)
    expected = (parts[:, None] * (entries[:, None] < entries[:, :, None])).sum(2)
    wrong = (found != expected).any(1).nonzero().flatten().tolist()
    return f"of {[number + 1 for number in wrong]} entries" if wrong else ""


@triton.jit
def before_kernel(found_ptr, entries_ptr, parts_ptr, SIZE: tl.constexpr):
    """Store what comes before each entry of lists [SIZE, SIZE], of which the n-th has n + 1 entries."""
    row = tl.program_id(0)
    index = row * SIZE + tl.arange(0, SIZE)
    entries, parts = tl.load(entries_ptr + index), tl.load(parts_ptr + index)
    tl.store(found_ptr + index, listed.before_each(entries, parts, row + 1))


def compare_words() -> str:
    """Return an empty string if words hold the sums and masses that programs wait for, and show what is not there."""
    parts = torch.tensor([0, 1, 2**61 + 5, 2**62, 2**63 - 1])
    masses = torch.tensor(
        [[1e-45, 0.0, 1.5, math.inf, math.nan], [-0.0, 0.0, -2.5, 1.0, math.nan], [math.nan, 0.0, 1e-45, 2.0, math.inf]]
    )
    words, again = torch.empty(3, 5, dtype=torch.int64), torch.empty(5, dtype=torch.int64)
    found = torch.empty(3, 6)
    words_kernel[1,](words, again, found, parts, masses, 5, 8)
    nothing = torch.full((3, 1), math.nan)
    wrong = {
        "a word is 0": not words.all(),
        f"sums {again.tolist()}": not torch.equal(again, parts),
        f"masses {found.tolist()}": not torch.equal(
            found.nan_to_num(9.0), torch.cat((masses, nothing), 1).nan_to_num(9.0)
        ),
        "the sign of p": not found[1, 0].signbit(),
    }
    return "; ".join(name for name, is_wrong in wrong.items() if is_wrong)


@triton.jit
def words_kernel(words_ptr, again_ptr, found_ptr, parts_ptr, masses_ptr, COUNT: tl.constexpr, SIZE: tl.constexpr):
    """Store words [3, COUNT] of sums and masses, and what they hold; the last of masses [3, COUNT + 1] has no words."""
    index = tl.arange(0, SIZE)
    inside = index < COUNT
    words = partials.nonzero_of(tl.load(parts_ptr + index, mask=inside, other=0))
    weights = tl.load(masses_ptr + index, mask=inside, other=0.0)
    p = tl.load(masses_ptr + COUNT + index, mask=inside, other=0.0)
    q = tl.load(masses_ptr + 2 * COUNT + index, mask=inside, other=0.0)
    pairs, others = partials.words_of(weights, p, q)
    tl.store(words_ptr + index, words, mask=inside)
    tl.store(words_ptr + COUNT + index, pairs, mask=inside)
    tl.store(words_ptr + 2 * COUNT + index, others, mask=inside)
    tl.store(again_ptr + index, partials.sum_of(words), mask=inside)
    held = partials.masses_of(tl.where(inside, pairs, 0), tl.where(inside, others, 0))
    for i in tl.static_range(3):
        tl.store(found_ptr + i * (COUNT + 1) + index, held[i], mask=index <= COUNT)


class Heavy(AcceptanceStrategy):
    """Accepts where a sum over a row, of terms of either sign, is a number, beside others; less as it grows."""

    name = "heavy"
    traits = Traits(guarantee="lossy", bound="none")

    class Options(acceptlib.Options):
        """Options of `heavy`."""

        scale: float

    @row_sum
    def weight(p: Value, q: Value, scale: Value) -> Value:
        """Sum to what the target has above the draft, with half of its entries taken away."""
        return ops.where(p > q, scale * p, -scale * p)

    @row_sum
    def share(p: Value) -> Value:
        """Sum to 1."""
        return p

    @rule
    def accept(weight: Value, share: Value, target_entropy: Value, scale: Value) -> Value:
        """Return h."""
        h = share - ops.abs(weight) / (2.0 * scale)
        return ops.where((weight < 2.0 * scale) & (target_entropy > 0), h, 0.0)


class Tied(AcceptanceStrategy):
    """Accepts where a sum over a row is 1 though its entries sum to more, as it is of sums of four in float32."""

    name = "tied"
    traits = Traits(guarantee="lossy", bound="none")

    @row_sum
    def share(p: Value) -> Value:
        """Sum to 1, or nearly."""
        return p

    @rule
    def accept(share: Value) -> Value:
        """Return h."""
        return ops.where(share == 1.0, 1.0, 0.0)


HEAVY = {2.0**18 - 10: True, 2.0**18: None, 2.0**18 + 10: False, 2.0**20: False, 2.0**30: False, math.inf: False}
"""What terms sum to, and whether that is a number; None where rows differ. Rounding 76 sums of four changes at most 9.5
of it."""


def compare_row_sums() -> str:
    """Return an empty string if both engines find the same sums of rows to be numbers, else what is wrong."""
    count, generator = 8, torch.Generator().manual_seed(8)
    p, q = (torch.randn(count, 2, 301, generator=generator).softmax(-1) for _ in range(2))
    p *= 1 + (torch.arange(count)[:, None, None] - count / 2) * 2.0**-22  # so that some sum to less than 1
    uniforms = acceptlib.Uniforms(accept=torch.zeros(count, 1).double(), emit=torch.zeros(count).long())
    arguments = {"ids": torch.zeros(count, 1).long(), "target_probs": p, "draft_probs": q[:, :1], "uniforms": uniforms}
    problems = []
    for scale, are_numbers in HEAVY.items():
        found = cases.run(torch_engine.verify, Heavy(scale=scale), arguments)
        standing = {*found.num_accepted.tolist()} if isinstance(found, VerifyResult) else found
        expected = {0, 1} if are_numbers is None else {int(are_numbers)}
        problems.append("" if standing == expected else f"of {scale} {standing} stand")
        problems.append(cases.compare(Heavy(scale=scale), arguments, cases.EVERY_SIZE[::2]))
    arguments["target_probs"] = torch.zeros_like(p)
    arguments["target_probs"][..., [0, 300]] = 0.5  # the second is in a four of its own
    arguments["target_probs"][..., 1:3] = 2.0**-25
    tied = cases.run(torch_engine.verify, Tied(), arguments)
    problems.append("" if isinstance(tied, VerifyResult) and tied.num_accepted.all() else f"{tied}: not all stand")
    problems.append(cases.compare(Tied(), arguments, cases.EVERY_SIZE[::2]))
    return "; ".join(filter(None, problems))


class Weighty(AcceptanceStrategy):
    """Rejects every token; what it draws from has any mass, or is no number where infinities come together."""

    name = "weighty"
    traits = Traits(guarantee="lossy", bound="none")

    class Options(acceptlib.Options):
        """Options of `weighty`."""

        scale: float

    @rule
    def accept(target_prob: Value) -> Value:
        """Return h."""
        return 0.0 * target_prob

    @rule
    def residual(p: Value, q: Value, scale: Value) -> Value:
        """Return the weight of each entry."""
        return p * scale * scale - q * scale * scale


class Borrowed(AcceptanceStrategy):
    """Rejects every token and draws from the draft's row, whatever the target's holds."""

    name = "borrowed"
    traits = Traits(guarantee="lossy", bound="none")

    @rule
    def accept(draft_prob: Value) -> Value:
        """Return h."""
        return 0.0 * draft_prob

    @rule
    def residual(q: Value) -> Value:
        """Return the weight of each entry."""
        return q


SCALES = (1.0, 1.3, 1.6, 2.0, 2.5, 10.0, 1e9, 1e15, 1e30)
"""Masses that are sure, that are not but sound, that are a fault, that wrap, and what is infinite and no number."""


def compare_held() -> str:
    """Return an empty string if draws of any mass, or of nothing, behind any token, are torch's, else what is wrong."""
    generator = torch.Generator().manual_seed(11)
    logits, draft_logits = (3 * torch.randn(8, 3, 301, generator=generator) for _ in range(2))
    draft_logits[:2] = logits[:2]  # of which nothing is left
    ids = torch.randint(0, 301, (8, 2), generator=generator)
    ids[2, 0], ids[3, 0], ids[4, 0] = 301, 2**31 - 1, -1
    logits[5, 0, 7] = math.inf
    temperature = torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.3])
    bits = torch.randint(-(2**63), 2**63 - 1, (8,), generator=generator)
    found = []
    for scale, some in itertools.product(SCALES, (slice(0, 4), slice(4, 8))):  # so few that programs may wait
        arguments = {
            "ids": ids[some],
            "target_logits": logits[some],
            "draft_logits": draft_logits[some, :2],
            "sampling": acceptlib.SamplingParams(temperature=temperature[some]),
            "uniforms": acceptlib.Uniforms(accept=torch.zeros(4, 2, dtype=torch.float64), emit=bits[some]),
        }
        found.append(cases.compare(Weighty(scale=scale), arguments, (cases.EVERY_SIZE[0], cases.MORE)))
    return "; ".join(filter(None, found))


def compare_spread() -> str:
    """Return an empty string if what no program finds by itself is found too: a row's mass, and that it has no law."""
    generator = torch.Generator().manual_seed(13)
    logits, draft_logits = (torch.randn(4, 2, 1300, generator=generator) for _ in range(2))
    bits = torch.randint(-(2**63), 2**63 - 1, (4,), generator=generator)
    uniforms = acceptlib.Uniforms(accept=torch.zeros(4, 1, dtype=torch.float64), emit=bits)
    arguments = {"ids": torch.zeros(4, 1).long(), "target_logits": logits, "uniforms": uniforms}
    arguments["draft_logits"] = draft_logits[:, :1]
    sizes = cases.EVERY_SIZE[:1]
    found = [cases.compare(Weighty(scale=scale), arguments, sizes) for scale in (2.0, 3.0, 4.0)]
    for number, value in enumerate((math.nan, math.inf, -math.inf)):
        logits[number, 0, 700] = value
    return "; ".join(filter(None, [*found, cases.compare(Borrowed(), arguments, sizes)]))


def compare_doubts() -> str:
    """Return an empty string if sums of a warp are exact as long as they are sure, and in doubt however far beyond."""
    sure, doubt = held.SURE.value << held.LOW_BITS.value, held.DOUBT.value
    generator = torch.Generator().manual_seed(12)
    rows = [
        [doubt] * 32,
        [doubt] * 2 + [0] * 30,
        [0] * 31 + [doubt],
        [sure >> 5] * 32,
        [sure, *[1] * 31],
        [sure + 2**42, *[0] * 31],
    ]
    rows += [torch.randint(0, (sure >> 5) + 2**54, (32,), generator=generator).tolist() for _ in range(10)]
    found = torch.empty(16, dtype=torch.int64)
    doubts_kernel[1,](found, torch.tensor(rows), COUNT=16)
    expected = [sum(row) if sum(n >> held.LOW_BITS.value for n in row) <= held.SURE.value else doubt for row in rows]
    return "" if found.tolist() == expected else f"{found.tolist()}, not {expected}"


@triton.jit
def doubts_kernel(sums_ptr, numbers_ptr, COUNT: tl.constexpr):
    """Store the sum of each 32 numbers."""
    row, lane = tl.arange(0, COUNT), tl.arange(0, 32)
    tl.store(sums_ptr + row, held._sum(tl.load(numbers_ptr + row[:, None] * 32 + lane[None, :])))


SUMS = {
    "thirds": compare_thirds,
    "running": compare_running,
    "words": compare_words,
    "parts": compare_parts,
    "lists": compare_lists,
    "row-sums": compare_row_sums,
    "tops": compare_tops,
    "held": compare_held,
    "spread": compare_spread,
    "doubts": compare_doubts,
    "rooms": compare_rooms,
    "unlisted": compare_unlisted,  # last: it changes sizes
}
"""Checks of sums in integers and how they pass between programs, and of rows that just fit or have no room."""


class Contrary(AcceptanceStrategy):
    """Rejects every token, and leaves it what it has above its share."""

    name = "contrary"
    traits = Traits(guarantee="lossy", bound="none")

    class Options(acceptlib.Options):
        """Options of `contrary`."""

        share: float = 1.0

    @rule
    def accept(target_prob: Value) -> Value:
        """Return h."""
        return 0.0 * target_prob

    @rule
    def residual(p: Value, q: Value, share: Value) -> Value:
        """Return the weight of each entry."""
        return p - share * q


DRAWN = {None: 0.4, 8.0: 0.4, 13.0: 0.99999, 30.0: 0.99999, 80.0: 0.4}
"""By how much the drafted token's logit lies above what all others have together, and a share of it to take."""


def compare_draws(gap: float | None) -> str:
    """Return an empty string if tokens of one-hot drafts are torch's, however little they leave, masked or not."""
    generator = torch.Generator().manual_seed(6)
    logits = 3 * torch.randn(8, 2, 301, generator=generator)
    ids = torch.randint(0, 301, (8, 1), generator=generator)
    if gap is not None:
        logits[:, 0] = logits[:, 0].scatter(1, ids, logits[:, 0].logsumexp(1, keepdim=True) + gap)
    masked = torch.arange(301) % 64 > 8  # whole fours and all but a few of a block
    some = logits[::2, 0]
    logits[::2, 0] = some.masked_fill(masked, -math.inf).scatter(1, ids[::2], some.amax(1, keepdim=True))
    bits = torch.randint(-(2**63), 2**63 - 1, (8,), generator=generator)
    uniforms = acceptlib.Uniforms(accept=torch.zeros(8, 1, dtype=torch.float64), emit=bits)
    sampling = acceptlib.SamplingParams(temperature=torch.arange(8) % 4 * 0.5)
    arguments = {"ids": ids, "target_logits": logits, "uniforms": uniforms, "sampling": sampling}
    given = (Contrary(), Contrary(share=DRAWN[gap]))
    return "; ".join(filter(None, (cases.compare(strategy, arguments, cases.EVERY_SIZE[::2]) for strategy in given)))


def compare_listed(logits: torch.Tensor) -> str:
    """Return an empty string if draws from a row [V] are torch's under min-p, which many sub-blocks may hold any of."""
    least = torch.tensor([1e-3, 1e-3, 1e-3, 1e-2, 1e-2, 0.5, 1e-30, 0.0])
    rows = logits.expand(len(least), 2, -1)
    ids = rows[:, 0].argmin(1, keepdim=True)  # stopped at
    bits = torch.randint(-(2**63), 2**63 - 1, (len(least),), generator=torch.Generator().manual_seed(10))
    uniforms = acceptlib.Uniforms(accept=torch.full((len(least), 1), 0.5, dtype=torch.float64), emit=bits)
    sampling = acceptlib.SamplingParams(min_p=least)
    arguments = {"ids": ids, "target_logits": rows, "uniforms": uniforms, "sampling": sampling}
    return cases.compare(triton_calls.strategies()["rejection"], arguments, (*cases.EVERY_SIZE, cases.RUNS))


class Entropic(AcceptanceStrategy):
    """Accepts by the entropy of the target's row, so that its last digit shows."""

    name = "entropic"
    traits = Traits(guarantee="lossy", bound="none")

    @rule
    def accept(target_entropy: Value) -> Value:
        """Return h."""
        return target_entropy / 16


class EntropicTops(Entropic):
    """The same of the entropy of the row's largest entries."""

    name = "entropic-tops"
    traits = Traits(guarantee="lossy", bound="none", top_k=3)

    @rule
    def accept(target_top_entropy: Value) -> Value:
        """Return h."""
        return target_top_entropy / 16


NEIGHBOURS = {
    "top-k": {"top_k": (0, 7)},
    "top-p": {"top_p": (1.0, 0.9)},
    "min-p": {"min_p": (0.0, 0.1)},
    "all": {"top_k": (0, 7), "top_p": (1.0, 0.9), "min_p": (0.0, 0.1)},
}
"""Sampling parameters of a request without a filter, and of its neighbour."""


def compare_neighbours(kind: str, sizes: Sequence[tunings.Sizes], vocab_size: int = 301, device: str = "cpu") -> str:
    """Return an empty string if a neighbour's filter changes nothing, down to the last bit of a random number.

    Two random numbers next to each other, of which the first one tells tokens apart, are told apart beside it too.
    """
    row, draft = (3 * torch.randn(2, vocab_size, generator=torch.Generator().manual_seed(17))).to(device)
    accepts = kind in {"entropic", "entropic-tops"}
    strategy = {"entropic": Entropic, "entropic-tops": EntropicTops}.get(kind, Contrary)()
    drafted = int(kind != "bonus")
    bits = 53 if accepts else 64

    def verify(numbers: list[int], filters: dict[str, tuple[float, float]]) -> list[int]:
        """Return what requests of this row do by their random numbers, beside one that has the filters."""
        count = len(numbers) + bool(filters)
        given = torch.tensor([number - 2**64 * (number >= 2**63) for number in numbers] + [5] * bool(filters))
        given = given.to(device)
        uniforms = acceptlib.Uniforms(
            accept=(given.double() * 2.0**-53 if accepts else given.double() * 0 + 0.5)[:, None][:, :drafted],
            emit=given,
        )
        parameters = {
            name: torch.tensor([own] * len(numbers) + [other], device=device) for name, (own, other) in filters.items()
        }
        result = engine.verify(
            strategy.plan,
            cases.inputs(
                torch.full((count, drafted), 11, device=device),
                target_logits=row.expand(count, drafted + 1, -1),
                draft_logits=draft.expand(count, drafted, -1) if kind == "residual" else None,
                uniforms=uniforms,
                sampling=acceptlib.SamplingParams(temperature=torch.full((count,), 0.7, device=device), **parameters),
            ),
        )
        assert result.status.count_nonzero() == 0
        found = result.num_accepted if accepts else result.output_token_ids[:, 0]
        return [int(number) for number in found[: len(numbers)]]

    tunings.SIZES = sizes[0]
    (middle,) = verify([2 ** (bits - 1)], {})
    # `after` is the first number that is rejected, or draws a later token than the middle one.
    before, after = 0, 2**bits - 1
    while after - before > 1:
        numbers = sorted({before + 1 + (after - before - 2) * i // 15 for i in range(16)})
        found = verify(numbers, {})
        past = [number for number, each in zip(numbers, found, strict=True) if (each < 1 if accepts else each > middle)]
        after = min(past, default=after)
        before = max((number for number in numbers if number < after), default=before)
    ends = [before, after]
    expected = verify(ends, {})
    assert expected[0] != expected[1]
    wrong = []
    for name, filters in NEIGHBOURS.items():
        for tunings.SIZES in sizes:
            found = verify(ends, filters)
            if found != expected:
                wrong.append(f"{name}, {tunings.SIZES}: {found}, not {expected}")
    return "; ".join(wrong)


NEIGHBOURLY = {f"neighbours-{kind}": kind for kind in ("residual", "recovered", "bonus", "entropic", "entropic-tops")}


def labels() -> list[tuple[str, str]]:
    """Return the mode and the name of every case: modes run side by side."""
    by_lists = [f"min-p-{room}" for room in LISTED]
    laws = [f"{filters}-{kind}" for filters in ("law", "top-p", "mixed", *by_lists) for kind in law_rows()]
    wide = [f"{rows}-{kind}" for rows in ("wide", *(f"bins-{room}" for room in LISTED)) for kind in wide_rows()]
    return [
        *(("interpreted:laws", label) for label in (*laws, *(f"entropy-{kind}" for kind in entropy_calls()), *SUMS)),
        *(("interpreted:wide", label) for label in (*wide, *(f"draws-{gap}" for gap in DRAWN))),
        *(("interpreted:wide", f"listed-{kind}") for kind in wide_rows()),
        *(("interpreted:neighbours", label) for label in NEIGHBOURLY),
    ]


def run_laws() -> dict[str, str]:
    """Run the cases of rows of several blocks."""
    results = {
        f"{filters}-{kind}": compare_laws(logits, laws)
        for filters, laws in (("law", LAWS), ("top-p", TOP_PS), ("mixed", MIXED))
        for kind, logits in law_rows().items()
    }
    for room in LISTED:
        with listing(room):
            results |= {f"min-p-{room}-{kind}": compare_min_p(logits) for kind, logits in law_rows().items()}
    results |= {f"entropy-{kind}": compare_entropies(*given) for kind, given in entropy_calls().items()}
    return results | {name: compare() for name, compare in SUMS.items()}


def run_wide(whole: dict[str, int]) -> dict[str, str]:
    """Run the cases of wide rows, under the engine's own constants, and those of draws."""
    results = {f"draws-{gap}": compare_draws(gap) for gap in DRAWN}
    with mock.patch.multiple(engine, **whole):
        results |= {f"wide-{kind}": compare_laws(logits, WIDE_LAWS) for kind, logits in wide_rows().items()}
        results |= {f"listed-{kind}": compare_listed(logits) for kind, logits in wide_rows().items()}
        for room in LISTED:
            with listing(room):
                results |= {f"bins-{room}-{kind}": compare_bins(kind, logits) for kind, logits in wide_rows().items()}
    return results


@contextlib.contextmanager
def listing(room: int) -> Iterator[None]:
    """Have so many places in lists."""
    with contextlib.ExitStack() as stack:
        for module in (bins, lists, select):
            stack.enter_context(mock.patch.object(module, "LISTED", tl.constexpr(room)))
        for module in (records, min_p):
            stack.enter_context(mock.patch.object(module, "HELD", tl.constexpr(room)))
        yield


def main(mode: str, path: str) -> None:
    """Run every case of a mode."""
    torch.set_num_threads(1)
    quick_interpreter.install()
    whole = {"BLOCK": engine.BLOCK, "TILE": engine.TILE}
    cases.shrink()
    cases.shrink_further()
    if mode == "interpreted:neighbours":
        results = {
            name: compare_neighbours(kind, (*cases.EVERY_SIZE, cases.RUNS)) for name, kind in NEIGHBOURLY.items()
        }
    else:
        results = run_laws() if mode == "interpreted:laws" else run_wide(whole)
    Path(path).write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
