"""The Triton engine: what it can run, how a call becomes stages, and their launches."""

import functools
from typing import Any, NamedTuple

import torch
import triton

from acceptlib.engine.plan import Plan
from acceptlib.engine.triton.decide import QUANTITIES
from acceptlib.engine.triton.kernel import Call, verify_kernel
from acceptlib.engine.triton.plans import Rules, bound, scalars_of
from acceptlib.engine.triton.select import WIDTH
from acceptlib.errors import InputError
from acceptlib.inputs import Inputs, Rows, VerifyResult
from acceptlib.rules import ELEMENTS
from acceptlib.workspace import Workspace

BLOCK = 4096
"""Entries that a program reduces at a time. The law of a row of logits is combined from blocks of this size."""


class Tuning(NamedTuple):
    """What is chosen for speed, and changes no result.

    Attributes:
        reduce_warps: Warps of a program that reduces rows.
        emit_warps: Warps of a program of the last stage.
        emit_block: Entries that such a program weighs at a time.
        emit_part: Entries that are summed up apart, of which the draw searches one part.
        loops: Whether it goes through several blocks where there are more than fill the device.
        decides_first: Whether the stop is found before the last stage rather than by every program of it.
        lazy: Whether it is found as rows are read, so that rows beyond it are left out, rather than by a stage of its
            own.
    """

    reduce_warps: int
    emit_warps: int
    emit_block: int
    emit_part: int
    loops: bool
    decides_first: bool
    lazy: bool


SMALL = Tuning(
    reduce_warps=8, emit_warps=8, emit_block=2048, emit_part=512, loops=False, decides_first=False, lazy=False
)
"""For latency: a batch that leaves the device with room to spare."""

SMALL_PROBS = SMALL._replace(emit_warps=4)
"""The same from probabilities, which need no law of a row."""

LARGE = Tuning(reduce_warps=4, emit_warps=4, emit_block=1024, emit_part=1024, loops=True, decides_first=True, lazy=True)
"""For throughput."""

LARGE_BLOCKS = 512
"""Blocks of stopping rows, BLOCK entries each, from which on a batch is large."""

OVERLAP_BLOCKS = 4096
"""Blocks from which on a stage no longer starts before the one ahead of it ends: it would take that one's place."""

ENOUGH_PROGRAMS = 528
"""Programs of the last stage that fill the device."""

MOST_BLOCKS = 8
"""Blocks that a program of the last stage weighs, at most."""

TILE = 64
"""Sub-blocks of a row that may hold what a filter keeps, for its cut to be found in registers."""

SELECT_WARPS = 8
"""Warps of a program that reduces filtered rows."""

SELECT_REGISTERS = 64
"""Registers of a thread of such a program. One in many of them looks for a cut, and takes what the others would not."""

MOST_REQUESTS = 65535
"""Requests of a call, at most: what a grid's second dimension holds."""

ROUNDS = 8
"""Launches at most for row sums that are found lazily."""


def unsupported(plan: Plan, inputs: Inputs) -> str | None:
    """Return why this engine cannot run a call, or None if it can."""
    if inputs.num_requests > MOST_REQUESTS:
        return f"the fused kernels take at most {MOST_REQUESTS} requests, and there are {inputs.num_requests}"
    known = {*QUANTITIES, *ELEMENTS, *plan.constants, *plan.traits.state, *scalars_of(plan), "carry"}
    missing = sorted(plan.reads - known)
    if missing:
        return f"strategy {plan.name!r} reads {', '.join(missing)}, which the fused kernels do not compute yet"
    return None


