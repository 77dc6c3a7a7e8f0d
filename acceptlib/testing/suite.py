"""Running the checks: for a function, for a class to inherit, and for `acceptlib check`."""

from __future__ import annotations

import contextlib
import inspect
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Final, Literal, TypeAlias

import torch

from acceptlib.engine.backends import Choice
from acceptlib.errors import (
    BackendError,
    ConformanceError,
    InputError,
    StrategyDefinitionError,
    one_line,
    short_repr,
    suggest,
)
from acceptlib.registry import as_strategy
from acceptlib.strategy import AcceptanceStrategy, expect_strategy
from acceptlib.tensors import as_device, made_on_cpu
from acceptlib.testing import checks
from acceptlib.testing.batches import mixed
from acceptlib.testing.subject import Skipped, Subject, VerifyArguments, no_arguments

Status: TypeAlias = Literal["passed", "failed", "skipped", "expected_failure"]

NOTHING_EXPECTED: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Check:
    """One named property.

    Attributes:
        name: The function's name without `check_`: what `only` and `expected_failures` take.
        function: `check_*`; takes a `Subject`, raises `ConformanceError` where the property does not hold and
            `Skipped` where it says nothing.
        description: The property, the first line of the function's docstring.
    """

    name: str
    function: Callable[[Subject], None]
    description: str

    @classmethod
    def of(cls, function: Callable[[Subject], None]) -> Check:
        """Return a `check_*` function as a check."""
        description = (function.__doc__ or "").partition("\n")[0].rstrip(".")
        return cls(checks.name_of(function), function, description)


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What one check found.

    Attributes:
        name: Of the check.
        status: `passed`; `failed`; `skipped`: the check says nothing about this strategy here; `expected_failure`: it
            failed, and the caller had said so.
        message: Why it failed or was skipped, or the caller's reason; empty where it passed.
        description: The property.
        seconds: How long it took.
        error: What was raised, for a traceback; None where it passed.
    """

    name: str
    status: Status
    message: str
    description: str
    seconds: float
    error: BaseException | None = field(default=None, repr=False, compare=False)


INITIAL_STATE: Final = Check.of(checks.STATE[0])


def checks_for(strategy: AcceptanceStrategy) -> list[Check]:
    """Return the checks that a strategy's declared traits ask for, in the order in which they run.

    Raises:
        StrategyDefinitionError: Its own `verify` cannot be called as every other is, so that no check could run.
    """
    traits = expect_strategy(strategy).resolve_traits()
    names = [name for name in inspect.signature(AcceptanceStrategy.verify).parameters if name != "self"]
    try:
        inspect.signature(strategy.verify).bind(**dict.fromkeys(names))
    except TypeError as error:
        msg = (
            f"strategy {strategy.name!r}: expected a verify that takes {', '.join(names)} by name, as that of "
            f"AcceptanceStrategy does, or some of them as **arguments: {error}"
        )
        raise StrategyDefinitionError(msg) from None
    return [Check.of(function) for function in checks.chosen(traits.guarantee, state=bool(traits.state))]


def run_check(check: Check, subject: Subject, expected_failures: Mapping[str, str] = NOTHING_EXPECTED) -> CheckResult:
    """Run one check.

    Args:
        check: From `checks_for`.
        subject: The strategy and where it runs.
        expected_failures: Reason by name of a check. One that passes nevertheless has failed.
    """
    start = time.perf_counter()
    with _usual_defaults():
        status, message, error = _run(check, subject)
    if check.name in expected_failures:
        if status == "failed":
            status, message = "expected_failure", expected_failures[check.name]
        elif status == "passed":
            status, message = "failed", f"expected to fail ({expected_failures[check.name]}), but it passed"
            error = ConformanceError(message)
    return CheckResult(check.name, status, message, check.description, time.perf_counter() - start, error)


@contextlib.contextmanager
def _usual_defaults() -> Iterator[None]:
    """Return a context with torch's own default dtype and device: a suite's rows are the same in every process."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with made_on_cpu():
            yield
    finally:
        torch.set_default_dtype(dtype)


def _run(check: Check, subject: Subject) -> tuple[Status, str, BaseException | None]:
    """Return the status of a check, why it failed or was skipped, and what was raised."""
    try:
        INITIAL_STATE.function(subject)  # without it nothing can be called
        check.function(subject)
    except Skipped as skipped:
        return "skipped", str(skipped), skipped
    except BackendError as unable:
        # Only an explicit choice raises this, and `make_subject` has seen it run a plain call.
        return "skipped", str(unable), unable
    except ConformanceError as failure:
        return "failed", str(failure), failure
    except (Exception, SystemExit) as failure:  # noqa: BLE001 - whatever a strategy raises fails its check, not others
        return "failed", f"{_raised_in(subject.strategy, failure)}{one_line(failure)}", failure
    return "passed", "", None


def _raised_in(strategy: AcceptanceStrategy, failure: BaseException) -> str:
    """Return which of a strategy's methods or rules raised, as the start of a message."""
    raised_in = ""
    for frame, _ in traceback.walk_tb(failure.__traceback__):
        code = frame.f_code
        attribute = getattr(strategy, code.co_name, None)
        if getattr(getattr(attribute, "function", attribute), "__code__", None) is code:
            raised_in = f"{code.co_name} raised "
    return raised_in


