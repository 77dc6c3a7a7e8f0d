"""The conformance suite: right strategies pass it, every mutant fails its check, and its three doors open."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import conformance_mutants as mutants
import pytest
import torch
from acceptlib_relaxed import Relaxed
from rule_mutants import MUTANTS, RecoversFromTarget
from typer.testing import CliRunner

import acceptlib
from acceptlib import AcceptanceStrategy, Traits, VerifyResult, exact, rule, testing
from acceptlib.cli.app import app
from acceptlib.errors import ConformanceError, InputError
from acceptlib.ops import Value
from acceptlib.strategies.rejection import Rejection
from acceptlib.testing import Skipped, Subject, check_strategy, checks_for
from acceptlib.testing.batches import same
from acceptlib.testing.checks import PROOFS, chosen, name_of
from acceptlib.testing.suite import run_check

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
    "typical": {"declared_bound", "neutral_setting"},
}
"""What says nothing about a built-in strategy, each by its declared traits or by what it reads."""

OTHER_OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "typical-sample": ("typical", {"recovery": "sample"}),
    "lenience-strong": ("lenience", {"lenience": 0.3}),
    "mixture-all-draft": ("mixture", {"weight": 0.0}),
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


def test_interpreted_triton() -> None:
    """What a kernel can get wrong by itself, equality with torch on all that it runs, and the mutant of that check."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    script = Path(__file__).parent / "conformance_interpreted.py"
    output = subprocess.run(  # noqa: S603 - ourselves
        [sys.executable, script], check=True, env=environment, stdout=subprocess.PIPE, text=True
    ).stdout
    found: dict[str, dict[str, str]] = json.loads(output)
    assert found.pop("other-numbers-on-torch")["backends_agree"].startswith("failed: ")
    assert {*found["rejection"].values()} == {"passed"}
    assert found.keys() == {*acceptlib.available()}
    for name, results in found.items():
        result = results["backends_agree"]
        assert result == "passed" or "which the fused kernels do not" in result, name


# The function


def test_public_names_are_pinned() -> None:
    assert testing.__all__ == [
        "Check",
        "CheckResult",
        "ConformanceError",
        "Skipped",
        "StrategyConformance",
        "Subject",
        "check_draft_contract",
        "check_strategy",
        "checks_for",
        "run_check",
    ]
    assert exact.__all__ == [
        "Acceptance",
        "Model",
        "StepFigures",
        "Steps",
        "acceptance",
        "complete",
        "expected_tokens",
        "kl",
        "law",
        "processed",
        "step_figures",
        "tv",
        "verify_exactly",
    ]


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
        "acceptance_is_probability",
        "decisions_follow_rules",
        "uniforms_of_stream",
        "emitted_law",
    }
    assert left_out - ELSEWHERE == needs_rules
    assert "overrides verify whole" in results["lossless_law"].message
    assert results["lossless_over_two_steps"].status == "passed"


def test_further_arguments_follow_their_requests() -> None:
    subject = Subject(Own(), verify_arguments=lambda count, _: {"by": {"a": torch.arange(count)}, "b": 7})
    further = subject.further([5, 3])
    assert further["by"]["a"].tolist() == [5, 3]
    assert further["b"] == 7


def test_requests_have_states_of_different_steps() -> None:
    """Every fourth one is new, the first among them; what the caller gives stays."""
    budgets = Subject(mutants.Budget()).further(range(32))["state"]["budget"].tolist()
    assert budgets[::4] == [2] * 8
    assert len(set(budgets)) > 4
    assert Subject(mutants.Budget()).further([6, 1])["state"]["budget"].tolist() == [budgets[6], budgets[1]]
    assert Subject(mutants.Budget()).every_time(9)["state"]["budget"].tolist() == [2] * 9
    given = Subject(mutants.Budget(), verify_arguments=lambda count, _: {"state": {"budget": torch.arange(count)}})
    assert given.further([7, 5])["state"]["budget"].tolist() == [7, 5]


def test_laws_are_held_in_states_that_steps_lead_to() -> None:
    """A new one, then different ones, as far as there are any."""
    budget = Subject(mutants.Budget())
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


class Begins(mutants.Budget):
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
    padding = next(check for check in checks_for(strategy) if check.name == "padding")
    assert run_check(padding, Subject(strategy)).message == result.message


def test_a_state_that_is_not_declared_is_one_failure() -> None:
    class Undeclared(Rejection):
        name = "undeclared"
        initial_state = mutants.Budget.initial_state

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


