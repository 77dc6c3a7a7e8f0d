"""The conformance suite: right strategies pass it, every mutant fails its check, and a class inherits it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import conformance_mutants as mutants
import pytest
import torch
from acceptlib_relaxed import Relaxed
from engine_mutants import Budget
from rule_mutants import MUTANTS

import acceptlib
from acceptlib import AcceptanceStrategy, Traits, VerifyResult, ops, rule
from acceptlib.errors import BackendError, InputError, StrategyDefinitionError
from acceptlib.strategies.greedy import Greedy
from acceptlib.strategies.rejection import Rejection
from acceptlib.testing import StrategyConformance, Subject, check_strategy, checks_for
from acceptlib.testing.checks import PROOFS, chosen, name_of
from acceptlib.testing.suite import due, run_check

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "conformance.md").read_text(encoding="utf-8")

ELSEWHERE = {"backends_agree", "graph_capture"}
"""Checks that need Triton or a GPU."""

NOT_RANDOM = {"own_seed", "every_bit_of_stream", "steps_differ"}

SKIPPED: dict[str, set[str]] = {
    "block": set(),
    "fly": {"declared_bound"},
    "greedy": NOT_RANDOM,
    "lenience": set(),
    "mixture": set(),
    "rejection": set(),
    "synthetic": {"declared_bound", "neutral_setting", "impossible_draft_never_stands"},
    "target-only": set(),
    "tv-budget": set(),
    "typical": {"declared_bound", "neutral_setting"},
}
"""What says nothing about a built-in strategy, each by its declared traits or by what it reads."""

OTHER_OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "typical-sample": ("typical", {"recovery": "sample"}),
    "lenience-strong": ("lenience", {"lenience": 0.3}),
    "mixture-all-draft": ("mixture", {"weight": 0.0}),
    "target-only-single": ("target-only", {"threshold_single": 0.4}),
    "target-only-acc": ("target-only", {"threshold_acc": 0.6}),
    "tv-budget-wide": ("tv-budget", {"epsilon": 0.4}),
    "fly-short-window": ("fly", {"fly_window": 1, "fly_entropy_threshold": 0.0}),
    "synthetic-rates": ("synthetic", {"synthetic_acceptance_rates": (0.9, 0.4)}),
}


@pytest.mark.parametrize("name", acceptlib.available())
def test_built_in_strategy_passes(name: str) -> None:
    skipped = {result.name for result in check_strategy(acceptlib.create(name)) if result.status != "passed"}
    assert skipped == SKIPPED[name] | ELSEWHERE


@pytest.mark.parametrize("setting", OTHER_OPTIONS)
def test_built_in_strategy_passes_under_other_options(setting: str) -> None:
    name, options = OTHER_OPTIONS[setting]
    check_strategy(acceptlib.create(name, **options))


# Mutants


def documented() -> dict[str, tuple[str, str, set[str]]]:
    """Return check, bug and other failing checks by mutant, from the page."""
    rows = re.findall(r"^\| `(\w+)` \| ([\w-]+) \| (.*?) \| (.*?) ?\|$", PAGE, re.MULTILINE)
    return {name: (check, bug, set(re.findall(r"`(\w+)`", others))) for check, name, bug, others in rows}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_fails_its_check_and_those_that_the_page_says(name: str) -> None:
    check, bug, others = documented()[name]
    assert (check, bug) == (MUTANTS[name].check, MUTANTS[name].bug)
    wanted = others if check in ELSEWHERE else {check} | others
    assert set(mutants.failures(name)) == wanted


def test_every_check_has_a_mutant_and_every_mutant_is_on_the_page() -> None:
    checks = {name_of(function) for guarantee in PROOFS for function in chosen(guarantee, state=True)}
    assert {mutant.check for mutant in MUTANTS.values()} == checks
    assert documented().keys() == MUTANTS.keys()


def test_every_check_states_its_property_and_the_bug_that_it_catches() -> None:
    for guarantee in PROOFS:
        for function in chosen(guarantee, state=True):
            first, _, rest = (function.__doc__ or "").partition("\n")
            assert first.endswith("."), function
            assert "Catches " in rest, function


@pytest.mark.parametrize("index", [0, 1])
def test_code_on_the_page_runs(index: int) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    exec(compile(blocks[index], f"block {index}", "exec"), {"__name__": "page"})  # noqa: S102


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["copies-inputs", "asks-for-the-status"])
def test_mutant_cannot_be_captured(name: str) -> None:
    assert "graph_capture" in mutants.failures(name, device="cuda")


# Interpreted Triton, in a process of its own: it must be known before the kernels are


@pytest.mark.long
def test_interpreted_triton() -> None:
    """What a kernel can get wrong by itself, equality with torch on all that it runs, and the mutant of that check.

    Without a warning of what a GPU would do without a word.
    """
    pytest.importorskip("triton", minversion="3.6")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    script = Path(__file__).parent / "conformance_interpreted.py"
    output = subprocess.run(  # noqa: S603 - ourselves
        [sys.executable, "-W", "error::RuntimeWarning", script],
        check=True,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    found: dict[str, dict[str, str]] = json.loads(output)
    assert found.pop("other-numbers-on-torch")["backends_agree"].startswith("failed: ")
    assert {*found["rejection"].values()} == {"passed"}
    assert found.keys() == {*acceptlib.available()}
    for name, results in found.items():
        result = results["backends_agree"]
        assert result == "passed" or "which the fused kernels do not" in result, name


# Further arguments and states


class Own(AcceptanceStrategy):
    """Rejection sampling that overrides `verify` whole, and needs a tensor from its caller."""

    name = "own"
    traits = Rejection.traits

    def verify(self, *arguments: Any, state: torch.Tensor, **named: Any) -> VerifyResult:  # type: ignore[override]
        found = Rejection().verify(*arguments, **named)
        assert len(state) == len(found.num_accepted)
        return found


def state_of(num_requests: int, device: torch.device) -> dict[str, Any]:
    return {"state": torch.arange(num_requests, device=device)}


def test_a_strategy_without_rules_is_checked_by_what_it_emits() -> None:
    results = {result.name: result for result in check_strategy(Own(), verify_arguments=state_of)}
    left_out = {name for name, result in results.items() if result.status == "skipped"}
    needs_rules = {
        "lossless_law",
        "lossless_law_one_hot",
        "zero_draft_probability",
        "options_are_read",
        "acceptance_is_probability",
        "decisions_follow_rules",
        "uniforms_of_stream",
        "emitted_law",
    }
    assert left_out - ELSEWHERE == needs_rules
    assert "overrides verify whole" in results["lossless_law"].message
    assert results["lossless_over_two_steps"].status == "passed"


def test_what_a_strategy_raises_fails_the_check_alone() -> None:
    results = check_strategy(Own(), only=["padding"], raises=False)  # without its state
    assert [result.status for result in results] == ["failed"]
    assert results[0].message.startswith("TypeError: ")
    assert isinstance(results[0].error, TypeError)


def test_further_arguments_follow_their_requests() -> None:
    subject = Subject(Own(), verify_arguments=lambda count, _: {"by": {"a": torch.arange(count)}, "b": 7})
    further = subject.further([5, 3])
    assert further["by"]["a"].tolist() == [5, 3]
    assert further["b"] == 7


def test_requests_have_states_of_different_steps() -> None:
    """Every fourth one is new, the first among them; what the caller gives stays."""
    budgets = Subject(Budget()).further(range(32))["state"]["budget"].tolist()
    assert budgets[::4] == [2] * 8
    assert len(set(budgets)) > 4
    assert Subject(Budget()).further([6, 1])["state"]["budget"].tolist() == [budgets[6], budgets[1]]
    assert Subject(Budget()).further_of_new(9)["state"]["budget"].tolist() == [2] * 9
    given = Subject(Budget(), verify_arguments=lambda count, _: {"state": {"budget": torch.arange(count)}})
    assert given.further([7, 5])["state"]["budget"].tolist() == [7, 5]


def test_laws_are_held_in_states_that_steps_lead_to() -> None:
    """A new one, then different ones, as far as there are any."""
    budget = Subject(Budget())
    states = [budget.state([key])["budget"].item() for key in budget.moments]
    assert states[0] == 2
    assert len(set(states)) == len(states) == 4
    assert {budget.state([key])["budget"].item() for key in budget.distinct} > {*states}
    assert budget.having(0) == ", budget = 2"
    for thinking in (Subject(Relaxed()), Subject(Relaxed(begin_thinking_phase_token=2, end_thinking_phase_token=1))):
        found = [thinking.state([key])["thinking"].item() for key in thinking.moments]
        assert found == [True, False][: len(found)]
    assert len(found) == 2
    stateless = Subject(Rejection())
    assert (stateless.moments, stateless.distinct, stateless.having(0)) == ((0,), (0,), "")


class Begins(Budget):
    """A budget that begins with whatever a test says."""

    name = "begins"

    def __init__(self, begin: Any) -> None:
        super().__init__()
        self.begin = begin

    def initial_state(self, num_requests: int, device: torch.device | str) -> Any:
        return self.begin(num_requests, device)


BEGINNINGS = {
    "none": (lambda *_: None, "returned None"),
    "nothing": (lambda *_: {}, "returned {}"),
    "other": (lambda count, _: {"budgets": torch.ones(count)}, "returned {'budgets': float32 [3] on cpu}"),
    "shape": (lambda count, _: {"budget": torch.ones(count, 1)}, "returned {'budget': float32 [3, 1] on cpu}"),
    "dtype": (lambda count, _: {"budget": torch.ones(count).half()}, "returned {'budget': float16 [3] on cpu}"),
    "device": (
        lambda count, _: {"budget": torch.ones(count, device="meta")},
        "returned {'budget': float32 [3] on meta}",
    ),
    "number": (lambda *_: {"budget": 2}, "returned {'budget': 2}"),
    "raising": (lambda *_: {}["a"], "raised KeyError: 'a'"),
}


@pytest.mark.parametrize("kind", BEGINNINGS)
def test_a_wrong_initial_state_is_one_failure(kind: str) -> None:
    """Whatever was asked for; a check that is run by itself says the same."""
    begin, said = BEGINNINGS[kind]
    strategy = Begins(begin)
    for only in (None, ["padding"]):
        (result,) = check_strategy(strategy, only=only, raises=False)
        assert (result.name, result.status) == ("initial_state", "failed")
        assert result.message.startswith(f"initial_state(3, 'cpu') {said}")
        if kind != "raising":
            assert "but Traits.state is ('budget',): return a dict with a tensor [3] on cpu" in result.message
    assert due(Subject(strategy), []) == []
    padding = next(check for check in checks_for(strategy) if check.name == "padding")
    assert run_check(padding, Subject(strategy)).message == result.message


def test_a_state_that_is_not_declared_is_one_failure() -> None:
    class Undeclared(Rejection):
        name = "undeclared"
        initial_state = Budget.initial_state

    (result,) = check_strategy(Undeclared(), raises=False)
    assert result.message == (
        "initial_state(3, 'cpu') returned {'budget': int64 [3] on cpu}, but Traits.state is (): return {}"
    )


class Remembers(AcceptanceStrategy):
    """Rejection sampling that overrides `verify` whole, and carries more than a number of each request."""

    name = "remembers"
    traits = Traits(guarantee="lossless", state=("last",))

    def initial_state(self, num_requests: int, device: torch.device | str) -> dict[str, torch.Tensor]:
        return {"last": torch.zeros(num_requests, 2, device=device)}

    def update_state(self, state: Any, result: VerifyResult) -> None:
        state["last"][:, 0] = result.num_accepted
        state["last"][:, 1] += 1

    def verify(self, *arguments: Any, state: Any, **named: Any) -> VerifyResult:  # type: ignore[override]
        assert state["last"].shape[1:] == (2,)
        return Rejection().verify(*arguments, **named)


def test_a_verify_of_its_own_may_carry_other_shapes() -> None:
    passed = {result.name for result in check_strategy(Remembers()) if result.status == "passed"}
    assert passed >= {"initial_state", "update_state", "neighbours", "lossless_over_two_steps"}


@pytest.mark.parametrize(
    ("verify", "message"),
    [
        (lambda self, ids, **arguments: None, "missing a required argument: 'ids'"),  # noqa: ARG005
        (lambda self, draft_token_ids, *, target_probs: None, "unexpected keyword argument 'target_logits'"),  # noqa: ARG005
    ],
    ids=["another-name", "too-few"],
)
def test_a_verify_that_cannot_be_called_is_one_error(verify: Any, message: str) -> None:
    strategy = type("Other", (Rejection,), {"name": "other", "verify": verify})()
    with pytest.raises(StrategyDefinitionError, match=f"strategy 'other': expected a verify that takes .*{message}"):
        check_strategy(strategy)


class Matches(AcceptanceStrategy):
    """Draws a sample of the target, and goes on while it is the drafted token: lossless, and reads no q."""

    name = "matches"
    traits = Traits(guarantee="lossless")

    @rule
    def accept(target_prob: Any) -> Any:
        return target_prob

    @rule
    def residual(p: Any, is_drafted: Any) -> Any:
        return ops.where(is_drafted, 0.0, p)


class Reluctant(AcceptanceStrategy):
    """Rejection sampling that accepts seven tenths of what it could, and takes as much less from the residual."""

    name = "reluctant"
    traits = Traits(guarantee="lossless")

    class Options(acceptlib.Options):
        share: float = 0.7

    @rule
    def accept(target_prob: Any, draft_prob: Any, share: Any) -> Any:
        return share * ops.minimum(ops.ratio(target_prob, draft_prob), 1.0)

    @rule
    def residual(p: Any, q: Any, share: Any) -> Any:
        return p - share * ops.minimum(p, q)


@pytest.mark.parametrize("strategy", [Matches, Reluctant])
def test_other_lossless_rules_pass(strategy: type[AcceptanceStrategy]) -> None:
    """Whatever of a draft they accept, and though they need not accept a token that the draft could not have drawn."""
    results = check_strategy(strategy())
    assert {result.name for result in results if result.status == "skipped"} == ELSEWHERE


def test_a_verify_of_its_own_may_go_through_the_engine() -> None:
    """Which takes ways to the host on the CPU that it does not take on a GPU."""

    class Delegates(Greedy):
        name = "delegates"

        def verify(self, *arguments: Any, **named: Any) -> VerifyResult:
            return Greedy().verify(*arguments, **named)

    (result,) = check_strategy(Delegates(), only="no_host_synchronisation")
    assert result.status == "passed"


def test_a_state_that_the_caller_gives_needs_no_initial_one() -> None:
    class Given(Budget):
        name = "given"
        initial_state = AcceptanceStrategy.initial_state

    check_strategy(Given(), verify_arguments=lambda count, _: {"state": {"budget": torch.arange(count) % 5}})
    (result,) = check_strategy(Given(), raises=False)
    assert result.message.startswith("initial_state(3, 'cpu') raised StrategyDefinitionError: strategy 'given' reads")


def test_what_update_state_raises_is_said() -> None:
    class Stumbling(Budget):
        name = "stumbling"

        def update_state(self, state: Any, result: VerifyResult) -> None:  # noqa: ARG002
            state["budge"].add_(1)

    class Scalar(Budget):
        name = "scalar"

        def update_state(self, state: Any, result: VerifyResult) -> None:
            state["budget"] = result.num_accepted.sum()

    (result,) = check_strategy(Scalar(), only=["counts"], raises=False)
    assert result.message.startswith(
        "update_state left {'budget': int64 [] on cpu} in `state`, expected {'budget': int64 [256"
    )
    (result,) = check_strategy(Stumbling(), only=["counts"], raises=False)
    assert result.message == "update_state, after a step of 256 requests, raised KeyError: 'budge'"


def test_a_strategy_may_be_named() -> None:
    assert check_strategy("block", only="padding")[0].status == "passed"
    with pytest.raises(InputError, match="expected_failures: expected a mapping from names of checks to reasons, got"):
        check_strategy("block", expected_failures=["padding"])  # type: ignore[arg-type]


# The class

MODULE = """
import acceptlib
from acceptlib.testing import StrategyConformance


