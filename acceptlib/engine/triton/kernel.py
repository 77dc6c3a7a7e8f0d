"""The kernel, of which each launch runs one stage.

A call launches those that it needs, in this order; a late `reduce` runs beside the stage before it.

    reduce    what the laws of rows need, for logits and for the argmax
    select    what top-k, top-p and min-p keep of rows
    collect   the entries that a cut is among, where rows have top-p alone
    finish    what is kept of these rows
    sum       the strategy's own row sums; for rows of probabilities, all that is found of whole rows
    decide    the running scalar, position by position, and where to stop; or which rows may be stopped at, where that
              depends on a residual's mass
    emit      the draw; the mass, and the decision where it is not made before

From probabilities, a strategy that stops at the first rejection and asks for nothing of whole rows needs the last stage
alone, and reads two rows a request.
"""

# ruff: noqa: N803 - kernels; their constants are in capitals

import triton
import triton.language as tl

from acceptlib.engine.triton import (
    bins,
    counters,
    decide,
    emit,
    masses,
    partials,
    positions,
    random,
    reduce,
    results,
    rows,
    select,
)
from acceptlib.engine.triton.layout import layout_of, num_counts
from acceptlib.engine.triton.rows import DRAFT, TARGET

# What changes from call to call must not compile the kernel anew.
VARYING = [
    *(f"{model}_{kind}_stride" for model in ("target", "draft") for kind in ("request", "row")),
    *(f"{model}_mask_{kind}stride" for model in ("target", "draft") for kind in ("request_", "row_", "")),
    *(f"{model}_num_biases" for model in ("target", "draft")),
    "ids_request_stride",
    "ids_stride",
    "accept_request_stride",
    "accept_stride",
    "root_seed",
    "root_offset",
    "num_tokens",
    "table_size",
    "num_requests",
    "num_positions",
    "max_num_draft_tokens",
    "num_blocks",
    "num_emit_blocks",
    "num_programs",
    "first_position",
]