def test_a_state_that_the_caller_gives_needs_no_initial_one() -> None:
    class Given(mutants.Budget):
        name = "given"
        initial_state = AcceptanceStrategy.initial_state

    check_strategy(Given(), verify_arguments=lambda count, _: {"state": {"budget": torch.arange(count) % 5}})
    (result,) = check_strategy(Given(), raises=False)
    assert result.message.startswith("initial_state(3, 'cpu') raised StrategyDefinitionError: strategy 'given' reads")


def test_what_update_state_raises_is_said() -> None:
    class Stumbling(mutants.Budget):
        name = "stumbling"

        def update_state(self, state: Any, result: VerifyResult) -> None:  # noqa: ARG002
            state["budge"].add_(1)

    class Scalar(mutants.Budget):
        name = "scalar"

        def update_state(self, state: Any, result: VerifyResult) -> None:
            state["budget"] = result.num_accepted.sum()

    (result,) = check_strategy(Scalar(), only=["counts"], raises=False)
    assert result.message.startswith(
        "update_state left {'budget': int64 [] on cpu} in `state`, expected {'budget': int64 [256"
    )
    (result,) = check_strategy(Stumbling(), only=["counts"], raises=False)
    assert result.message == "update_state, after a step of 256 requests, raised KeyError: 'budge'"


@pytest.mark.parametrize("name", ["falls-with-mass", "falls-with-mass-later", "ignores-option", "u-stuck-at-zero"])
def test_messages_name_one_request_or_value(name: str) -> None:
    for result in check_strategy(MUTANTS[name].make(), raises=False):
        assert len(result.message) < 400, result.name


def test_results_that_differ_name_the_first_request() -> None:
    one = Rejection().verify(torch.tensor([[1], [1]]), target_probs=torch.eye(3)[[1, 2]].repeat(2, 1, 1), rng=0)
    other = VerifyResult(one.output_token_ids.clone(), one.num_accepted, one.num_emitted, one.status)
    other.output_token_ids[1, 1] = 0
    message = r"two results: output_token_ids of request 1 differs: \[1, 2\] and \[1, 0\]"
    with pytest.raises(ConformanceError, match=message):
        same(one, other)
    same(one, other, [0], [0])
    with pytest.raises(ConformanceError, match=message):
        same(one, other, [1], [1])


def test_failures_are_an_error_that_lists_them() -> None:
    padding = MUTANTS["pads-with-zero"].make()
    with pytest.raises(ConformanceError, match=r"fails 1 of 1 checks\npadding: padded, with draft rows, request 0"):
        check_strategy(padding, only=["padding"])
    (result,) = check_strategy(padding, only=["padding"], raises=False)
    assert (result.status, result.name) == ("failed", "padding")
    assert isinstance(result.error, ConformanceError)


def test_what_a_strategy_raises_fails_the_check_alone() -> None:
    results = check_strategy(Own(), only=["padding"], raises=False)  # without its state
    assert [result.status for result in results] == ["failed"]
    assert results[0].message.startswith("TypeError: ")
    assert isinstance(results[0].error, TypeError)


def test_what_backends_agree_needs_is_said_without_advice_on_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody chose a backend."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    (result,) = check_strategy(Rejection(), only=["backends_agree"])
    assert result.status == "skipped"
    assert result.message == "Triton needs a GPU, or TRITON_INTERPRET=1, and the device is cpu"


class OfTorch(Rejection):
    """A strategy whose rule only torch's tensors can carry out."""

    @rule
    def residual(p: Value, q: Value) -> Value:
        """Return the weight of each entry."""
        return torch.relu(p - q)


def test_a_rule_that_no_kernel_can_hold_fails_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    (result,) = check_strategy(OfTorch(), only=["backends_agree"], raises=False)
    assert "rule 'OfTorch.residual': expected calls of acceptlib.ops" in result.message
    assert check_strategy(OfTorch(backend="torch"), only=["backends_agree"])[0].status == "skipped"


class Raising(AcceptanceStrategy):
    """A strategy with a mistake in its `verify`."""

    name = "raising"
    traits = Rejection.traits

    def verify(self, *_: Any, **__: Any) -> VerifyResult:  # type: ignore[override]
        msg = "no rows today"
        raise SystemExit(msg)


def test_what_a_strategy_raises_on_the_backend_asked_for_fails_its_checks() -> None:
    """And not the command that checks others too."""
    results = check_strategy(Raising(), backend="triton", only=["padding", "counts"], raises=False)
    assert {result.message for result in results} == {"SystemExit: no rows today"}


class NanResidual(Rejection):
    """A residual that is no number, so that nothing is drawn."""

    name = "nan-residual"

    @rule
    def residual(p: Any, q: Any) -> Any:
        return (p - q) / 0.0


