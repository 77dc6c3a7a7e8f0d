"""Every rule of every strategy as a small kernel: what `test_triton_rules.py` checks.

Triton decides when it decorates a function whether it is interpreted, so this module is also a script: it interprets or
compiles all cases in a process of its own and writes what came out.

    TRITON_INTERPRET=1 python triton_cases.py interpreted results.pt
    python triton_cases.py cuda:80 results.pt
"""

# ruff: noqa: ANN001, ANN201, N803, RUF005, SIM108 - jit functions; their constants are in capitals

import functools
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton
import triton.language as tl
from acceptlib_cactus import Cactus
from acceptlib_cascade import Cascade
from acceptlib_entropy_scaled import EntropyScaled
from acceptlib_relaxed import Relaxed
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import acceptlib
from acceptlib import ops as vocabulary
from acceptlib.compat import vllm_v0
from acceptlib.engine import plan as plans
from acceptlib.engine.triton.rules import bind, evaluate
from acceptlib.rules import ELEMENTS, SCALARS, Rule

if TYPE_CHECKING:
    from acceptlib.ops import Value

TARGETS = {"cuda:80": ("cuda", 80, 32), "cuda:90": ("cuda", 90, 32), "hip:gfx942": ("hip", "gfx942", 64)}
N = 128
EDGES = (0.0, 1.0, 0.5, 0.1, 0.2, 1e-8, 1e-30)
FLOOR = np.float64(1e-3)  # as NumPy's functions return numbers


def blend(a: "Value", /, *, b: "Value", weight: "Value" = 0.3) -> "Value":
    """Return a weighted mean, as a helper of a rule would."""
    rest = 1.0 - weight
    return weight * a + rest * b


class Acme(acceptlib.AcceptanceStrategy):
    """A third party's strategy, which uses what a rule may use besides the vocabulary."""

    name = "acme"
    traits = acceptlib.Traits(guarantee="lossy", bound="none", stop="window", window=2, top_k=3)

    class Options(acceptlib.Options):
        """Options of `acme`."""

        strength: float = 0.7
        cap: float = math.inf
        harsh: bool = False
        steps: int = 3

    @acceptlib.row_sum
    def overlap(p: "Value", q: "Value", strength: "Value") -> "Value":
        """Sum to a mass that both models share."""
        return vocabulary.minimum(strength * p, vocabulary.ratio(q / 3, 0.9)) / 0.7

    @acceptlib.rule
    def carry(carry: "Value", target_prob: "Value", strength: "Value") -> "Value":
        """Return a decayed carry."""
        decay: float = vocabulary.exp(-strength)
        decay += FLOOR
        return vocabulary.abs(carry * decay - +target_prob)

    @acceptlib.rule
    def accept(
        target_prob: "Value", overlap: "Value", is_last: "Value", harsh: "Value", strength: "Value", steps: "Value"
    ) -> "Value":
        """Return h, with numbers that float32 cannot hold."""
        threshold = 1.0 - strength - 0.1
        if harsh:
            return 0.0
        (tenth, share), p = (0.1, strength / 7), target_prob
        h = acceptlib.ops.where(p > tenth, 0.3, blend(target_prob, b=overlap))
        h, p = p * share, h - (is_last * 0.1 + (1.7 - is_last * 3) * 0.3)
        return vocabulary.where(target_prob >= threshold, 0.9, p) / steps + blend(h, b=FLOOR, weight=0.1)

    @acceptlib.rule
    def forgive(target_top_entropy: "Value", cap: "Value", is_last: "Value") -> "Value":
        """Return what differs under an infinite cap at the last token and before it."""
        low = ~(is_last + (target_top_entropy > 0.1))
        return (target_top_entropy >= cap) | (is_last & (abs(target_top_entropy) > 0.2)) | low

    @acceptlib.rule
    def residual(p: "Value", q: "Value", is_drafted: "Value", strength: "Value") -> "Value":
        """Return a weight that a fused multiply-add would change."""
        weight = vocabulary.where(is_drafted, 0.1, p**2 - strength * q) - math.pi * q
        return weight + is_drafted * 0.3 / (p + 1.0) - is_drafted / (q + 1.0)


class Constant(acceptlib.AcceptanceStrategy):
    """A rule that reads nothing."""

    name = "constant"
    traits = acceptlib.Traits(guarantee="lossy", bound="none")

    @acceptlib.rule
    def accept() -> "Value":
        """Return h."""
        return 0.3


@dataclass(frozen=True)
class Case:
    """One rule of a strategy: its role, its dtype, and what the kernel's values are."""

    plan: plans.Plan
    rule: Rule
    dtype: torch.dtype

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the kernel's values, in order: more than the rule reads."""
        tables = (name for name, constant in self.plan.constants.items() if isinstance(constant, tuple))
        elements = ELEMENTS if self.dtype == torch.float32 else ()
        return (*elements, *SCALARS, *self.plan.row_sums, *self.plan.traits.state, *tables)

    def is_flag(self, name: str) -> bool:
        """Return whether a value is a bool."""
        return name.startswith("is_") or name in self.plan.traits.state

    def inputs(self) -> dict[str, torch.Tensor]:
        """Return [N] values by name: every pair of edges, then random numbers."""
        generator = torch.Generator().manual_seed(0)
        values = {}
        for name in self.names:
            value = torch.rand(N, generator=generator, dtype=torch.float64)
            value[: len(EDGES) ** 2] = torch.tensor(EDGES, dtype=torch.float64).repeat(len(EDGES))
            if name in {"q", "draft_prob", "next_residual_mass", "target_top_entropy"}:
                value[: len(EDGES) ** 2] = torch.tensor(EDGES, dtype=torch.float64).repeat_interleave(len(EDGES))
            values[name] = (value > 0.5) if self.is_flag(name) else value.to(self.dtype)
        position = torch.arange(N) % 8
        values["position"] = position.to(self.dtype)
        for name, constant in self.plan.constants.items():
            if isinstance(constant, tuple):
                values[name] = torch.tensor((*constant, *[0.0] * 8), dtype=self.dtype)[position]
        return values

    def expected(self) -> torch.Tensor:
        """Return what the torch engine makes of the inputs on a CPU, where scalars are arrays, [N]."""
        numbers = {name: number for name, number in self.plan.constants.items() if not isinstance(number, tuple)}
        scalars = self.dtype == torch.float64
        values = {name: value.numpy() if scalars else value for name, value in self.inputs().items()}
        with np.errstate(all="ignore"):
            result = plans.evaluate(self.rule, values, numbers)
        result = result if isinstance(result, torch.Tensor) else torch.from_numpy(np.asarray(result))
        return (result != 0 if self.rule is self.plan.forgive else result.to(self.dtype)).expand(N)

    @property
    def operations(self) -> set[str]:
        """Return the names that the rule's code uses."""
        return set(self.rule.function.__code__.co_names)


