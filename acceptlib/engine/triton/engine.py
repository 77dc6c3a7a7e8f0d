"""The Triton engine: what it can run, and how a call is sized for its batch and run in stages."""

import bisect
import functools
import itertools
from operator import attrgetter
from typing import NamedTuple

import torch

from acceptlib.engine.plan import Plan
from acceptlib.engine.triton import tunings
from acceptlib.engine.triton.call import Call, Rules
from acceptlib.engine.triton.counters import ROW_COUNTS
from acceptlib.engine.triton.forms import PARAMETERS, Form, RowsForm, call_of, form_of, may_leave_rows, numbers_of
from acceptlib.engine.triton.launching import Key, Launch, launch, launch_of
from acceptlib.engine.triton.layout import layout_of, num_counts
from acceptlib.engine.triton.memory import memory_for
from acceptlib.engine.triton.plans import bound, rules_of
from acceptlib.engine.triton.rows import BOTH
from acceptlib.engine.triton.stages import READERS, Stage, stages
from acceptlib.inputs import Inputs
from acceptlib.result import VerifyResult
from acceptlib.rng import Rng, Root
from acceptlib.workspace import Workspace

BLOCK = 4096
"""Entries that a program reduces at a time. The law of a row of logits is combined from blocks of this size."""

REGISTERS = 1 << 16
"""Registers of a multiprocessor."""

OVERLAP_BLOCKS = 4096
"""Blocks of stopping rows from which on no stage starts before one of `READERS` ends: it would take that one's place.

The last stage does where `Call.settles`, for it does not wait for that end.
"""

MAX_EMIT_BLOCKS = 8
"""Blocks that a program weighs where a mass decides, unless programs would then take more than `MAX_TURNS` turns."""

MAX_TURNS = 8

TILE = 128
"""Sub-blocks that a search holds at a time. A bin has room for as many entries; as many are ranked by comparison."""

SELECT_WARPS = 8
"""Warps of a program that finds what is kept of a row."""

SELECT_WARPS_BESIDE = 4
"""The same beside programs that read the other model's rows and would fill the device."""

SELECT_REGISTERS = 168
"""Registers that its threads may have, at least, where only one model's rows are filtered: half as many programs."""

DRAW_WARPS = 8
"""Warps of a request's only program of the last stage, where its draw reads one block."""

SUM_REGISTERS = 80
"""Registers of a program that sums over rows where the target's are filtered: requests without a filter need more."""

LIST_REGISTERS = 128
"""Registers of threads of the last stage, at most, where a draw goes through a list: few programs have much to read."""

MAX_REQUESTS = 65535
"""Requests of a call, at most, and rows of one: what a grid's other dimensions hold."""

MAX_ROWS = ((1 << 31) - 1) // (2 + ROW_COUNTS.value)
"""Rows of a call, at most, bonus rows among them: kernels find counters, two a request and four a row, by 32 bits."""

MAX_ENTRIES = (1 << 19) - 1
"""Entries of a row of logits, at most: with one more, as many exponentials of 1 would overflow its sum."""

MAX_SPAN = (1 << 31) - 1
"""Words from the first to the last of a row's bitmask, at most: kernels find them by 32 bits."""


def unsupported(inputs: Inputs) -> str | None:
    """Return why this engine cannot run a call, or None if it can."""
    if inputs.num_requests > MAX_REQUESTS:
        return f"the fused kernels take at most {MAX_REQUESTS} requests, and there are {inputs.num_requests}"
    if inputs.max_num_draft_tokens >= MAX_REQUESTS:
        most = inputs.max_num_draft_tokens
        return f"the fused kernels take at most {MAX_REQUESTS - 1} drafted tokens a request, and K is {most}"
    num_rows = inputs.num_requests * (inputs.max_num_draft_tokens + 1)
    if num_rows > MAX_ROWS:
        return f"the fused kernels take at most {MAX_ROWS} rows, and requests times K + 1 are {num_rows}"
    for rows in filter(None, (inputs.target, inputs.draft)):
        if rows.is_logits and rows.data.shape[-1] > MAX_ENTRIES:
            return f"the fused kernels take at most {MAX_ENTRIES} entries of logits, and V is {rows.data.shape[-1]}"
        mask = rows.bitmask
        if mask is not None and mask.shape[-1] and (span := (mask.shape[-1] - 1) * mask.stride(-1)) > MAX_SPAN:
            return f"the fused kernels take bitmasks whose rows span at most {MAX_SPAN} words, and one spans {span}"
    return None