class TestLenience(StrategyConformance):
    strategy = acceptlib.create("lenience", lenience=0.5)


class TestSynthetic(StrategyConformance):
    strategy = acceptlib.create("synthetic")
    expected_failures = {"padding": "not really"}


class TestArguments(StrategyConformance):
    strategy = acceptlib.create("greedy")

    def verify_arguments(self, num_requests, device):
        return {"unheard_of": 1}
"""

BARE = """
from acceptlib.testing import StrategyConformance


class TestNothing(StrategyConformance):
    pass
"""


def test_inherited_tests(tmp_path: Path) -> None:
    """One readable id a check, skips with their reasons, strict expectations, further arguments that arrive."""
    (tmp_path / "test_module.py").write_text(MODULE, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-v", "-rs", "-p", "no:cacheprovider", "-W", "error", "test_module.py"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    output = subprocess.run(  # noqa: S603 - pytest
        command, check=False, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
    ).stdout
    outcomes = dict(re.findall(r"^test_module\.py::(\S+) (\w+)", output, re.MULTILINE))
    names = [check.name for check in checks_for(acceptlib.create("lenience"))]
    ids = [f"TestLenience::test_conformance[{name}]" for name in names]
    assert [name for name in outcomes if name.startswith("TestLenience")] == ids
    assert {outcomes[f"TestLenience::test_conformance[{name}]"] for name in {*names} - ELSEWHERE} == {"PASSED"}
    assert {outcomes[f"TestLenience::test_conformance[{name}]"] for name in ELSEWHERE} == {"SKIPPED"}
    assert outcomes["TestSynthetic::test_conformance[padding]"] == "FAILED"
    assert outcomes["TestSynthetic::test_conformance[counts]"] == "PASSED"
    # `verify` does not know them, so they arrive.
    assert outcomes["TestArguments::test_conformance[padding]"] == "FAILED"
    assert "CUDA graphs need a GPU" in output or torch.cuda.is_available()


def test_a_class_without_a_strategy_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "test_bare.py").write_text(BARE, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_bare.py"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    output = subprocess.run(  # noqa: S603 - pytest
        command, check=False, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
    ).stdout
    assert "strategy: expected a class attribute, what acceptlib.create returns, got None" in output


def test_a_class_runs_where_it_says() -> None:
    class OnTriton(StrategyConformance):
        strategy = Rejection()
        backend = "triton"

    class OnNothing(StrategyConformance):
        strategy = Rejection()
        device = "cuda:99"

    check = checks_for(Rejection())[0]
    with pytest.raises(BackendError, match="triton"):
        OnTriton().test_conformance(check)
    with pytest.raises(InputError, match="cuda:99"):
        OnNothing().test_conformance(check)


def test_a_class_expects_failures_of_checks_that_there_are() -> None:
    class Expects(StrategyConformance):
        strategy = MUTANTS["recovers-from-target"].make()
        expected_failures: ClassVar = {"lossless_law": "it never had one"}

    check = next(check for check in checks_for(Expects.strategy) if check.name == "lossless_law")
    with pytest.raises(pytest.xfail.Exception, match="it never had one"):
        Expects().test_conformance(check)
    Expects.expected_failures = {"pading": "not really"}
    with pytest.raises(InputError, match="Unknown check 'pading'"):
        Expects().pytest_generate_tests(SimpleNamespace(fixturenames=["check"]))


def test_the_suite_needs_neither_pytest_nor_hypothesis() -> None:
    code = """
import sys
sys.modules["pytest"] = sys.modules["hypothesis"] = None
import acceptlib
from acceptlib.testing import StrategyConformance, check_strategy
class TestRejection(StrategyConformance):
    strategy = acceptlib.create("rejection")
assert check_strategy(TestRejection.strategy, only=["lossless_law"])[0].status == "passed"
assert "triton" not in sys.modules
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)  # noqa: S603 - ourselves