@torch.no_grad()
def verify(plan: Plan, inputs: Inputs) -> VerifyResult:
    """Run `plan` on validated inputs; see `AcceptanceStrategy.verify`."""
    device, num_requests, most = inputs.device, inputs.num_requests, inputs.max_num_draft_tokens
    out = inputs.out or VerifyResult.empty(num_requests, most, device, logprobs=inputs.logprobs)
    if not num_requests:
        return out
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):  # kernels are launched on the current one
            return verify(plan, inputs)
    target, ids, cu = inputs.target.data, inputs.draft_token_ids, inputs.cu_num_draft_tokens
    draft = inputs.draft if plan.reads_draft and inputs.draft is not None and inputs.draft.data.shape[-1] else None
    rows = target if draft is None else draft.data
    ragged = cu is not None
    num_positions = ids.shape[0] if ragged else num_requests * most
    num_blocks = triton.cdiv(max(target.shape[-1], rows.shape[-1]), BLOCK)
    tuning = LARGE
    if num_requests * num_blocks < LARGE_BLOCKS:
        tuning = SMALL if inputs.target.is_logits else SMALL_PROBS
    num_emit_blocks = triton.cdiv(target.shape[-1], tuning.emit_block)
    rules, tables = bound(plan, device)
    call = compiled_for(
        rules,
        *_form(plan, inputs, draft, rows),
        out.num_passed is not None,
        tuning,
        BLOCK,
        (num_blocks - 1).bit_length(),
        (num_emit_blocks - 1).bit_length(),
        TILE,
    )
    memory = _memory(
        inputs,
        counters(num_requests, most),
        words(call, num_requests, num_positions, num_blocks, num_emit_blocks),
    )
    # Enough programs to fill the device; beyond that, more blocks a program.
    blocks_per_program = min(
        max(num_emit_blocks * num_requests // ENOUGH_PROGRAMS, 1), MOST_BLOCKS if tuning.loops else 1
    )
    num_programs = triton.cdiv(num_emit_blocks, blocks_per_program) if call.draws else 1
    uniforms, rng = inputs.uniforms, inputs.rng
    arguments = (
        out.output_token_ids,
        out.num_accepted,
        out.num_emitted,
        out.status,
        out.logprobs if out.logprobs is not None else out.num_accepted,
        out.raw_logprobs if out.raw_logprobs is not None else out.num_accepted,
        out.num_passed if out.num_passed is not None else out.num_accepted,
        memory.counters,
        memory.words,
        target,
        0 if ragged else target.stride(0),
        target.stride(-2),
        target.stride(-1),
        target if inputs.target.temperature is None else inputs.target.temperature,
        *_parameters(inputs.target),
        rows,
        0 if ragged else rows.stride(0),
        rows.stride(-2),
        rows.stride(-1),
        target if draft is None or draft.temperature is None else draft.temperature,
        *_parameters(draft or inputs.target),
        ids,
        0 if ragged else ids.stride(0),
        ids.stride(-1),
        cu if ragged else ids,
        uniforms.accept if uniforms else ids,
        uniforms.accept.stride(0) if uniforms else 0,
        uniforms.accept.stride(-1) if uniforms else 0,
        uniforms.emit if uniforms else ids,
        rng.seeds if rng else ids,
        rng.offsets if rng else ids,
        ids if inputs.bonus_token_ids is None else inputs.bonus_token_ids,
        tables,
        tables.shape[1],
        _stacked([inputs.state[name] for name in plan.traits.state], memory.words) if plan.traits.state else tables,
        num_requests,
        ids.shape[0] if ragged else 0,
        num_positions,
        most,
        target.shape[-1],
        rows.shape[-1],
        num_blocks,
        num_emit_blocks,
    )
    key = (
        *(device, target.dtype, rows.dtype, ids.dtype, call, tuning),
        *(_dtypes(inputs.target), None if draft is None else _dtypes(draft)),
        None if cu is None else cu.dtype,
        None if inputs.bonus_token_ids is None else inputs.bonus_token_ids.dtype,
        # What Triton compiles for besides: which of these are multiples of 16, which are 1, which need 64 bits.
        *(target.data_ptr() % 16, rows.data_ptr() % 16),
        *(target.shape[-1], rows.shape[-1], target.stride(-1), rows.stride(-1)),
    )
    found = stages(call, most)
    overlap = len(found) > 1 and num_requests * num_blocks < OVERLAP_BLOCKS and _overlaps(device)
    for number, (stage, first, last) in enumerate(found):
        if stage == "emit":
            grid, warps = (num_programs, num_requests, 1), tuning.emit_warps
        elif first == last:
            grid, warps = (1, num_requests, 1), 4
        else:
            grid, warps = (num_blocks, num_requests, last - first), tuning.reduce_warps
            if stage == "reduce" and call.selects:
                grid, warps = (2 * num_blocks, num_requests, last - first), SELECT_WARPS
        launch((key, stage, number == 0, overlap), grid, warps, (*arguments, first, num_programs), call)
    if out.logprobs is not None and out.raw_logprobs is not None and not call.raw:
        out.raw_logprobs.copy_(out.logprobs)
    return out


def _parameters(rows: Rows) -> tuple[torch.Tensor | int, ...]:
    """Return sampling parameters but the temperature as the kernel takes them; some tensor where there is none."""
    data, mask = rows.data, rows.bitmask
    if rows.is_plain:
        return data, data, data, data, 0, 0, 0, data, data, 0
    return (
        data if rows.top_k is None else rows.top_k,
        data if rows.top_p is None else rows.top_p,
        data if rows.min_p is None else rows.min_p,
        data if mask is None else mask,
        0 if mask is None else mask.stride(0),
        0 if mask is None else mask.stride(-2),
        0 if mask is None else mask.stride(-1),
        data if rows.bias_token_ids is None else rows.bias_token_ids,
        data if rows.bias_values is None else rows.bias_values,
        0 if rows.bias_token_ids is None else rows.bias_token_ids.shape[1],
    )


def _dtypes(rows: Rows) -> tuple[torch.dtype | None, ...] | None:
    """Return the dtypes of sampling parameters that may have several, None if there are no parameters."""
    if rows.is_plain:
        return None
    given = (rows.top_k, rows.top_p, rows.min_p, rows.bias_token_ids)
    return tuple(None if values is None else values.dtype for values in given)


_KERNELS: dict[tuple[Any, ...], Any] = {}


def launch(
    key: tuple[Any, ...], grid: tuple[int, int, int], warps: int, arguments: tuple[Any, ...], call: Call
) -> None:
    """Launch one stage; the first time through Triton's own dispatch, which takes several times as long."""
    _, stage, first, overlap = key
    constants = (call, stage, first, overlap)
    bounded = stage == "reduce" and call.selects and torch.version.hip is None
    kernel = _KERNELS.get(key)
    if kernel is not None:
        kernel[grid](*arguments, *constants)
        return
    _KERNELS[key] = verify_kernel[grid](
        *arguments,
        *constants,
        num_warps=warps,
        # The weights' bits are part of the specification: a contracted a * b - c would change them.
        enable_fp_fusion=False,
        **({"launch_pdl": not first} if overlap else {}),
        **({"maxnreg": SELECT_REGISTERS} if bounded else {}),
    )


@functools.cache
def _overlaps(device: torch.device) -> bool:
    """Return whether a kernel may start before the one that it depends on ends (programmatic dependent launch)."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def stages(call: Call, most: int) -> list[tuple[str, int, int]]:
    """Return the stages of a call in order, each with the positions [first, last) of its grid, if it has any."""
    reduces = any(call.logits) or any(call.best)
    step = -(-(most + 1) // ROUNDS) if call.lazy and reduces and call.needs_sums else most + 1
    found = []
    for first in range(0, most + 1, step):
        if reduces:
            found.append(("reduce", first, min(first + step, most + 1)))
        if call.needs_sums and first < most:
            found.append(("sum", first, min(first + step, most)))
    if most and call.carry_scalar >= 0:
        found.append(("carry", 0, 0))
        if call.mass_scalar >= 0 and most > 1:
            found.append(("mass", 1, most))
    if call.decided and not call.lazy:
        found.append(("decide", 0, 0))
    return [*found, ("emit", 0, 0)]


def words(call: Call, num_requests: int, num_positions: int, num_blocks: int, num_emit_blocks: int) -> int:
    """Return how many 64-bit words of its workspace a call uses."""
    partials = 2 * (2 * num_positions + num_requests)
    planes = len(call.sums) + call.top_k + (call.mass_scalar >= 0)
    per_position = planes * num_blocks + len(call.scalars)
    cut_words = 4 + call.tile * WIDTH.value // 2 + num_blocks * (call.block // WIDTH.value // 2)
    num_rows = num_positions + num_requests
    cuts = cut_words * (call.filtered[0] * num_rows + call.filtered[1] * num_positions)
    raw = 2 * call.raw * num_rows * num_blocks
    per_request = 2 * num_emit_blocks * (1 + call.emit_parts) + len(call.state)
    return partials * num_blocks + per_position * num_positions + per_request * num_requests + cuts + raw


def counters(num_requests: int, most: int) -> int:
    """Return how many counters of its workspace a call uses."""
    return num_requests * (3 * most + 5)


def workspace(plan: Plan, num_requests: int, most: int, vocab_size: int, device: torch.device) -> Workspace:
    """Return memory for every call of up to these sizes; see `AcceptanceStrategy.workspace`."""
    rules, _ = bound(plan, device)
    pairs = {name: (True, True) for name, kind in Call.__annotations__.items() if kind == tuple[bool, bool]}
    form = {**dict.fromkeys(FORM, True), **pairs, "state": (True,) * len(plan.traits.state)}  # of what needs most
    num_blocks, num_words = triton.cdiv(vocab_size, BLOCK), 0
    for tuning in (SMALL, SMALL_PROBS, LARGE):
        call = compiled_for(rules, *(form[name] for name in FORM), tuning, BLOCK, 0, 0, TILE)
        num_emit_blocks = triton.cdiv(vocab_size, tuning.emit_block)
        num_words = max(num_words, words(call, num_requests, num_requests * most, num_blocks, num_emit_blocks))
    return Workspace.allocate(counters(num_requests, most), num_words, device)


def _memory(inputs: Inputs, num_counters: int, num_words: int) -> Workspace:
    """Return the caller's workspace if there is one, else memory for calls that run one after the other."""
    given, device, stream = inputs.workspace, inputs.device, 0
    if given is not None:
        found = (given.counters.numel(), given.words.numel(), given.words.device)
        if found[0] < num_counters or found[1] < num_words or found[2] != device:
            msg = (
                f"workspace: expected at least {num_counters} counters and {num_words} words on {device}, got "
                f"{found[0]} and {found[1]} on {found[2]}. Allocate it with the strategy's own `workspace`, for as "
                "many requests, drafted tokens and vocabulary entries as any call has."
            )
            raise InputError(msg)
        return given
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            # It belongs to the graph, whose replays zero the counters: no other call may find it.
            return Workspace.allocate(num_counters, num_words, device)
        stream = torch.cuda.current_stream(device).cuda_stream
    return _scratch(device, stream, num_counters.bit_length(), num_words.bit_length())


@functools.lru_cache
def _scratch(device: torch.device, stream: int, counters_bits: int, words_bits: int) -> Workspace:
    """Return memory for the calls on one stream; sizes in bits."""
    del stream
    return Workspace.allocate(1 << counters_bits, 1 << words_bits, device)


def _form(plan: Plan, inputs: Inputs, draft: Rows | None, rows: torch.Tensor) -> tuple[Any, ...]:
    """Return what of a call's form the kernel is compiled for: ragged and what follows in `Call`, up to `best`."""
    uniforms, traits = inputs.uniforms, plan.traits
    target = inputs.target
    strides = (*target.data.stride()[:-1], *rows.stride()[:-1])
    return (
        inputs.cu_num_draft_tokens is not None,
        draft is not None,
        inputs.bonus_token_ids is not None,
        inputs.has_bonus_rows,
        uniforms is not None,
        uniforms is not None and uniforms.accept.ndim == 1,
        inputs.logprobs,
        inputs.logprobs and not target.is_plain,
        all(stride % 16 == 0 for stride in strides),
        (target.is_logits, draft is not None and draft.is_logits),
        *(
            (getattr(target, name) is not None, draft is not None and getattr(draft, name) is not None)
            for name in ("temperature", "top_k", "top_p", "min_p", "bitmask", "bias_token_ids")
        ),
        (
            "is_target_argmax" in plan.reads
            or "argmax" in {traits.recovered, traits.bonus}
            or ("target_max_prob" in plan.reads and not target.is_logits),
            draft is not None and "draft_max_prob" in plan.reads and not draft.is_logits,
        ),
        tuple(inputs.state[name].dtype == torch.bool for name in traits.state),
    )


def _stacked(state: list[torch.Tensor], words: torch.Tensor) -> torch.Tensor:
    """Return the caller's state as [n, B] float64, at the end of the workspace's words."""
    stacked = words[-len(state) * len(state[0]) :].view(torch.float64).view(len(state), -1)
    for row, values in zip(stacked, state, strict=True):
        row.copy_(values)
    return stacked


FORM = (
    "ragged",
    "has_draft",
    "has_bonus",
    "has_bonus_rows",
    "explicit",
    "flat_uniforms",
    "logprobs",
    "raw",
    "aligned",
    "logits",
    "temperature",
    "top_ks",
    "top_ps",
    "min_ps",
    "masked",
    "biased",
    "best",
    "state",
    "counts_passed",
)


@functools.lru_cache(maxsize=1024)
def compiled_for(rules: Rules, *form: Any) -> Call:
    """Return what the kernel is compiled for, the same object for the same call."""
    *form, tuning, block, blocks_bits, emit_blocks_bits, tile = form
    given = dict(zip(FORM, form, strict=True))
    # A stop is found as rows are read, so only where they are, and where nothing passes from one to the next.
    reads_rows = any(given["logits"]) or any(given["best"]) or rules["needs_sums"]
    leaves_rows_out = rules["stop"] == "first_rejection" and rules["carry_scalar"] < 0 and not given["counts_passed"]
    filtered = any(map(any, (given["top_ks"], given["top_ps"], given["min_ps"])))
    return Call(
        **rules,
        **given,
        # A search for a cut is long: programs do not enter it on a stop that may have moved.
        lazy=tuning.lazy and reads_rows and leaves_rows_out and not filtered,
        decided=tuning.decides_first or rules["stop"] != "first_rejection",
        block=block,
        max_blocks=1 << blocks_bits,
        loops=tuning.loops,
        emit_block=tuning.emit_block,
        emit_part=tuning.emit_part,
        max_emit_blocks=1 << emit_blocks_bits,
        tile=tile if filtered else 0,
        max_sub_blocks=(block // WIDTH.value) << blocks_bits if filtered else 0,
    )
