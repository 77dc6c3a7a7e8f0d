"""`check_strategy` and `acceptlib check`: which checks they run, what they say of a failure, and what they refuse."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import run
from conformance_mutants import MUTANTS
from rule_mutants import RecoversFromTarget

import acceptlib
from acceptlib import AcceptanceStrategy, Traits, VerifyResult, exact, ops, registry, rule, testing
from acceptlib.errors import BackendError, ConformanceError, InputError
from acceptlib.ops import Value
from acceptlib.strategies.rejection import Rejection
from acceptlib.testing import Check, CheckResult, Skipped, Subject, check_strategy, checks_for
from acceptlib.testing.batches import same

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
        "Model",
        "State",
        "StepFigures",
        "complete",
        "expected_tokens",
        "kl",
        "law",
        "processed",
        "step_figures",
        "tv",
    ]


@pytest.mark.parametrize("name", ["falls-with-mass", "falls-with-mass-later", "ignores-option", "u-stuck-at-zero"])
def test_messages_name_one_request_or_value(name: str) -> None:
    for result in check_strategy(MUTANTS[name].make(), raises=False):
        assert len(result.message) < 400, result.name


def _messages(strategy: AcceptanceStrategy, check: str) -> str:
    (result,) = check_strategy(strategy, only=[check], raises=False)
    return f"{result.status}: {result.message}"


def test_a_bound_that_is_no_number() -> None:
    body = {"name": "odd", "traits": Traits(guarantee="lossy", bound="out <= p")}
    vector = type("Odd", (Rejection,), {**body, "bound_excess": lambda _, p, __, out: out - p})()
    wanted = "failed: expected bound_excess to return a number, got <Tensor [4] torch.float64 on cpu>"
    assert _messages(vector, "declared_bound") == wanted
    forgets = type("Odd", (Rejection,), {**body, "bound_excess": lambda *_: None})()
    assert _messages(forgets, "promise").endswith("and bound_excess returned None")
    assert _messages(type("Odd", (Rejection,), body)(), "promise").endswith("override bound_excess")


class Misdeclared(Rejection):
    """Terms and methods that raise: a message says which."""

    name = "misdeclared"
    traits = Traits(
        guarantee="lossy", bound="none at all", neutral={"flor": 1.0}, neutral_equals="rejection", state=("last",)
    )

    def initial_state(self, num_requests: int, device: torch.device | str) -> dict[str, torch.Tensor]:
        return {"last": torch.zeros(num_requests, dtype=torch.int64, device=device)}

    def update_state(self, state: Any, result: VerifyResult) -> None:
        state["last"].copy_(result.output_token_ids[:, 1])  # of which a step without drafts has none

    def bound_excess(self, p: torch.Tensor, q: torch.Tensor, out: torch.Tensor) -> float:  # noqa: ARG002
        return 1 / 0

    @rule
    def accept(target_prob: Any, last: Any) -> Any:
        return target_prob + 0 * last


def test_messages_say_what_raised() -> None:
    said = {result.name: result.message for result in check_strategy(Misdeclared(), raises=False) if result.message}
    assert said["state_of_each_request"].startswith("update_state raised IndexError: index 1 is out of bounds")
    assert said["promise"] == said["declared_bound"] == "bound_excess raised ZeroDivisionError: division by zero"
    assert said["neutral_setting"] == "Traits.neutral: Strategy 'misdeclared' has no option 'flor'. It has none."


def test_the_method_that_raised_is_said() -> None:
    """Rather than the one that called it; a rule is named by its error."""

    class Asks(Rejection):
        name = "asks"

        def verify(self, *_: Any, **__: Any) -> Any:  # type: ignore[override]
            return self.ask()

        def ask(self) -> Any:
            msg = "no answer"
            raise ValueError(msg)

    class OfFewRequests(Rejection):
        name = "of-few-requests"

        @rule
        def accept(target_prob: Any) -> Any:
            if len(target_prob) > 2:
                msg = "too many requests"
                raise ValueError(msg)
            return target_prob

    (result,) = check_strategy(Asks(), only="counts", raises=False)
    assert result.message == "ask raised ValueError: no answer"
    (result,) = check_strategy(OfFewRequests(), only="counts", raises=False)
    assert ".accept': too many requests" in result.message


def test_a_neutral_setting_that_equals_nothing() -> None:
    traits = Traits(guarantee="lossy", bound="none", neutral={"lenience": 1.0}, neutral_equals="rejecton")
    strategy = type("Odd", (type(acceptlib.create("lenience")),), {"name": "odd", "traits": traits})()
    wanted = "failed: Traits.neutral_equals: Unknown strategy 'rejecton'. Did you mean 'rejection'?"
    assert _messages(strategy, "neutral_setting").startswith(wanted)


class Unbounded(Rejection):
    """An acceptance without its minimum with 1."""

    name = "unbounded"

    @rule
    def accept(target_prob: Any, draft_prob: Any) -> Any:
        return ops.ratio(target_prob, draft_prob)


def test_an_acceptance_above_one_is_said_once() -> None:
    """And not as what a token of no draft probability should have had instead."""
    results = check_strategy(Unbounded(), raises=False)
    failed = {result.name: result.message for result in results if result.status == "failed"}
    assert "expected accept in [0, 1], got 1" in failed["acceptance_is_probability"]
    assert "zero_draft_probability" not in failed


def test_a_verify_that_returns_no_result() -> None:
    def verify(_: Any, draft_token_ids: torch.Tensor, **arguments: Any) -> torch.Tensor:
        return Rejection().verify(draft_token_ids, **arguments).output_token_ids

    strategy = type("Bare", (Rejection,), {"name": "bare", "verify": verify})()
    assert "verify returned <Tensor [8, 5] torch.int32 on cpu>, expected a VerifyResult" in _messages(
        strategy, "counts"
    )


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
    pytest.importorskip("triton", minversion="3.6")
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
    assert {result.message for result in results} == {"verify raised SystemExit: no rows today"}


def test_a_call_that_the_backend_cannot_run_is_no_failure() -> None:
    """A plain one was run already, so the check says nothing here."""

    class Padded(Rejection):
        name = "padded"

        def verify(self, *arguments: Any, cu_num_draft_tokens: Any = None, **named: Any) -> VerifyResult:
            if cu_num_draft_tokens is not None:
                msg = "no kernel takes ragged rows"
                raise BackendError(msg)
            return Rejection().verify(*arguments, **named)

    (result,) = check_strategy(Padded(), only="ragged_equals_padded")
    assert (result.status, result.message) == ("skipped", "no kernel takes ragged rows")


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
        (
            NanAcceptance(),
            "acceptance_is_probability",
            "rows 'random', position 0 of drafted tokens [0, 0]: expected accept in [0, 1], got nan",
        ),
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


@pytest.mark.parametrize("strategy", [Rejection, None])
def test_what_is_no_strategy(strategy: Any) -> None:
    with pytest.raises(InputError, match=r"strategy: expected a name or what acceptlib\.create returns, got"):
        check_strategy(strategy)


def test_command_checks_a_strategy_once() -> None:
    result = run("check", "rejection", "speculative", "rejection", "--only", "padding", "--format", "json")
    assert [record["strategy"] for record in json.loads(result.stdout)] == ["rejection"]


def test_command_checks_the_strategy_of_a_config(tmp_path: Path) -> None:
    """With its options and its backend, and with `-o` on top."""
    file = tmp_path / "acceptance.toml"
    file.write_text('[acceptance]\nstrategy = "mixture"\nbackend = "torch"\noptions = {weight = 2.0}\n')
    refused = run("check", "--config", str(file), "--only", "padding", code=2).stderr
    assert "weight" in refused
    assert "acceptance.toml: Strategy 'mixture'" in refused
    arguments = ("check", "--config", str(file), "-o", "weight=0.5", "--only", "promise", "--format", "json")
    assert [(row["strategy"], row["status"]) for row in json.loads(run(*arguments).stdout)] == [("mixture", "passed")]
    assert "NAME and --config both name strategies" in run("check", "block", "--config", str(file), code=2).stderr


def test_no_check_is_no_pass() -> None:
    with pytest.raises(InputError, match=r"expected at least one check, got none\. Available: lossless_law, "):
        check_strategy(Rejection(), only=[])


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
    with pytest.raises(InputError, match=r"^Check 'lossless_over_two_steps' is for lossless strategies alone\. "):
        check_strategy("greedy", only=["lossless_over_two_steps"])


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


def test_a_property_has_no_full_stop_in_a_table() -> None:
    """Nor have the messages that take its place."""
    descriptions = [check.description for check in checks_for(Rejection())]
    assert all(description and not description.endswith(".") for description in descriptions)


def test_traits_of_the_instance_choose_the_checks() -> None:
    class Sometimes(Rejection):
        name = "sometimes"

        def resolve_traits(self) -> Traits:
            return Traits(guarantee="lossy", bound="none")

    assert checks_for(Sometimes())[0].name == "promise"


# The command


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


def test_command_counts_checks_before_an_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said of a strategy that could not be created was none of them."""

    class Needy(Rejection):
        """Need an option."""

        name = "needy"

        class Options(acceptlib.Options):
            share: float

    entries = {"needy": registry.Entry("needy", Needy, "test 1.0"), "rejection": registry.find("rejection")}
    monkeypatch.setattr(registry, "available", lambda: [*entries])
    monkeypatch.setattr(registry, "find", entries.__getitem__)
    real, seen = testing.run_check, []

    def second_is_interrupted(check: Check, subject: Subject) -> CheckResult:
        seen.append(check)
        if len(seen) > 1:
            raise KeyboardInterrupt
        return real(check, subject)

    monkeypatch.setattr(testing, "run_check", second_is_interrupted)
    result = run("check", "--only", "padding,counts", "--format", "json", code=130)
    assert [(row["strategy"], row["status"]) for row in json.loads(result.stdout)] == [
        ("needy", "failed"),
        ("rejection", "passed"),
    ]
    assert "interrupted after 1 of 2 checks" in result.stderr


