"""The form of a call, and what the kernel is compiled for."""

import functools
from typing import NamedTuple

import torch

from acceptlib.engine.triton.call import Call, Rules
from acceptlib.engine.triton.counters import THREADS
from acceptlib.engine.triton.tunings import Tuning, filters_of
from acceptlib.inputs import Rows


class RowsForm(NamedTuple):
    """The form of one model's rows: what the kernel is compiled for, by its own code or by Triton.

    Triton tells apart which numbers are 1, which are multiples of 16 and which need 64 bits. `address` is modulo 16,
    `aligned` says whether the distances of rows are multiples of 16, and a parameter that is not given has no dtype.
    """

    dtype: torch.dtype
    address: int
    vocab_size: int
    stride: int
    aligned: bool
    is_logits: bool
    temperature: torch.dtype | None = None
    top_k: torch.dtype | None = None
    top_p: torch.dtype | None = None
    min_p: torch.dtype | None = None
    bitmask: torch.dtype | None = None
    bias_token_ids: torch.dtype | None = None


class Form(NamedTuple):
    """The form of a call: `call_of` makes a `Call` of it.

    `tokens` are those emitted, `ids` those drafted. `state` says which of the caller's state are flags, `uniform_dims`
    how many dimensions explicit uniforms have: 0 for none. `ends` says that counts have no leading 0, `rooted` that
    streams are derived from a `Root`, `advances` that offsets are advanced. What a call does not have has no dtype.
    """

    device: torch.device
    target: RowsForm
    draft: RowsForm | None
    tokens: torch.dtype
    ids: torch.dtype
    counts: torch.dtype | None
    bonus: torch.dtype | None
    state: tuple[bool, ...]
    has_bonus_rows: bool
    uniform_dims: int
    rooted: bool
    advances: bool
    logprobs: bool
    counts_passed: bool
    adds_up: bool
    ends: bool = False


PARAMETERS = tuple(RowsForm._field_defaults)
"""Sampling parameters, as `Rows` names them."""

MIN_PARTS = THREADS.value
"""Parts of a row, rounded up, from which on a program may wait for their masses: then each thread looks at its own.
Warps that looked at the same ones could see them arrive at different times, and take different branches."""

MAX_DOUBTS = 8
"""Parts of a block, at most, where programs hold their weights: the sum of as many `held.DOUBT` fits 64 bits."""

WARP_BYTES = 512
"""Bytes that a warp loads at once: 16 for each of its threads."""


def form_of(rows: Rows, *, ragged: bool) -> RowsForm:
    """Return the form of a model's rows."""
    data = rows.data
    request_stride, row_stride, stride = _strides(data, ragged=ragged)
    aligned = request_stride % 16 == 0 and row_stride % 16 == 0
    parameters = [getattr(rows, name) for name in PARAMETERS]
    dtypes = [None if values is None else values.dtype for values in parameters]
    return RowsForm(data.dtype, data.data_ptr() % 16, data.shape[-1], stride, aligned, rows.is_logits, *dtypes)


def numbers_of(rows: Rows, *, ragged: bool) -> tuple[int, ...]:
    """Return the numbers that tell the kernel where a model's rows are, in the order of its parameters."""
    mask, bias = rows.bitmask, rows.bias_token_ids
    mask_strides = (0, 0, 0) if mask is None else _strides(mask, ragged=ragged)
    return (*_strides(rows.data, ragged=ragged), *mask_strides, 0 if bias is None else bias.shape[1])


def _strides(data: torch.Tensor, *, ragged: bool) -> tuple[int, int, int]:
    """Return the distances of requests, of rows and of entries."""
    return (0 if ragged else data.stride(0), data.stride(-2), data.stride(-1))


def may_leave_rows(rules: Rules, form: Form) -> bool:
    """Return whether rows beyond a stop may be left out as stops are found: if nobody asks for them."""
    found = rules.stop == "first_rejection" and rules.carry_scalar < 0 and not form.counts_passed
    return found and not is_foreseen(rules, form)


def is_foreseen(rules: Rules, form: Form) -> bool:
    """Return whether stops are known before any row is read, and no row but the one at the stop is asked for.

    Where rows are filtered, stages look at all of them.
    """
    filters = filters_of(form.target, form.draft)
    return rules.decides_unseen and not (form.logprobs or filters)


