"""The Triton engine: what it can run, and the launch."""

import functools
from typing import Any

import torch
import triton

from acceptlib.engine.plan import Plan
from acceptlib.engine.triton.binding import bind
from acceptlib.engine.triton.probs import VALUES, verify_probs_kernel
from acceptlib.inputs import Inputs, VerifyResult
from acceptlib.rules import ELEMENTS

BLOCK = 4096
NUM_WARPS = 8
ENOUGH_PROGRAMS = 2112
MOST_BLOCKS = 4
MAX_REQUESTS = 65535


def unsupported(plan: Plan, inputs: Inputs) -> str | None:
    """Return why this engine cannot run a call, or None if it can."""
    if inputs.target.is_logits or (inputs.draft is not None and inputs.draft.is_logits):
        return "the fused kernels take probabilities only so far"
    if inputs.logprobs:
        return "the fused kernels do not return log-probabilities yet"
    if inputs.num_requests > MAX_REQUESTS:
        return f"a grid holds at most {MAX_REQUESTS} requests, got {inputs.num_requests}"
    if not inputs.target.data.numel():
        return "there is no row to read"
    traits = plan.traits
    if traits.stop != "first_rejection" or plan.carry is not None:
        return f"strategy {plan.name!r} decides on later rows, which the fused kernels do not yet"
    if "argmax" in {traits.recovered, traits.bonus}:
        return f"strategy {plan.name!r} emits an argmax, which the fused kernels do not yet"
    known = {*VALUES, *ELEMENTS, *plan.constants}
    missing = sorted(plan.reads - known)
    if missing:
        return f"strategy {plan.name!r} reads {', '.join(missing)}, which the fused kernels do not compute yet"
    return None


@torch.no_grad()
def verify(plan: Plan, inputs: Inputs) -> VerifyResult:
    """Run `plan` on validated inputs; see `AcceptanceStrategy.verify`."""
    device, num_requests, most = inputs.device, inputs.num_requests, inputs.max_num_draft_tokens
    out = inputs.out or VerifyResult.empty(num_requests, most, device)
    if not num_requests:
        return out
    num_blocks = triton.cdiv(inputs.vocab_size, BLOCK)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    sums, masses, arrived = _scratch(device, stream, triton.next_power_of_2(num_requests), num_blocks)
    target, draft, ids = inputs.target.data, inputs.draft, inputs.draft_token_ids
    has_draft = draft is not None and draft.data.numel() > 0
    rows = draft.data if has_draft and draft is not None else target
    ragged = inputs.cu_num_draft_tokens is not None
    uniforms, rng = inputs.uniforms, inputs.rng
    flat = uniforms is not None and uniforms.accept.ndim == 1
    constants, tables = bound(plan, device)
    # Enough programs to fill the device; beyond that, more blocks a program, which repeat the decision less often.
    blocks_per_program = min(max(num_blocks * num_requests // ENOUGH_PROGRAMS, 1), MOST_BLOCKS)
    verify_probs_kernel[triton.cdiv(num_blocks, blocks_per_program), num_requests](
        out.output_token_ids,
        out.num_accepted,
        out.num_emitted,
        out.status,
        out.status if out.num_passed is None else out.num_passed,
        sums,
        masses,
        arrived,
        target,
        0 if ragged else target.stride(0),
        target.stride(-2),
        target.stride(-1),
        rows,
        0 if ragged else rows.stride(0),
        rows.stride(-2),
        rows.stride(-1),
        ids,
        0 if ragged else ids.stride(0),
        ids.stride(-1),
        inputs.cu_num_draft_tokens if ragged else ids,
        uniforms.accept if uniforms else ids,
        uniforms.accept.stride(0) if uniforms and not flat else 0,
        uniforms.accept.stride(-1) if uniforms else 0,
        uniforms.emit if uniforms else ids,
        rng.seeds if rng else ids,
        rng.offsets if rng else ids,
        ids if inputs.bonus_token_ids is None else inputs.bonus_token_ids,
        tables,
        tables.shape[1],
        ids.shape[0] if ragged else 0,
        most,
        inputs.vocab_size,
        rows.shape[-1],
        num_blocks,
        **constants,
        RAGGED=ragged,
        HAS_DRAFT=has_draft,
        HAS_BONUS=inputs.bonus_token_ids is not None,
        HAS_BONUS_ROWS=inputs.has_bonus_rows,
        COUNTS=out.num_passed is not None,
        EXPLICIT=uniforms is not None,
        FLAT_UNIFORMS=flat,
        ALIGNED=all(stride % 16 == 0 for stride in (*target.stride()[:-1], *rows.stride()[:-1])),
        BLOCK=BLOCK,
        MAX_BLOCKS=triton.next_power_of_2(num_blocks),
        num_warps=NUM_WARPS,
        # The weights' bits are part of the specification: a contracted a * b - c would change them.
        enable_fp_fusion=False,
    )
    return out


@functools.lru_cache
def _scratch(device: torch.device, stream: int, num_requests: int, num_blocks: int) -> tuple[torch.Tensor, ...]:
    """Return the kernel's scratch for calls on one stream, which run one after the other."""
    del stream
    sums = torch.empty((num_requests, num_blocks), dtype=torch.int64, device=device)
    masses = torch.empty((num_requests, 3, num_blocks), dtype=torch.float32, device=device)
    return sums, masses, torch.zeros(num_requests, dtype=torch.int32, device=device)


_BOUND: dict[tuple[int, torch.device], tuple[Plan, dict[str, Any], torch.Tensor]] = {}


def bound(plan: Plan, device: torch.device) -> tuple[dict[str, Any], torch.Tensor]:
    """Return the kernel's constants for a plan's rules, and its per-position constants [n, size] on the device."""
    key = (id(plan), device)
    if key not in _BOUND:
        tuples = {name: value for name, value in plan.constants.items() if isinstance(value, tuple)}
        size = max((len(value) for value in tuples.values()), default=0) + 1
        rows = [[*value, *[0.0] * (size - len(value))] for value in tuples.values()] or [[0.0]]
        accept, accept_index = bind(plan.accept, (*VALUES, *tuples), plan.constants)
        residual, residual_index = None, ()
        if plan.residual is not None:
            residual, residual_index = bind(plan.residual, (*ELEMENTS, *VALUES, *tuples), plan.constants)
        constants = {
            "ACCEPT": accept,
            "ACCEPT_INDEX": accept_index,
            "RESIDUAL": residual,
            "RESIDUAL_INDEX": residual_index,
            "NUM_TABLES": len(tuples),
            "READS_TARGET": "target_prob" in plan.reads,
            # Whether the residual reads more than the row itself.
            "SCALARS": any(index >= len(ELEMENTS) for index in residual_index),
        }
        # The plan is kept with its entry, so that its id stays its own.
        _BOUND[key] = (plan, constants, torch.tensor(rows, dtype=torch.float64, device=device))
    return _BOUND[key][1:]