# Only rows are read in wide loads.
UNALIGNED = [
    *("token_ids_ptr", "num_accepted_ptr", "num_emitted_ptr", "status_ptr", "logprobs_ptr", "raw_logprobs_ptr"),
    *(
        f"{model}_{name}_ptr"
        for model in ("target", "draft")
        for name in ("top_k", "top_p", "min_p", "mask", "biases", "bias_values")
    ),
    *("num_passed_ptr", "totals_ptr"),
    "counters_ptr",
    *("workspace_ptr", "target_temperature_ptr", "draft_temperature_ptr", "ids_ptr", "cu_ptr", "accept_ptr"),
    *("emit_ptr", "seeds_ptr", "offsets_ptr", "bonus_ptr", "tables_ptr", "state_ptr"),
]


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=UNALIGNED)
def verify_kernel(
    token_ids_ptr,  # [B, K+1] int32 or int64
    num_accepted_ptr,  # [B] int32
    num_emitted_ptr,  # [B] int32
    status_ptr,  # [B] int8
    logprobs_ptr,  # [B, K+1] float32
    raw_logprobs_ptr,  # [B, K+1] float32
    num_passed_ptr,  # [B] int32
    totals_ptr,  # [2] int64, added to
    counters_ptr,  # [B * (2 + ROW_COUNTS * (K+1))] int32, and words that are waited for; all zero between calls
    workspace_ptr,  # int64 words, as `layout_of` lays them out
    target_ptr,  # [B, K+1, V] or [T+B, V], or without bonus rows [B, K, V] or [T, V]
    target_temperature_ptr,  # [B] float32
    target_top_k_ptr,  # [B] int32 or int64
    target_top_p_ptr,  # [B] float32 or float64
    target_min_p_ptr,  # [B] float32 or float64
    target_mask_ptr,  # [..., ceil(V/32)] int32, with the leading dimensions of the rows
    target_biases_ptr,  # [B, n] int32 or int64
    target_bias_values_ptr,  # [B, n] float32
    draft_ptr,  # [B, K, V'] or [T, V']
    draft_temperature_ptr,  # [B] float32
    draft_top_k_ptr,  # [B] int32 or int64
    draft_top_p_ptr,  # [B] float32 or float64
    draft_min_p_ptr,  # [B] float32 or float64
    draft_mask_ptr,  # [..., ceil(V/32)] int32, with the leading dimensions of the rows
    draft_biases_ptr,  # [B, n] int32 or int64
    draft_bias_values_ptr,  # [B, n] float32
    ids_ptr,  # [B, K] or [T]
    cu_ptr,  # [B+1], or [B] without the leading 0
    accept_ptr,  # [B, K] or [T] float64
    emit_ptr,  # [B] int64
    seeds_ptr,  # [B] int64
    offsets_ptr,  # [B] int64, advanced by 1 if `CALL.advances`
    bonus_ptr,  # [B]
    tables_ptr,  # [num_tables, table_size] float64
    state_ptr,  # [num_state, B] float64
    root_seed: tl.int64,  # what streams are derived from where seeds and offsets are not given
    root_offset: tl.int64,
    num_tokens,  # T or B * K
    target_request_stride: tl.int64,
    target_row_stride: tl.int64,
    target_stride,
    target_mask_request_stride: tl.int64,
    target_mask_row_stride: tl.int64,
    target_mask_stride,
    target_num_biases,  # n
    draft_request_stride: tl.int64,
    draft_row_stride: tl.int64,
    draft_stride,
    draft_mask_request_stride: tl.int64,
    draft_mask_row_stride: tl.int64,
    draft_mask_stride,
    draft_num_biases,  # n
    ids_request_stride: tl.int64,
    ids_stride: tl.int64,
    accept_request_stride: tl.int64,
    accept_stride: tl.int64,
    table_size,
    num_requests,  # B
    num_positions: tl.int64,  # B * K
    max_num_draft_tokens,  # K
    vocab_size,  # V
    draft_vocab_size,  # V'
    num_blocks,
    num_emit_blocks,
    num_programs,  # for each request, in the last stage
    first_position,
    CALL: tl.constexpr,
    STAGE: tl.constexpr,
    ROWS: tl.constexpr,  # whose rows: TARGET, DRAFT or BOTH
    FIRST: tl.constexpr,  # whether it starts after all that comes before
    LATE: tl.constexpr,  # whether it needs nothing of the stage before, but ends after it
    OVERLAP: tl.constexpr,  # whether the next stage may start before this one ends, and wait for it
):
    """Run one stage for one request. Pointers to what the call does not have are null."""
    program = tl.program_id(0)
    number = tl.program_id(1).to(tl.int64)
    position = first_position + tl.program_id(2)
    if (STAGE == "reduce" or (STAGE == "sum" and CALL.in_one_pass)) and not CALL.lazy:
        # Most requests stop early, and what is read last is still in the cache when it is drawn from.
        position = first_position + tl.num_programs(2) - 1 - tl.program_id(2)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    # Whether the counts of earlier requests are sound has to be known where the result is written, and where rows are
    # filtered: cuts are stored by a row's number among those given (by K they would take too many words), and with bad
    # counts that may be another request's row.
    checks: tl.constexpr = STAGE == "decide" or STAGE == "emit" or CALL.filters  # noqa: PLR1714 - what Triton compiles
    start, count, fault = rows.locate(number, cu_ptr, num_tokens, max_num_draft_tokens, checks, CALL)
    slot = number * max_num_draft_tokens
    layout = layout_of(
        num_positions, num_tokens.to(tl.int64), num_requests.to(tl.int64), num_blocks, num_emit_blocks, CALL
    )
    target = rows.open_model(
        rows.Given(
            target_ptr,
            target_request_stride,
            target_row_stride,
            target_stride,
            vocab_size,
            target_temperature_ptr,
            target_top_k_ptr,
            target_top_p_ptr,
            target_min_p_ptr,
            target_mask_ptr,
            target_mask_request_stride,
            target_mask_row_stride,
            target_mask_stride,
            target_biases_ptr,
            target_bias_values_ptr,
            target_num_biases,
        ),
        request=number,
        slot=slot + number,
        first_row=start + number if CALL.has_bonus_rows else start,
        num_rows=count + 1 if CALL.has_bonus_rows else count,
        num_kept_rows=num_positions + num_requests,
        num_blocks=num_blocks,
        blocks_ptr=workspace_ptr,
        cuts_ptr=workspace_ptr + layout.cuts + (start + number) * layout.cut_words,
        cut_words=layout.cut_words,
        extra_ptr=workspace_ptr + layout.extra,
        CALL=CALL,
        MODEL=TARGET,
    )
    draft = rows.open_model(
        rows.Given(
            draft_ptr,
            draft_request_stride,
            draft_row_stride,
            draft_stride,
            draft_vocab_size,
            draft_temperature_ptr,
            draft_top_k_ptr,
            draft_top_p_ptr,
            draft_min_p_ptr,
            draft_mask_ptr,
            draft_mask_request_stride,
            draft_mask_row_stride,
            draft_mask_stride,
            draft_biases_ptr,
            draft_bias_values_ptr,
            draft_num_biases,
        ),
        request=number,
        slot=slot,
        first_row=start,
        num_rows=count,
        num_kept_rows=num_positions,
        num_blocks=num_blocks,
        blocks_ptr=workspace_ptr + layout.draft_blocks,
        cuts_ptr=workspace_ptr + layout.draft_cuts + start * layout.cut_words,
        cut_words=layout.cut_words,
        extra_ptr=workspace_ptr + layout.extra,
        CALL=CALL,
        MODEL=DRAFT,
    )
    seed = tl.full((), 0, tl.int64)
    offset = tl.full((), 0, tl.int64)
    if CALL.explicit:
        accept_ptr += start * accept_stride if CALL.flat_uniforms else number * accept_request_stride
    elif CALL.rooted:
        seed = random.seed_of(root_seed, root_offset, number)
    else:
        seed = tl.load(seeds_ptr + number)
        offset = tl.load(offsets_ptr + number)
    bits = tl.full((), 0, tl.uint64)
    if STAGE == "emit" and CALL.draws_by_law:  # while the stage before ends
        bits = random.bits(seed, offset, emit_ptr + number, CALL)
    # [B, awaited_words, num_parts] int64
    awaited_ptr = (counters_ptr + num_counts(num_requests, max_num_draft_tokens)).to(tl.pointer_type(tl.int64))
    awaited_ptr += number * CALL.awaited_words * num_emit_blocks * CALL.emit_parts
    if CALL.holds:  # [B, num_programs + 1]
        awaited_ptr = workspace_ptr + layout.partials + number * layout.partial_words
    if CALL.settles:  # [B]
        awaited_ptr += number
    scalars_ptr = (workspace_ptr + layout.scalars).to(tl.pointer_type(tl.float64), bitcast=True)
    request = positions.Request(
        number=number,
        vocab_size=vocab_size,
        most=max_num_draft_tokens,
        ids_ptr=ids_ptr + (start if CALL.ragged else number) * (ids_stride if CALL.ragged else ids_request_stride),
        ids_stride=ids_stride,
        target=target,
        draft=draft,
        stream=positions.Stream(accept_ptr, accept_stride, emit_ptr + number, seed, offset, bits),
        bonus_ptr=bonus_ptr + number,
        scalars_ptr=scalars_ptr + slot,
        num_positions=num_positions,
        sums_ptr=workspace_ptr + layout.sums + slot * num_blocks,
        tables_ptr=tables_ptr,
        table_size=table_size,
        state_ptr=state_ptr,
        num_requests=num_requests,
        counters=counters.Counters(
            arrived_ptr=counters_ptr + number,
            stop_ptr=counters_ptr + num_requests + number,
            rows_ptr=counters_ptr + 2 * num_requests + number * counters.ROW_COUNTS * (max_num_draft_tokens + 1),
            awaited_ptr=awaited_ptr,
        ),
    )
    prepared_ptr = workspace_ptr + layout.prepared + 3 * number
    carries: tl.constexpr = CALL.carry_scalar >= 0
    decides: tl.constexpr = STAGE == "decide" or (STAGE == "emit" and not CALL.decided)
    fetched = ()
    if decides and not CALL.foreseen:
        # On its way before parameters are looked at, and while the stage before ends.
        fetched = masses.fetch(0, count, request, CALL) if carries else positions.fetch_first(count, request, CALL)
    # Bad counts leave no rows to go through; bad parameters leave them as they are.
    num_read = tl.where(fault == 0, count, -1)
    own_fault = tl.maximum(
        rows.fault_of(target, vocab_size, CALL, TARGET), rows.fault_of(draft, vocab_size, CALL, DRAFT)
    )
    fault = tl.where(fault == 0, own_fault, fault)
    count = tl.where(fault == 0, count, 0)
    if CALL.foreseen:
        fetched = decide.foresee(count, request, CALL)
        position = fetched.stop
    if OVERLAP and not (FIRST or LATE):
        if decides and carries:
            fetched = masses.after_wait(fetched, count, request, CALL)
        elif decides:
            fetched = decide.after_wait(fetched, count, request, CALL)
        elif not (STAGE == "emit" and CALL.settles):
            tl.extra.cuda.gdc_wait()
    if STAGE == "emit" and CALL.settles:
        fetched = counters.known_stop(num_read >= 0, request, OVERLAP)
    if STAGE == "reduce":
        if CALL.holds:
            if (program == 0) & (tl.program_id(2) == 0):
                counters.clear(request.counters.awaited_ptr, num_programs + 1)
        reduce.reduce_rows(position, num_read, program, request, ROWS, CALL)
    elif STAGE == "select" or STAGE == "finish":  # noqa: PLR1714 - what Triton compiles
        select.select_rows(position, num_read, program, request, STAGE, CALL)
    elif STAGE == "collect":
        bins.collect_rows(position, num_read, program, request, CALL)
    elif STAGE == "sum":
        reduce.sum_rows(position, num_read, program, request, CALL)
    elif STAGE == "decide":
        if carries:
            _, wanted, _ = masses.prepare(count, fetched, request, CALL)
            tl.debug_barrier()
        if CALL.mass_scalar >= 0:
            tl.store(prepared_ptr, wanted.first)
            tl.store(prepared_ptr + 1, wanted.last)
            tl.store(prepared_ptr + 2, wanted.bits)
        else:
            if carries:
                fetched = masses.joined(fetched, count, request, CALL)
            stop, _, passed, _ = decide.find_stop(count, fetched, request, CALL)
            tl.store(request.counters.stop_ptr, counters.coded(stop))
            if CALL.counts_passed:
                tl.store(num_passed_ptr + number, passed)
    else:
        row = number * (max_num_draft_tokens + 1)
        out = results.Out(
            token_ids_ptr=token_ids_ptr + row,
            logprobs_ptr=logprobs_ptr + row,
            raw_logprobs_ptr=raw_logprobs_ptr + row,
            num_accepted_ptr=num_accepted_ptr + number,
            num_emitted_ptr=num_emitted_ptr + number,
            status_ptr=status_ptr + number,
            num_passed_ptr=num_passed_ptr + number,
            totals_ptr=totals_ptr,
            offset_ptr=offsets_ptr + number,
        )
        emit.emit(
            partials.Grid(program, num_programs, num_emit_blocks),
            count,
            fetched,
            fault,
            request,
            prepared_ptr,
            workspace_ptr
            + layout.partials
            + (slot + number if CALL.mass_scalar >= 0 else number) * layout.partial_words,
            out,
            CALL,
        )
    if OVERLAP and LATE:
        # The next stage waits for this one alone, so one program stays until the stage before has ended too.
        programs = tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2)
        if (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + program == programs - 1:
            tl.extra.cuda.gdc_wait()
