"""A rule is written once: what torch makes of it and what Triton makes of it are the same."""

from __future__ import annotations

import functools
import math
import re
from math import exp
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", minversion="3.6")

import triton_cases

import acceptlib
from acceptlib.engine.triton.rules import bind, compile_rule
from acceptlib.errors import StrategyDefinitionError

if TYPE_CHECKING:
    from collections.abc import Callable

CASES = triton_cases.cases()
TRANSCENDENTAL = {"exp", "log", "log2"}
FUSED = {"cuda": r"\bfma\.", "hip": r"\bv_(pk_)?(fma|fmac|mad|mac)_"}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """Return a function that interprets or compiles all cases, once a mode."""
    folder: Path = tmp_path_factory.mktemp("triton")
    return functools.cache(lambda mode: triton_cases.run_apart(mode, folder / f"{mode.replace(':', '-')}.pt"))


@pytest.mark.parametrize("label", CASES, ids=lambda label: f"{label}-interpreted")
def test_interpreted_rule_equals_torch(label: str, results: Callable[[str], dict[str, Any]]) -> None:
    """Bit for bit; within 2 ulp where a logarithm or `exp` is not the same function."""
    case, result = CASES[label], results("interpreted")[label]
    assert isinstance(result, torch.Tensor), result
    expected = case.expected().to(case.dtype)
    ulps = 2 if case.operations & TRANSCENDENTAL else 0
    assert_within(result.numpy(), expected.numpy(), ulps, case)


@pytest.mark.parametrize("target", triton_cases.TARGETS)
@pytest.mark.parametrize("label", CASES)
def test_rule_compiles_without_gpu(label: str, target: str, results: Callable[[str], dict[str, Any]]) -> None:
    """Assembly and binary exist, call nothing undefined, and fuse nothing that torch does not fuse."""
    case, asm = CASES[label], results(target)[label]
    assert isinstance(asm, dict), asm
    backend = target.partition(":")[0]
    text, binary = {"cuda": ("ptx", "cubin"), "hip": ("amdgcn", "hsaco")}[backend]
    assert asm[text]
    assert asm[binary]
    undefined = re.findall(r"^declare .*@(?!llvm\.|__nvvm_reflect)(\w+)", asm["llir"], re.MULTILINE)
    assert not undefined
    assert ".extern .func" not in asm[text]
    # Division, exp and log are made of fused operations; a residual without them must have none.
    divides = "div" in asm["ttir"] and backend == "hip"
    if not case.operations & TRANSCENDENTAL and not divides:
        assert not re.findall(FUSED[backend], asm[text])
    assert not re.search(r"\b(div\.full|div\.approx|sqrt\.approx)", asm[text])


def test_numbers_keep_float64(results: Callable[[str], dict[str, Any]]) -> None:
    """Compared, returned or held by a variable, no number is rounded to float32 on its way."""
    constants = set(re.findall(r"0d[0-9A-F]{16}", results("cuda:80")["acme-accept"]["ptx"]))
    rounded = {text for text in constants if int(text.removeprefix("0d"), base=16) & 0x1FFFFFFF == 0}
    assert {as_ptx(0.1), as_ptx(0.3), as_ptx(1.0 - 0.7 - 0.1), as_ptx(0.7 / 7), as_ptx(0.9)} <= constants
    assert rounded <= {as_ptx(0.0), as_ptx(1.0), as_ptx(3.0)}


def test_rule_without_source_is_refused() -> None:
    """Triton compiles source: the error says so, and what to do."""
    scope: dict[str, Any] = {"acceptlib": acceptlib}
    exec("@acceptlib.rule\ndef accept(target_prob):\n    return target_prob\n", scope)  # noqa: S102 - as in a REPL
    with pytest.raises(StrategyDefinitionError, match=r"rule 'accept': .* in a file, .*backend='torch'"):
        bind(scope["accept"], ("target_prob",), {})
    with pytest.raises(StrategyDefinitionError, match="expected a function written with `def`"):
        bind(acceptlib.rule(lambda target_prob: target_prob), ("target_prob",), {})


@acceptlib.rule
def cubed(target_prob: Any) -> Any:
    """Return what Triton has no operator for."""
    return (target_prob / 2) ** 3


@acceptlib.rule
def floored(target_prob: Any, draft_prob: Any) -> Any:
    """Return what Triton does otherwise."""
    ratio = target_prob
    ratio //= draft_prob
    return ratio


@acceptlib.rule
def of_torch(target_prob: Any, draft_prob: Any) -> Any:
    """Return what only torch's tensors have."""
    return torch.minimum(target_prob, draft_prob)


@acceptlib.rule
def of_math(target_prob: Any) -> Any:
    """Return what only numbers have."""
    return exp(target_prob) * math.exp(-1.0)


@acceptlib.rule
def of_value(target_prob: Any) -> Any:
    """Return what only arrays have."""
    return (target_prob / 2).clip(0.0, 1.0)


@acceptlib.rule
def importing(target_prob: Any) -> Any:
    """Look a name up where a kernel would not."""
    from acceptlib import ops as own  # noqa: PLC0415 - what is refused

    return own.exp(target_prob)


@acceptlib.rule
def comprehending(target_prob: Any) -> Any:
    """Return what Triton has no expression for."""
    return sum([target_prob * weight for weight in (0.5, 0.25)])


@acceptlib.rule
def of_lambda(target_prob: Any) -> Any:
    """Call a function that has no source of its own."""
    half = lambda p: p / 2  # noqa: E731 - what is refused
    return half(target_prob)