def make_subject(
    strategy: AcceptanceStrategy,
    *,
    device: str | torch.device,
    backend: Choice | None,
    verify_arguments: VerifyArguments = no_arguments,
) -> Subject:
    """Return a subject for `run_check`; arguments are those of `check_strategy`.

    Raises:
        InputError: There is no such device.
        BackendError: The backend asked for cannot run a plain call.
    """
    subject = Subject(strategy, as_device(device), verify_arguments)
    if backend is not None:
        subject = subject.on_backend(backend)
    if subject.strategy.backend == "triton":
        try:
            with _usual_defaults():
                subject.verify(mixed(1))
        except BackendError:
            raise
        except (Exception, SystemExit):  # noqa: BLE001, S110 - what else it raises fails the checks
            pass
    return subject


def check_strategy(  # noqa: PLR0913 - one keyword a wish
    strategy: str | AcceptanceStrategy,
    *,
    device: str | torch.device = "cpu",
    backend: Choice | None = None,
    expected_failures: Mapping[str, str] = NOTHING_EXPECTED,
    only: Collection[str] | None = None,
    verify_arguments: VerifyArguments = no_arguments,
    raises: bool = True,
) -> list[CheckResult]:
    """Run the checks that a strategy's declared traits ask for.

    Args:
        strategy: The instance, with its options; or a name.
        device: Where its tensors live.
        backend: `auto`, `torch` or `triton`; None leaves the strategy's own.
        expected_failures: Reason by name of a check that is known to fail. One that passes nevertheless has failed.
        only: Names of the checks to run; all of them if None.
        verify_arguments: From B and a device to further arguments of every `verify` call, for a strategy that needs
            per-request tensors [B, ...].
        raises: Whether a failure is an error, once all checks have run.

    Returns:
        One result a check, in the order of `checks_for`; that of `initial_state` alone where it fails.

    Raises:
        ConformanceError: A check failed, and `raises` is true; the message lists every failure.
        InputError: `only` or `expected_failures` names a check that there is not for this strategy, the latter gives no
            reasons, or there is no such device.
        UnknownStrategyError: No strategy has the name.
        BackendError: The backend asked for cannot run a plain call.
        StrategyDefinitionError: See `checks_for`.
    """
    strategy = as_strategy(strategy)
    available = checks_for(strategy)
    chosen = select(available, only)
    check_expected(expected_failures, available)
    subject = make_subject(strategy, device=device, backend=backend, verify_arguments=verify_arguments)
    results = [run_check(check, subject, expected_failures) for check in due(subject, chosen)]
    failures = [f"{result.name}: {result.message}" for result in results if result.status == "failed"]
    if raises and failures:
        msg = f"{strategy!r} fails {len(failures)} of {len(results)} checks\n" + "\n".join(failures)
        raise ConformanceError(msg)
    return results


def due(subject: Subject, chosen: Sequence[Check]) -> list[Check]:
    """Return which of the chosen checks to run: only `initial_state` if it fails, since all would say the same."""
    return [INITIAL_STATE] if chosen and subject.state_problem else list(chosen)


def select(available: Sequence[Check], names: Iterable[str] | None) -> list[Check]:
    """Return the checks of these names, or all of them.

    Raises:
        InputError: There are no names, or one is none of theirs: there is no such check, or it is for other strategies.
    """
    if names is None:
        return list(available)
    known = [check.name for check in available]
    wanted = {names} if isinstance(names, str) else set(names)
    if not wanted:
        msg = f"expected at least one check, got none. Available: {', '.join(known)}."
        raise InputError(msg)
    for name in sorted(wanted.difference(known)):
        whose = checks.asked_of(name)
        problem = f"Check {name!r} is for {whose} alone." if whose else f"Unknown check {name!r}.{suggest(name, known)}"
        msg = f"{problem} Available here: {', '.join(known)}."
        raise InputError(msg)
    return [check for check in available if check.name in wanted]


def check_expected(expected_failures: Mapping[str, str], available: Sequence[Check]) -> None:
    """Raise `InputError` unless these are reasons by name of checks that there are."""
    if not isinstance(expected_failures, Mapping):
        what = "a mapping from names of checks to reasons"
        msg = f"expected_failures: expected {what}, got {short_repr(expected_failures)}"
        raise InputError(msg)
    if expected_failures:
        select(available, expected_failures)


class StrategyConformance:
    """Base of a test class that pytest runs: one test a check.

    ```python
    class TestCactus(StrategyConformance):
        strategy = Cactus(delta=0.5)
    ```

    Attributes:
        strategy: The instance under test.
        device: Where its tensors live.
        backend: `auto`, `torch` or `triton`; None leaves the strategy's own.
        expected_failures: Reason by name of a check that is known to fail. One that passes nevertheless has failed.
    """

    strategy: ClassVar[AcceptanceStrategy]
    device: ClassVar[str] = "cpu"
    backend: ClassVar[Choice | None] = None
    expected_failures: ClassVar[Mapping[str, str]] = NOTHING_EXPECTED

    def verify_arguments(self, num_requests: int, device: torch.device) -> Mapping[str, Any]:  # noqa: ARG002
        """Return further arguments of every `verify` call, such as per-request tensors [B, ...]; none by default."""
        return {}

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Make one test a check, as pytest asks a class to."""
        if "check" in metafunc.fixturenames:
            what = "a class attribute, what acceptlib.create returns"
            found = checks_for(expect_strategy(getattr(self, "strategy", None), what))
            check_expected(self.expected_failures, found)
            metafunc.parametrize("check", found, ids=[check.name for check in found])

    def test_conformance(self, check: Check) -> None:
        """Run one check."""
        import pytest  # noqa: PLC0415 - the other doors need none

        subject = make_subject(
            self.strategy, device=self.device, backend=self.backend, verify_arguments=self.verify_arguments
        )
        result = run_check(check, subject, self.expected_failures)
        if result.status == "skipped":
            pytest.skip(result.message)
        if result.status == "expected_failure":
            pytest.xfail(result.message)
        if result.error is not None:
            raise result.error