class Schedule(NamedTuple):
    """How calls of one form are run, of B requests of at most K drafted tokens.

    Attributes:
        call: What the kernel is compiled for.
        num_blocks: Blocks of a row.
        num_emit_blocks: Blocks of a row in the last stage.
        num_programs: Programs of a request there.
        num_counters: Counters of the workspace that they use.
        launches: In order.
    """

    call: Call
    num_blocks: int
    num_emit_blocks: int
    num_programs: int
    num_counters: int
    launches: tuple[Launch, ...]


@functools.lru_cache(maxsize=4096)
def schedule(rules: Rules, form: Form, num_requests: int, most: int) -> Schedule:
    """Return how to run calls of one form."""
    target, draft, device = form.target, form.draft, form.device
    num_blocks = -(-max(target.vocab_size, draft.vocab_size if draft else 0) // BLOCK)
    num_stopping = num_requests * num_blocks  # blocks of stopping rows
    num_spared = num_stopping * most if may_leave_rows(rules, form) else 0
    tuning = tunings.tuning_of(rules, num_stopping, num_spared, target, draft)
    num_emit_blocks, call = _sized_call_of(rules, form, tuning, num_blocks)
    if call.awaits and num_requests >= resident_programs(device, tuning.emit_warps, tuning.emit_registers):
        # Programs that wait must not be all that run.
        tuning = tunings.TUNINGS.medium if target.is_logits else tunings.TUNINGS.large_probs
        num_emit_blocks, call = _sized_call_of(rules, form, tuning, num_blocks)
    blocks_each = 1 << bisect.bisect(tuning.row_blocks, num_stopping) if tuning.loops else 1
    emit_warps, emit_registers = tuning.emit_warps, LIST_REGISTERS if call.lists else tuning.emit_registers
    resident = resident_programs(device, emit_warps, emit_registers)
    num_programs, shares = _emit_programs(call, tuning, num_requests, most, num_emit_blocks, resident)
    if call.draws_by_law:
        emit_warps, emit_registers = DRAW_WARPS, 0
    near = num_stopping < OVERLAP_BLOCKS
    # Interpreted, stages never overlap, but they run in the same order.
    beside = call.splits and near and (call.overlaps or device.type == "cpu")
    select_warps, select_registers = SELECT_WARPS, tuning.select_registers
    if call.num_filtered == 1:
        select_registers = max(select_registers, SELECT_REGISTERS)
        if beside and tuning.loops and not call.num_collected:
            select_warps = SELECT_WARPS_BESIDE
    sizes_of = {  # programs, warps and registers
        "reduce": (-(-num_blocks // blocks_each), tuning.reduce_warps, tuning.reduce_registers),
        "select": (call.num_filtered, select_warps, select_registers),
        "collect": (call.num_collected * tuning.collect_programs, SELECT_WARPS, 0),
        "finish": (call.num_collected, SELECT_WARPS, select_registers),
        "sum": (-(-num_blocks // blocks_each), tuning.reduce_warps, SUM_REGISTERS if call.filtered[0] else 0),
        "decide": (1, 4, 0),
        "emit": (num_programs + call.awaits, emit_warps, emit_registers),
    }
    found = stages(call, most, num_stopping, beside=beside)
    waits = _waits(call, found, near=near)
    overlap = any(waits) and call.overlaps
    launches = []
    for stage, wait in zip(found, waits, strict=True):
        programs, warps, registers = sizes_of[stage.name]
        if stage.name == "reduce" and stage.rows == BOTH.value:
            programs *= call.num_reduced
        grid = (programs, num_requests, shares if stage.name == "emit" else max(stage.end - stage.first, 1))
        key = Key(call, stage.name, stage.rows, first=not wait, late=stage.late, overlap=overlap)
        launches.append(launch_of(key, grid, warps, registers, stage.first))
    num_counters = counters_of(call, num_requests, most, num_requests * num_emit_blocks)
    return Schedule(call, num_blocks, num_emit_blocks, num_programs, num_counters, tuple(launches))


def _emit_programs(
    call: Call, tuning: tunings.Tuning, num_requests: int, most: int, num_emit_blocks: int, resident: int
) -> tuple[int, int]:
    """Return how many programs share a row in the last stage, and how many of a request's rows are weighed at once."""
    num_programs, shares = 1, 1
    if call.weighs:
        # Rows of a request are weighed at once, but after a stage that decides most programs have one or none.
        num_rows = num_requests * (1 if call.decided else min(tuning.shares, most + 1))
        num_programs = programs_of(num_emit_blocks, num_rows, resident) if tuning.loops else num_emit_blocks
    if call.mass_scalar >= 0:
        # Programs find out which rows they read, so a few turns even out better than one.
        even = min(-(-num_emit_blocks // MAX_EMIT_BLOCKS), MAX_TURNS * resident // (num_requests * tuning.shares))
        num_programs = max(num_programs, even) if tuning.loops else num_emit_blocks
        shares = min(most + 1, max(tuning.shares, min(2, resident // (num_programs * num_requests))))
    return num_programs, shares


def _waits(call: Call, found: tuple[Stage, ...], *, near: bool) -> list[bool]:
    """Return which stages start before the one ahead of them ends, and wait for it then: most do in `near` batches.

    Without overlap it makes no difference. Then it is the same for all batches, so that no stage is compiled twice.
    """
    near = near or not call.overlaps
    waits = [number > 0 and (near or found[number - 1].name not in READERS) for number in range(len(found))]
    if call.settles:  # the last one has something to do by then
        waits[-1] = True
    return waits


def _sized_call_of(rules: Rules, form: Form, tuning: tunings.Tuning, num_blocks: int) -> tuple[int, Call]:
    """Return how many blocks a row has in the last stage, and what the kernel is compiled for."""
    num_emit_blocks = -(-form.target.vocab_size // tuning.emit_block)
    bits = (num_blocks - 1).bit_length(), (num_emit_blocks - 1).bit_length()
    call = call_of(rules, form, tuning, BLOCK, *bits, TILE, overlaps=_overlaps(form.device))
    return num_emit_blocks, call


class Run(NamedTuple):
    """How calls that are alike are run.

    Attributes:
        launches: In order.
        num_counters: Counters of the workspace that they use.
        num_words: Words of it if no token is drafted.
        words_of_token: Further words of each drafted token.
        reads_draft: Whether they read the draft's rows.
        reads_tables: Whether they read per-position constants.
        raw: Whether log-probabilities under the raw row differ from those under the processed one.
        numbers: The kernel's arguments that are numbers, in their order, without a `Root`'s, T and a launch's own.
        drafted_bytes: From the first drafted token to the end of the last, less those of each token.
        bytes_of_token: Of each drafted token in the ragged layout, up to the next.
        emitted_bytes: Of the emitted tokens.
    """

    launches: tuple[Launch, ...]
    num_counters: int
    num_words: int
    words_of_token: int
    reads_draft: bool
    reads_tables: bool
    raw: bool
    numbers: tuple[int, ...]
    drafted_bytes: int
    bytes_of_token: int
    emitted_bytes: int


_TENSORS = attrgetter("data", *PARAMETERS, "bias_values")
"""A model's rows and their parameters, in the order of the kernel's arguments."""


def verify(plan: Plan, inputs: Inputs) -> VerifyResult:
    """Run `plan` on validated inputs; see `AcceptanceStrategy.verify`."""
    device, num_requests = inputs.device, inputs.num_requests
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):  # kernels are launched on the current one
            return verify(plan, inputs)
    out = inputs.out or VerifyResult.empty(num_requests, inputs.max_num_draft_tokens, device, logprobs=inputs.logprobs)
    if not num_requests:
        return out
    target, draft, rng, uniforms = inputs.target, inputs.draft, inputs.rng, inputs.uniforms
    seeds, offsets, root, advances = None, None, (0, 0), False
    if isinstance(rng, Root):
        root = (rng.seed, rng.offset)
    elif rng is not None:
        seeds, offsets, advances = rng.seeds, rng.offsets, rng.advances
    rules, tables = bound(plan, device)
    # What a run depends on beside what was checked. Kernels read rows in wider loads where addresses are multiples of
    # 16, and plans that share their rules may have tables of different sizes.
    addresses = (target.data.data_ptr() % 16, None if draft is None else draft.data.data_ptr() % 16)
    key = (rules, tables.shape[1], addresses, seeds is None, advances)
    run: Run | None = inputs.checked.runs.get(key)
    if run is None:
        run = inputs.checked.runs[key] = _run_of(plan, inputs, out)
    state = [inputs.state[name] for name in plan.traits.state]
    drafted = inputs.draft_token_ids
    num_tokens, there = drafted.numel(), drafted.data_ptr()
    if inputs.out and there:
        drafted_bytes = run.drafted_bytes + run.bytes_of_token * num_tokens
        if -drafted_bytes < there - out.output_token_ids.data_ptr() < run.emitted_bytes:
            drafted = _copied(drafted)  # some programs write while others still decide
    with memory_for(inputs, run.num_counters, run.num_words + run.words_of_token * num_tokens) as memory:
        tensors = (
            out.output_token_ids,
            out.num_accepted,
            out.num_emitted,
            out.status,
            out.logprobs,
            out.raw_logprobs,
            out.num_passed,
            out.totals,
            memory.counters,
            memory.words,
            *_TENSORS(target),
            *_TENSORS(draft if run.reads_draft else target),
            drafted,
            inputs.cu_num_draft_tokens,
            uniforms.accept if uniforms else None,
            uniforms.emit if uniforms else None,
            seeds,
            offsets,
            inputs.bonus_token_ids,
            tables if run.reads_tables else None,
            _stacked(state, memory.words) if state else None,
        )
        launch(run.launches, tensors, (*root, num_tokens, *run.numbers))
    if out.logprobs is not None and out.raw_logprobs is not None and not run.raw:
        with torch.inference_mode():  # where tensors made in it may be written too
            out.raw_logprobs.copy_(out.logprobs)
    return out


def _run_of(plan: Plan, inputs: Inputs, out: VerifyResult) -> Run:
    """Return how to run a call whose result is written to `out`, and all that are like it."""
    ids, cu, uniforms, rng = inputs.draft_token_ids, inputs.cu_num_draft_tokens, inputs.uniforms, inputs.rng
    num_requests, most, device = inputs.num_requests, inputs.max_num_draft_tokens, inputs.device
    ragged = cu is not None
    target = form_of(inputs.target, ragged=ragged)
    reads_draft = plan.reads_draft and inputs.draft is not None
    draft = form_of(inputs.draft, ragged=ragged) if reads_draft else None
    rules, tables = bound(plan, device)
    form = Form(
        device=device,
        target=target,
        draft=draft,
        tokens=out.output_token_ids.dtype,
        ids=ids.dtype,
        counts=None if cu is None else cu.dtype,
        bonus=None if inputs.bonus_token_ids is None else inputs.bonus_token_ids.dtype,
        state=tuple(inputs.state[name].dtype == torch.bool for name in plan.traits.state),
        has_bonus_rows=inputs.has_bonus_rows,
        uniform_dims=uniforms.accept.ndim if uniforms else 0,
        rooted=isinstance(rng, Root),
        advances=isinstance(rng, Rng) and rng.advances,
        logprobs=inputs.logprobs,
        counts_passed=out.num_passed is not None,
        adds_up=out.totals is not None,
        ends=cu is not None and cu.shape[0] == num_requests,
    )
    scheduled = schedule(rules, form, num_requests, most)
    call = scheduled.call
    num_words, words_with_one = (
        words_of(call, num_requests, most, num_tokens, scheduled.num_blocks, scheduled.num_emit_blocks)
        for num_tokens in (0, 1)
    )
    # T is no part of what is remembered: see `checks`.
    bytes_of_token = ids.stride(0) * ids.itemsize if ragged else 0
    id_strides, uniform_strides = ids.stride(), uniforms.accept.stride() if uniforms else (0,)
    numbers = (
        *numbers_of(inputs.target, ragged=ragged),
        *numbers_of(inputs.draft if reads_draft else inputs.target, ragged=ragged),
        0 if ragged else id_strides[0],
        id_strides[-1],
        uniform_strides[0],
        uniform_strides[-1],
        tables.shape[1],
        num_requests,
        num_requests * most,
        most,
        target.vocab_size,
        target.vocab_size if draft is None else draft.vocab_size,
        scheduled.num_blocks,
        scheduled.num_emit_blocks,
        scheduled.num_programs,
    )
    return Run(
        launches=scheduled.launches,
        num_counters=scheduled.num_counters,
        num_words=num_words,
        words_of_token=words_with_one - num_words,
        reads_draft=reads_draft,
        reads_tables=bool(call.tables),
        raw=call.raw,
        numbers=numbers,
        drafted_bytes=ids.itemsize - bytes_of_token if ragged else _span(ids) * ids.itemsize,
        bytes_of_token=bytes_of_token,
        emitted_bytes=out.output_token_ids.nbytes,
    )


def _span(tensor: torch.Tensor) -> int:
    """Return how many elements lie from the first one of a tensor to the last."""
    if not tensor.numel():
        return 0
    return 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same strides in other memory."""
    with torch.inference_mode():
        return tensor.as_strided((_span(tensor),), (1,)).clone().as_strided(tensor.shape, tensor.stride())


@functools.cache
def _overlaps(device: torch.device) -> bool:
    """Return whether a kernel may start before the one that it depends on ends (programmatic dependent launch)."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def resident_programs(device: torch.device, warps: int, registers: int) -> int:
    """Return how many programs run at a time on a device, as far as registers limit them."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    return processors * (REGISTERS // (32 * warps * registers))


def programs_of(num_blocks: int, num_rows: int, resident: int) -> int:
    """Return how many programs share a row's blocks, so that the last of them ends early.

    Programs of all rows run in turns, as many at a time as are resident. Each takes as long as its blocks and one more,
    for what it does once.
    """

    def turns(num_programs: int) -> int:
        return -(-num_rows * num_programs // resident) * (-(-num_blocks // num_programs) + 1)

    return min(range(1, num_blocks + 1), key=turns)


@functools.lru_cache(maxsize=1024)
def words_of(call: Call, num_requests: int, most: int, num_tokens: int, num_blocks: int, num_emit_blocks: int) -> int:
    """Return how many 64-bit words of its workspace a call uses: the kernels' layout, and behind it the state."""
    end: int = layout_of.fn(num_requests * most, num_tokens, num_requests, num_blocks, num_emit_blocks, call).end
    return end + len(call.state) * num_requests


def counters_of(call: Call, num_requests: int, most: int, num_emit_blocks: int) -> int:
    """Return how many counters of its workspace a call uses, given the blocks of its stopping rows: 64 bits take two.

    Behind the counts, an even number, come words that are waited for: those of parts, or one a request.
    """
    counts: int = num_counts.fn(num_requests, most).value
    words_awaited = max(num_emit_blocks * call.emit_parts * call.awaited_words, num_requests)
    return counts + 2 * words_awaited


def workspace(plan: Plan, num_requests: int, most: int, vocab_size: int, device: torch.device) -> Workspace:
    """Return memory for every call of up to these sizes; see `AcceptanceStrategy.workspace`."""
    rules = rules_of(plan)
    given = dict.fromkeys(PARAMETERS, torch.float32)
    unfiltered = {**given, "top_k": None, "top_p": None, "min_p": None}
    min_p_alone = {**unfiltered, "min_p": torch.float32}
    rows = RowsForm(torch.float32, address=0, vocab_size=vocab_size, stride=1, aligned=True, is_logits=True, **given)
    form = Form(  # of what needs most
        device=device,
        target=rows,
        draft=rows,
        tokens=torch.int64,
        ids=torch.int64,
        counts=torch.int64,
        bonus=torch.int64,
        state=(True,) * len(plan.traits.state),
        has_bonus_rows=True,
        uniform_dims=2,
        rooted=False,
        advances=True,
        logprobs=True,
        counts_passed=True,
        adds_up=True,
    )
    num_blocks, num_words, num_counters = -(-vocab_size // BLOCK), 0, 0
    for tuning, is_logits, filters in itertools.product(
        tunings.TUNINGS, (True, False), (given, min_p_alone, unfiltered)
    ):
        rows = rows._replace(is_logits=is_logits, **filters)
        form = form._replace(target=rows, draft=rows)
        num_emit_blocks, call = _sized_call_of(rules, form, tuning, num_blocks)
        num_words = max(num_words, words_of(call, num_requests, most, num_requests * most, num_blocks, num_emit_blocks))
        # Batches whose programs wait are small.
        num_emit_blocks = min(num_requests * num_emit_blocks, tunings.SIZES.medium * BLOCK // tuning.emit_block)
        num_counters = max(num_counters, counters_of(call, num_requests, most, num_emit_blocks))
    return Workspace.allocate(num_counters, num_words, device)


def _stacked(state: list[torch.Tensor], words: torch.Tensor) -> torch.Tensor:
    """Return the caller's state as [n, B] float64, at the end of the workspace's words."""
    with torch.inference_mode():  # where tensors made in it may be written too
        stacked = words[-len(state) * len(state[0]) :].view(torch.float64).view(len(state), -1)
        for row, values in zip(stacked, state, strict=True):
            row.copy_(values)
    return stacked