def check_that_ends_its_process(_subject: Subject) -> None:
    """Every process ends by itself."""
    os._exit(3)


def check_that_interrupts(_subject: Subject) -> None:
    """Whoever waits is interrupted, and this process is not."""
    os.kill(os.getppid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(100)


def test_command_runs_checks_side_by_side() -> None:
    arguments = ("check", "fly", "greedy", "--only", "padding,counts,greedy_sequence", "--format", "json")
    rows = {jobs: json.loads(run(*arguments, "--jobs", jobs).stdout) for jobs in ("1", "2")}
    assert len(rows["1"]) == 6
    same = [[{**row, "seconds": 0} for row in found] for found in rows.values()]
    assert same[0] == same[1]


def test_command_says_which_checks_a_process_left_without_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(testing, "checks_for", lambda _strategy: [Check.of(check_that_ends_its_process)])
    (row,) = json.loads(run("check", "rejection", "--jobs", "2", "--format", "json", code=1).stdout)
    assert (row["check"], row["status"]) == ("that_ends_its_process", "failed")
    assert row["message"].startswith("no result: BrokenProcessPool: ")


def test_command_ends_processes_when_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(testing, "checks_for", lambda _strategy: [Check.of(check_that_interrupts)])
    start = time.perf_counter()
    assert "interrupted after 0 of 1 checks" in run("check", "rejection", "--jobs", "2", code=130).stderr
    assert time.perf_counter() - start < 100
    assert not multiprocessing.active_children()


def test_no_interruption_is_lost_while_processes_start(monkeypatch: pytest.MonkeyPatch) -> None:
    submit = ProcessPoolExecutor.submit

    def interrupted(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return submit(*arguments)

    monkeypatch.setattr(ProcessPoolExecutor, "submit", interrupted)
    arguments = ("check", "rejection", "--only", "padding,counts", "--jobs", "2")
    assert "interrupted after 0 of 2 checks" in run(*arguments, code=130).stderr
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rejecton"], "Did you mean 'rejection'"),
        (["rejection", "--backend", "triton"], "backend='triton' cannot run on cpu"),
        (["rejection", "--only", "paddin"], "Did you mean 'padding'"),
        (["rejection", "-o", "speed=1"], "has no option 'speed'"),
        (["-o", "speed=1"], "has no option 'speed'"),
        (["rejection", "--device", "abacus"], "--device: expected cpu, cuda or cuda:N, got 'abacus'"),
        (["rejection", "--device", "meta"], "--device: expected cpu, cuda or cuda:N, got 'meta'"),
        (["rejection", "--device", "cuda:99"], "cuda:99 does not exist"),
    ],
    ids=["name", "cannot-run", "check", "option", "option-of-all", "device", "no-values", "no-such-gpu"],
)
def test_command_refuses_what_it_cannot_do(arguments: list[str], message: str) -> None:
    result = run("check", *arguments, code=2)
    assert message in result.stderr
    assert result.stderr.startswith("Error: ")


def test_command_refuses_an_engine_that_does_not_exist() -> None:
    assert "'cuda' is not one of" in run("check", "rejection", "--backend", "cuda", code=2).stderr