@functools.lru_cache(maxsize=1024)
def call_of(
    rules: Rules,
    form: Form,
    tuning: Tuning,
    block: int,
    blocks_bits: int,
    emit_blocks_bits: int,
    tile: int,
    *,
    overlaps: bool,
) -> Call:
    """Return what the kernel is compiled for, the same object for the same call."""
    target, draft = form.target, form.draft

    def given(name: str) -> tuple[bool, bool]:
        return getattr(target, name) is not None, getattr(draft, name, None) is not None

    of_draft = None if draft is None else (draft.dtype, draft.bias_token_ids)
    logits = (target.is_logits, draft is not None and draft.is_logits)
    best = (
        rules.finds_argmax or (rules.reads_target_max and not target.is_logits),
        draft is not None and rules.reads_draft_max and not draft.is_logits,
    )
    top_ks, top_ps, min_ps = filters = given("top_k"), given("top_p"), given("min_p")
    # The entropy, which is the last sum, comes with the law of a row of logits without a filter, as largest entries do.
    unfiltered = target.is_logits and not any(of_target for of_target, _ in filters)
    entropy = rules.entropy_scalar >= 0 and unfiltered
    sums = rules.sums[:-1] if entropy else rules.sums
    # A stop is found as rows are read, so only where they are, and where nothing passes from one to the next.
    reads_rows = any(logits) or any(best) or bool(sums) or rules.top_k > 0
    decides_alone = rules.mass_scalar < 0 and (rules.stop == "last_acceptance" or rules.carry_scalar >= 0)
    foreseen = reads_rows and is_foreseen(rules, form)
    part = tuning.emit_block // tuning.emit_parts
    all_logits = target.is_logits and (draft is None or draft.is_logits)
    # Warps that shared a part would look at sums apart, and tell others what both found.
    waits = tuning.emit_warps <= tuning.emit_parts <= MAX_DOUBTS
    if not all_logits:
        waits = tuning.emit_parts << emit_blocks_bits >= MIN_PARTS
    return Call(
        **{**vars(rules), "sums": sums},
        entropy=entropy,
        tops=rules.top_k > 0 and unfiltered,
        ragged=form.counts is not None,
        ends=form.ends,
        has_draft=draft is not None,
        has_bonus=form.bonus is not None,
        has_bonus_rows=form.has_bonus_rows,
        explicit=form.uniform_dims > 0,
        flat_uniforms=form.uniform_dims == 1,
        rooted=form.rooted,
        advances=form.advances,
        logprobs=form.logprobs,
        raw=form.logprobs and any(given(name)[0] for name in PARAMETERS),
        aligned=target.aligned and (draft is None or draft.aligned),
        same_dtypes=of_draft == (target.dtype, target.bias_token_ids),
        state=form.state,
        counts_passed=form.counts_passed,
        adds_up=form.adds_up,
        logits=logits,
        temperature=given("temperature"),
        top_ks=top_ks,
        top_ps=top_ps,
        min_ps=min_ps,
        masked=given("bitmask"),
        biased=given("bias_token_ids"),
        best=best,
        foreseen=foreseen,
        lazy=tuning.lazy and reads_rows and may_leave_rows(rules, form),
        decided=not foreseen and (tuning.decides_first or decides_alone),
        block=block,
        max_blocks=1 << blocks_bits,
        loops=tuning.loops,
        blocks_ahead=tuning.blocks_ahead,
        emit_block=tuning.emit_block,
        emit_parts=tuning.emit_parts,
        law_lanes=tuning.law_lanes,
        emit_run=part if tuning.emit_parts == 1 else min(WARP_BYTES // target.dtype.itemsize, part),
        thirds=tuning.thirds,
        in_order=tuning.in_order and waits and torch.version.hip is None,
        looks=tuning.looks,
        spins=form.device.type == "cuda" and torch.version.hip is None,
        overlaps=overlaps,
        runs=tuning.runs,
        max_emit_blocks=1 << emit_blocks_bits,
        tile=tile if any(map(any, filters)) else 0,
    )
