"""Whole calls through the Triton engine: what `test_triton_engine.py` checks, in processes of their own.

TRITON_INTERPRET=1 python triton_engine_cases.py interpreted results.json
python triton_engine_cases.py cuda:80 results.json
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton_cases import TARGETS

import acceptlib
from acceptlib import AcceptanceStrategy, Traits, VerifyResult, ops, rule
from acceptlib.engine import torch_engine
from acceptlib.engine.triton import engine
from acceptlib.engine.triton.kernel import verify_kernel
from acceptlib.inputs import Inputs, prepare
from acceptlib.ops import Value

NOTHING = dict.fromkeys(
    [
        "target_logits",
        "target_probs",
        "draft_logits",
        "draft_probs",
        "cu_num_draft_tokens",
        "max_num_draft_tokens",
        "sampling",
        "draft_sampling",
        "rng",
        "bonus_token_ids",
        "uniforms",
        "out",
    ]
)
SHAPES = {"B3-K3-V50": (3, 3, 50), "B4-K5-V1031": (4, 5, 1031), "B3-K0-V7": (3, 0, 7), "B2-K70-V11": (2, 70, 11)}
FIELDS = ("output_token_ids", "num_accepted", "num_emitted", "status")


class Cautious(AcceptanceStrategy):
    """A third party's strategy, whose residual depends on the drafted token and its position."""

    name = "cautious"
    traits = Traits(guarantee="lossy", bound="none")

    class Options(acceptlib.Options):
        """Options of `cautious`."""

        caution: float = 0.3

    @rule
    def accept(target_prob: Value, draft_prob: Value, position: Value, is_last: Value, caution: Value) -> Value:
        """Return h."""
        h = ops.minimum(ops.ratio(target_prob, draft_prob), 1.0) * (1.0 - caution / (position + 2.0))
        return ops.where(is_last, 0.5 * h, h)

    @rule
    def residual(p: Value, q: Value, is_drafted: Value, target_prob: Value, caution: Value) -> Value:
        """Return the weight of each entry."""
        return ops.where(is_drafted, caution * p, p - target_prob * q)


def strategies() -> dict[str, AcceptanceStrategy]:
    """Return what the kernels support, of the registry and of our own, by name."""
    found = {name: acceptlib.create(name) for name in acceptlib.available()}
    found["cautious"] = Cautious()
    p = torch.full((1, 2, 4), 0.25)
    one = inputs(torch.zeros(1, 1, dtype=torch.int64), target_probs=p, draft_probs=p[:, :1], rng=0)
    return {name: strategy for name, strategy in found.items() if engine.unsupported(strategy.plan, one) is None}


def inputs(ids: torch.Tensor, **arguments: object) -> Inputs:
    """Return a validated call."""
    return prepare(ids, **{**NOTHING, "logprobs": False, **arguments})  # type: ignore[arg-type]