class NanAcceptance(Rejection):
    """An acceptance that is no number."""

    name = "nan-acceptance"

    @rule
    def accept(target_prob: Any) -> Any:
        return target_prob * math.nan


@pytest.mark.parametrize(
    ("strategy", "check", "message"),
    [
        (NanAcceptance(), "acceptance_is_probability", "rows 'random': expected accept in [0, 1], got nan"),
        (NanResidual(), "drawn_token_is_possible", "request 0, u = 0.0, bits = 0: emitted [], p = ["),
    ],
    ids=["acceptance", "draw"],
)
def test_messages_where_a_rule_returns_nan(strategy: AcceptanceStrategy, check: str, message: str) -> None:
    (result,) = check_strategy(strategy, only=[check], raises=False)
    assert result.message.startswith(message), result.message


def test_expected_failures_are_reported_and_must_fail() -> None:
    padding = MUTANTS["pads-with-zero"].make()
    (result,) = check_strategy(padding, only=["padding"], expected_failures={"padding": "0 is our padding"})
    assert (result.status, result.message) == ("expected_failure", "0 is our padding")
    with pytest.raises(ConformanceError, match=r"expected to fail \(0 is our padding\), but it passed"):
        check_strategy(Rejection(), only=["padding"], expected_failures={"padding": "0 is our padding"})


@pytest.mark.parametrize("strategy", ["rejection", Rejection, None])
def test_what_is_no_strategy(strategy: Any) -> None:
    with pytest.raises(InputError, match=r"strategy: expected what acceptlib\.create returns, got"):
        check_strategy(strategy)


def test_command_checks_a_strategy_once() -> None:
    result = run("check", "rejection", "speculative", "rejection", "--only", "padding", "--format", "json")
    assert [record["strategy"] for record in json.loads(result.stdout)] == ["rejection"]


def test_one_name_is_one_check() -> None:
    (result,) = check_strategy(Rejection(), only="neighbours")
    assert result.name == "neighbours"


@pytest.mark.parametrize("argument", ["only", "expected_failures"])
def test_unknown_check_is_an_error_with_a_suggestion(argument: str) -> None:
    with pytest.raises(InputError, match=r"Unknown check 'pading'\. Did you mean 'padding'"):
        check_strategy(Rejection(), **{argument: {"pading": "no reason"}})


def test_a_check_for_others_exists() -> None:
    for name, whose in (
        ("greedy_sequence", "greedy strategies"),
        ("declared_bound", "lossy strategies"),
        ("update_state", "strategies with Traits.state"),
    ):
        with pytest.raises(InputError, match=rf"^Check '{name}' is for {whose} alone\. Available here: lossless_law, "):
            check_strategy(Rejection(), only=[name])


def test_expected_failures_may_name_what_is_not_run() -> None:
    (result,) = check_strategy(Rejection(), only=["padding"], expected_failures={"counts": "ours count otherwise"})
    assert result.status == "passed"


def test_checks_are_plain_functions() -> None:
    """They run by themselves, and raise."""
    for check in checks_for(acceptlib.create("lenience"))[:6]:
        check.function(Subject(acceptlib.create("lenience")))
    with pytest.raises(ConformanceError):
        checks_for(Rejection())[0].function(Subject(RecoversFromTarget()))
    fly = Subject(acceptlib.create("fly"))
    bound = next(check for check in checks_for(fly.strategy) if check.name == "declared_bound")
    with pytest.raises(Skipped, match="declares no bound"):
        bound.function(fly)


def test_traits_of_the_instance_choose_the_checks() -> None:
    class Sometimes(Rejection):
        name = "sometimes"

        def resolve_traits(self) -> Traits:
            return Traits(guarantee="lossy", bound="none")

    assert checks_for(Sometimes())[0].name == "promise"


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


# The command


