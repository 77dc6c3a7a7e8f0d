"""The conformance suite: one list of checks that a strategy must pass, for a function, a test class and a command."""

from acceptlib.errors import ConformanceError
from acceptlib.testing.q_contract import check_draft_contract
from acceptlib.testing.subject import Skipped, Subject
from acceptlib.testing.suite import (
    Check,
    CheckResult,
    StrategyConformance,
    check_strategy,
    checks_for,
    run_check,
)

__all__ = [
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