@acceptlib.rule
def of_inner(target_prob: Any) -> Any:
    """Call a function that is defined inside."""

    def half(p: Any) -> Any:
        return p / 2

    return half(target_prob)


@acceptlib.rule
def naming(target_prob: Any) -> Any:
    """Name a value within an expression."""
    return (half := target_prob / 2) * half


@acceptlib.rule
def repeating(target_prob: Any) -> Any:
    """Loop as long as a number says."""
    times = 2
    while times:
        times -= 1
    return target_prob / 2


@acceptlib.rule
def summing(target_prob: Any) -> Any:
    """Begin with a number that a loop changes: written into its body, it would be the same each time."""
    total = 0.0
    for weight in (0.5, 0.25):
        total = total + weight * target_prob
    return total


def halves(p: Any) -> Any:
    """Return two values."""
    return p / 2, p / 4


@acceptlib.rule
def unpacking(target_prob: Any) -> Any:
    """Take two values from a function."""
    first, second = halves(target_prob)
    return first + second


@acceptlib.rule
def twice(target_prob: Any) -> Any:
    """Assign a value and a number to one name."""
    x, x = target_prob, 0.1  # noqa: PLW0128 - what is refused
    return x


@acceptlib.rule
def listing(target_prob: Any) -> Any:
    """Hold values in a list, where a kernel would round numbers."""
    both = [target_prob, 0.1]
    return both[0] * both[1]


@acceptlib.rule
def branching(target_prob: Any) -> Any:
    """Ask a value whether it is true, which a tensor does not know."""
    if target_prob > 0.5:
        return target_prob / 2
    return target_prob


@pytest.mark.parametrize(
    ("rule", "code"),
    [
        (cubed, r"\(target_prob / 2\) \*\* 3"),
        (floored, "ratio // draft_prob"),
        (of_torch, r"torch\.minimum\(target_prob, draft_prob\)"),
        (of_math, r"exp\(target_prob\)"),
        (of_value, r"\(target_prob / 2\)\.clip\(0\.0, 1\.0\)"),
        (importing, "from acceptlib import ops as own"),
        (comprehending, r"\[target_prob \* weight for weight in \(0\.5, 0\.25\)\]"),
        (of_lambda, "lambda p: p / 2"),
        (of_inner, r"def half\(p: Any\).*"),
        (naming, r"\(half := \(target_prob / 2\)\)"),
        (repeating, "while times:.*"),
        (unpacking, r"\(?first, second\)? = halves\(target_prob\)"),
        (twice, r"\(?x, x\)? = \(target_prob, 0\.1\)"),
        (listing, r"\[target_prob, 0\.1\]"),
        (summing, r"for weight in \(0\.5, 0\.25\):.*"),
        (branching, r"if target_prob > 0\.5"),
    ],
    ids=[
        *("power", "floor", "torch", "builtin", "method"),
        *("import", "comprehension", "lambda", "function", "name", "while", "unpacking", "twice", "list", "for", "if"),
    ],
)
def test_operators_that_a_gpu_has_not_are_refused(rule: Any, code: str) -> None:
    """The message names the rule and the expression, and says what is there instead."""
    message = rf"(?s)rule '{rule.function.__name__}': expected .*, got '?{code}'?\. Write .*backend='torch'"
    with pytest.raises(StrategyDefinitionError, match=message):
        bind(rule, ("target_prob", "draft_prob"), {})


def test_unknown_argument_is_refused() -> None:
    """A kernel that lacks a value says which."""
    with pytest.raises(StrategyDefinitionError, match=r"reads 'draft_prob': expected one of target_prob or a number"):
        bind(acceptlib.create("rejection").plan.accept, ("target_prob",), {})


def test_bind_is_cached() -> None:
    """Equal arguments give the same function, so that a kernel is compiled once."""
    plan = acceptlib.create("lenience").plan
    names = ("draft_prob", "target_prob")
    function = bind(plan.accept, names, plan.constants)
    assert bind(plan.accept, names, dict(plan.constants)) is function
    assert bind(plan.accept, names, {"lenience": 0.5}) is not function
    assert bind(plan.accept, names[::-1], plan.constants) is not function


def as_ptx(number: float) -> str:
    """Return a float64 constant as PTX writes it."""
    return f"0d{np.float64(number).view(np.uint64):016X}"


def assert_within(result: np.ndarray, expected: np.ndarray, ulps: int, case: triton_cases.Case) -> None:
    """Compare [N] values; NaN equals NaN."""
    with np.errstate(invalid="ignore"):
        close = np.abs(result - expected) <= ulps * np.spacing(np.abs(expected))
    same = (result == expected) | (np.isnan(result) & np.isnan(expected)) | close
    if not same.all():
        where = int(np.flatnonzero(~same)[0])
        read = {name: value[where].item() for name, value in case.inputs().items() if name in case.rule.names}
        pytest.fail(f"{(~same).sum()} of {len(same)} differ: {result[where]!r}, expected {expected[where]!r} at {read}")


def divided(target_prob: Any, option: Any) -> Any:
    return target_prob / option


def test_numbers_that_are_equal_may_differ() -> None:
    """A rule divides by 0.0 and by -0.0, and may ask whether it has a flag."""
    numbers = (0.0, -0.0, 1, 1.0, True)
    functions = [compile_rule(divided, {"option": number}, of_rows=False) for number in numbers]
    assert len({id(function) for function in functions}) == len(numbers)
    assert [compile_rule(divided, {"option": number}, of_rows=False) for number in numbers] == functions