def run(*arguments: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, result.output
    return result


def test_command_prints_a_table() -> None:
    lines = run("check", "lenience", "--only", "padding,graph_capture,declared_bound").stdout.splitlines()
    assert lines[0].split() == ["strategy", "check", "result", "seconds", "property,", "or", "what", "is", "wrong"]
    results = [line.split(maxsplit=4)[1:3] + line.split(maxsplit=4)[4:] for line in lines[2:5]]
    assert [result[:2] for result in results] == [
        ["declared_bound", "passed"],
        ["padding", "passed"],
        ["graph_capture", "skipped"],
    ]
    assert results[2][2] == "CUDA graphs need a GPU, and the device is cpu"
    assert lines[-1].startswith("2 passed, 0 failed, 1 skipped in ")


def test_command_takes_options_and_several_strategies() -> None:
    out = run("check", "lenience", "-o", "lenience=0.3", "--only", "padding", "--format", "json").stdout
    assert [(row["strategy"], row["check"], row["status"]) for row in json.loads(out)] == [
        ("lenience", "padding", "passed")
    ]
    out = run("check", "--only", "counts", "--format", "csv").stdout
    assert [line.split(",")[0] for line in out.splitlines()[1:]] == acceptlib.available()


def test_command_runs_a_check_for_those_that_have_it() -> None:
    """What one has to prove is not unknown because another has not, and it is said that this one need not."""
    for names in (["greedy", "rejection"], ["rejection", "greedy"]):
        rows = json.loads(run("check", *names, "--only", "lossless_law,counts", "--format", "json").stdout)
        found = {(row["strategy"], row["check"]): (row["status"], row["message"]) for row in rows}
        assert found == {
            ("rejection", "lossless_law"): ("passed", ""),
            ("rejection", "counts"): ("passed", ""),
            ("greedy", "counts"): ("passed", ""),
            ("greedy", "lossless_law"): ("skipped", "it is for lossless strategies alone"),
        }
    said = run("check", "greedy", "--only", "lossless_law", code=2).stderr
    assert said.startswith(
        "Error: Check 'lossless_law' is for lossless strategies alone. Available here: greedy_sequence, "
    )


def test_command_exits_with_1_on_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rejection, "residual", None)
    result = run("check", "rejection", "--only", "lossless_law", code=1)
    assert "joint law" in result.stdout
    assert "0 passed, 1 failed" in result.stdout


def test_command_says_once_that_the_initial_state_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rejection, "traits", Traits(guarantee="lossless", state=("phase",)))
    arguments = ("check", "rejection", "greedy", "--only", "padding,counts", "--format", "json")
    rows = json.loads(run(*arguments, code=1).stdout)
    assert [(row["strategy"], row["check"], row["status"]) for row in rows] == [
        ("rejection", "initial_state", "failed"),
        ("greedy", "counts", "passed"),
        ("greedy", "padding", "passed"),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rejecton"], "Did you mean 'rejection'"),
        (["rejection", "--backend", "cuda"], "Unknown backend 'cuda'"),
        (["rejection", "--backend", "triton"], "backend='triton' cannot run on cpu"),
        (["rejection", "--only", "paddin"], "Did you mean 'padding'"),
        (["rejection", "-o", "speed=1"], "has no option 'speed'"),
        (["rejection", "--device", "abacus"], "--device: expected cpu, cuda or cuda:N, got 'abacus'"),
        (["rejection", "--device", "meta"], "--device: expected cpu, cuda or cuda:N, got 'meta'"),
        (["rejection", "--device", "cuda:99"], "cuda:99 does not exist"),
    ],
    ids=["name", "backend", "cannot-run", "check", "option", "device", "no-values", "no-such-gpu"],
)
def test_command_refuses_what_it_cannot_do(arguments: list[str], message: str) -> None:
    result = run("check", *arguments, code=2)
    assert message in result.stderr
    assert result.stderr.startswith("Error: ")


# The worked example


def test_example_shows_rows_acceptance_and_figures() -> None:
    record = json.loads(run("show", "block", "--example", "--format", "json").stdout)["example"]
    by_tokens = {drafted["tokens"]: drafted for drafted in record["drafted"]}
    # P_1 = 0.3 / 0.5, Z = (0.6 * 0.5 - 0.2) = 0.1 and h_1 = Z / (Z + 1 - P_1); h_2 = P_2.
    assert by_tokens["ba"]["acceptance"] == pytest.approx([0.2, 0.24])
    assert by_tokens["ba"]["stops"] == pytest.approx([0.608, 0.152, 0.24])
    assert sum(drafted["chance"] for drafted in record["drafted"]) == pytest.approx(1)
    assert record["first_token"] == pytest.approx([0.5, 0.3, 0.2])
    assert record["tv"] == pytest.approx(0, abs=1e-12)
    assert record["expected_tokens"] == pytest.approx(2.4)


@pytest.mark.parametrize("name", acceptlib.available())
def test_example_of_every_strategy(name: str) -> None:
    for form in ("plain", "github"):
        page = run("show", name, "--example", "--format", form).stdout
        assert "expected tokens a step" in page
        assert "drafted" in page


def test_example_takes_options() -> None:
    figures = [
        json.loads(run("show", "lenience", "--example", "-o", f"lenience={value}", "--format", "json").stdout)
        for value in (1.0, 0.5)
    ]
    assert figures[0]["example"]["tv"] == pytest.approx(0, abs=1e-12)
    assert figures[1]["example"]["tv"] > 0.01