def calls(shape: tuple[int, int, int]) -> dict[str, dict[str, object]]:
    """Return arguments by a readable name: layouts, dtypes, strides, explicit numbers, bad values."""
    num_requests, most, vocab_size = shape
    generator = torch.Generator().manual_seed(sum(shape))
    p = torch.softmax(torch.randn(num_requests, most + 1, vocab_size, generator=generator) * 2, -1)
    noise = torch.randn(num_requests, most, vocab_size, generator=generator) / 2
    q = torch.softmax(p[:, :most].log() + noise, -1)
    ids = (
        torch.multinomial(q.reshape(-1, vocab_size), 1, generator=generator).view(num_requests, most) if most else None
    )
    ids = torch.zeros(num_requests, 0, dtype=torch.int64) if ids is None else ids
    both = {"ids": ids, "target_probs": p, "draft_probs": q}
    rng = acceptlib.Rng(seeds=torch.arange(num_requests) - 1, offsets=torch.full((num_requests,), 2**40))
    found: dict[str, dict[str, object]] = {
        "padded": both,
        "one-hot": {"ids": ids, "target_probs": p},
        "equal": {**both, "draft_probs": p[:, :most]},
        "half": {**both, "target_probs": p.bfloat16(), "draft_probs": q.half(), "ids": ids.int()},
        "bonus": {**both, "bonus_token_ids": torch.arange(num_requests) * vocab_size // 2},
        "explicit": {**both, "uniforms": rng.uniforms(most)},
        "strided": {
            "ids": ids.T.contiguous().T,
            "target_probs": torch.stack((p, p), -1)[..., 0],
            "draft_probs": q.transpose(0, 1).contiguous().transpose(0, 1),
        },
        "narrow-draft": {**both, "draft_probs": q[..., : vocab_size // 2 + 1].contiguous()},
    }
    count = torch.arange(num_requests) % (most + 1)
    kept, rows = torch.arange(most) < count[:, None], torch.arange(most + 1) <= count[:, None]
    cu = torch.cat((torch.zeros(1, dtype=torch.int64), count.cumsum(0)))
    ragged = {"target_probs": p[rows], "cu_num_draft_tokens": cu, "max_num_draft_tokens": most}
    found["ragged"] = {**ragged, "ids": ids[kept], "draft_probs": q[kept]}
    uniforms = acceptlib.Uniforms(accept=rng.uniforms(most).accept[kept], emit=rng.uniforms(most).emit)
    found["ragged-explicit"] = {**ragged, "ids": ids[kept], "uniforms": uniforms}
    if most:
        for name, value in {"nan": math.nan, "inf": math.inf, "three": 3.0}.items():
            bad = p.clone()
            bad[0, 0] = value
            bad[-1, -1] = value
            found[f"bad-{name}"] = {**both, "target_probs": bad}
        cut = ids.clone()
        cut[0, most // 2], cut[-1, 0] = -1, vocab_size
        found["placeholders"] = {**both, "ids": cut}
        found["bad-draft"] = {**both, "draft_probs": torch.where(q > q.amax(-1, keepdim=True) / 2, math.nan, q)}
        found["bad-counts"] = {**ragged, "ids": ids[kept], "draft_probs": q[kept], "max_num_draft_tokens": most - 1}
    return found


def compare(strategy: AcceptanceStrategy, arguments: dict[str, object]) -> str:
    """Return an empty string if both engines do the same, else what differs."""
    rest = {name: value for name, value in arguments.items() if name != "ids"}
    ids = arguments["ids"]
    assert isinstance(ids, torch.Tensor)
    results: list[VerifyResult] = []
    for run in (torch_engine.verify, engine.verify):
        if "uniforms" not in rest:
            cu = rest.get("cu_num_draft_tokens")
            count = len(cu) - 1 if isinstance(cu, torch.Tensor) else len(ids)
            rest["rng"] = acceptlib.Rng(seeds=torch.arange(count) * 31 - 7, offsets=torch.full((count,), 2**40 + 5))
        results.append(run(strategy.plan, inputs(ids, **rest)))
        rng = rest.get("rng")
        if isinstance(rng, acceptlib.Rng) and not bool((rng.offsets == 2**40 + 6).all()):
            return f"offsets {rng.offsets.tolist()}"
    expected, found = results
    different = [name for name in FIELDS if not torch.equal(getattr(expected, name), getattr(found, name))]
    return "; ".join(f"{name}: {getattr(expected, name)} and {getattr(found, name)}" for name in different)


def compile_only(strategy: AcceptanceStrategy, target: str, *, ragged: bool) -> str:
    """Return an empty string if the kernel compiles to a binary."""
    constants, _ = engine.bound(strategy.plan, torch.device("cpu"))
    constants = {
        **constants,
        "RAGGED": ragged,
        "HAS_DRAFT": ragged,
        "HAS_BONUS": not ragged,
        "EXPLICIT": False,
        "FLAT_UNIFORMS": False,
        "ALIGNED": ragged,
        "BLOCK": engine.BLOCK,
        "MAX_BLOCKS": 32,
    }
    pointers = {
        "token_ids_ptr num_accepted_ptr num_emitted_ptr arrived_ptr cu_ptr": "*i32",
        "status_ptr": "*i8",
        "sums_ptr ids_ptr emit_ptr seeds_ptr offsets_ptr bonus_ptr": "*i64",
        "masses_ptr target_ptr draft_ptr": "*fp32",
        "accept_ptr tables_ptr": "*fp64",
    }
    signature = dict.fromkeys(verify_probs_kernel.arg_names, "i32") | dict.fromkeys(constants, "constexpr")
    for names, kind in pointers.items():
        signature |= dict.fromkeys(names.split(), kind)
    positions = {(verify_probs_kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=verify_probs_kernel, signature=signature, constexprs=positions)
    options = {"enable_fp_fusion": False, "num_warps": engine.NUM_WARPS}
    kernel = triton.compile(source, target=GPUTarget(*TARGETS[target]), options=options)
    return "" if {"cubin", "hsaco"} & kernel.asm.keys() else f"no binary in {sorted(kernel.asm)}"


def labels(mode: str) -> list[str]:
    """Return the names of a mode's cases."""
    if mode == "interpreted":
        return [
            f"{name}-{shape}-{call}"
            for name in strategies()
            for shape, sizes in SHAPES.items()
            for call in calls(sizes)
        ]
    return [f"{name}-{layout}" for name in strategies() for layout in ("ragged", "padded")]


def run_apart(mode: str, path: Path) -> dict[str, str]:
    """Run this script in a process of its own; return what is wrong by case, empty where nothing is."""
    environment = {**os.environ, "TRITON_INTERPRET": "1" if mode == "interpreted" else "0"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    subprocess.run([sys.executable, __file__, mode, path], check=True, env=environment)  # noqa: S603 - ourselves
    return json.loads(path.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def main(mode: str, path: str) -> None:
    """Run every case of a mode."""
    torch.set_num_threads(1)
    results = {}
    if mode == "interpreted":
        engine.BLOCK = 256  # so that small vocabularies have several blocks too
        for shape, sizes in SHAPES.items():
            for call, arguments in calls(sizes).items():
                for name, strategy in strategies().items():
                    results[f"{name}-{shape}-{call}"] = compare(strategy, arguments)
    else:
        for name, strategy in strategies().items():
            for layout in ("ragged", "padded"):
                results[f"{name}-{layout}"] = compile_only(strategy, mode, ragged=layout == "ragged")
    Path(path).write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