def cases() -> dict[str, Case]:
    """Return every rule of every strategy, by a readable name."""
    strategies = {name: acceptlib.create(name) for name in acceptlib.available()}
    strategies |= {
        "fly-infinite": acceptlib.create("fly", fly_entropy_threshold=math.inf),
        "synthetic-rates": acceptlib.create("synthetic", synthetic_acceptance_rates=(0.9, 0.7, 0.1)),
        "cactus": Cactus(),
        "cascade": Cascade(),
        "cascade-infinite": Cascade(alpha=-math.inf),
        "entropy-scaled": EntropyScaled(),
        "relaxed": Relaxed(relaxed_topk=1, begin_thinking_phase_token=0, end_thinking_phase_token=1),
        "acme": Acme(),
        "acme-harsh": Acme(harsh=True, cap=0.2),
        "constant": Constant(),
        "guarded-typical": vllm_v0.TypicalAcceptanceSampler()._strategy,
    }
    found = {}
    for label, strategy in strategies.items():
        plan = strategy.plan  # none where a strategy overrides `verify`
        if plan is None:
            continue
        for role in ("accept", "carry", "forgive", "residual"):
            if (rule := getattr(plan, role)) is not None:
                found[f"{label}-{role}"] = Case(plan, rule, torch.float32 if role == "residual" else torch.float64)
        found |= {f"{label}-{name}": Case(plan, rule, torch.float32) for name, rule in plan.row_sums.items()}
    return found


@triton.jit
def evaluate_kernel(
    out_ptr,  # [N]
    values_ptr,  # [len(IS_FLAG), N]
    RULE: tl.constexpr,
    IS_FLAG: tl.constexpr,
    DTYPE: tl.constexpr,
    N: tl.constexpr,
):
    """Evaluate one rule on N entries at once."""
    entry = tl.arange(0, N)
    values = ()
    for i in tl.static_range(len(IS_FLAG)):
        value = tl.load(values_ptr + i * N + entry)
        if IS_FLAG[i]:
            values = values + (value != 0,)
        else:
            values = values + (value,)
    tl.store(out_ptr + entry, evaluate(RULE, values, DTYPE))


def run_apart(mode: str, path: Path) -> dict[str, torch.Tensor | dict[str, str] | str]:
    """Run this script in a process of its own; return its results by case, or an error's text instead."""
    environment = {**os.environ, "TRITON_INTERPRET": "1" if mode == "interpreted" else "0"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)  # the modules that are tested here
    subprocess.run([sys.executable, __file__, mode, path], check=True, env=environment)  # noqa: S603 - ourselves
    return torch.load(path)


def interpret(case: Case, constants: dict[str, Any]) -> torch.Tensor:
    """Return what the kernel makes of the inputs, [N]."""
    values = torch.stack([value.to(case.dtype) for value in case.inputs().values()])
    out = torch.full((N,), math.nan, dtype=case.dtype)
    evaluate_kernel[(1,)](out, values, **constants)
    return out


def compile_only(case: Case, constants: dict[str, Any], target: str) -> dict[str, str]:
    """Return the kernel's code by kind; for binaries, their size."""
    pointer = "*fp32" if case.dtype == torch.float32 else "*fp64"
    signature = {"out_ptr": pointer, "values_ptr": pointer, **dict.fromkeys(constants, "constexpr")}
    positions = {(evaluate_kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=evaluate_kernel, signature=signature, constexprs=positions)
    kernel = triton.compile(source, target=GPUTarget(*TARGETS[target]), options={"enable_fp_fusion": False})
    return {kind: text if isinstance(text, str) else f"{len(text)} bytes" for kind, text in kernel.asm.items()}


def main(mode: str, path: str) -> None:
    """Interpret or compile every case."""
    results = {}
    for label, case in cases().items():
        try:
            constants = {
                "RULE": bind(case.rule, case.names, case.plan.constants),
                "IS_FLAG": tuple(case.is_flag(name) for name in case.names),
                "DTYPE": {torch.float32: tl.float32, torch.float64: tl.float64}[case.dtype],
                "N": N,
            }
            if case.rule is case.plan.forgive:
                constants["DTYPE"] = tl.int1
            run = interpret if mode == "interpreted" else functools.partial(compile_only, target=mode)
            results[label] = run(case, constants)
        except Exception as error:  # noqa: BLE001, PERF203 - the test of this case reports it
            chain, text = error, []
            while chain is not None:
                text.append(str(chain))
                chain = chain.__cause__
            results[label] = "\n".join(text)
    torch.save(results, path)


if __name__ == "__main__":
    main(*sys.argv[1:])
