"""Acceptance metrics against counts made by hand."""

from __future__ import annotations

import math

import pytest
import torch

import acceptlib
from acceptlib.errors import InputError
from acceptlib.metrics import AcceptanceMetrics
from acceptlib.result import VerifyResult


def result(accepted: list[int], emitted: list[int]) -> VerifyResult:
    """Return a result of which only the counts matter."""
    count = len(accepted)
    return VerifyResult(
        output_token_ids=torch.zeros(count, 5, dtype=torch.int32),
        num_accepted=torch.tensor(accepted, dtype=torch.int32),
        num_emitted=torch.tensor(emitted, dtype=torch.int32),
        status=torch.zeros(count, dtype=torch.int8),
    )


def test_counts_of_two_steps() -> None:
    metrics = AcceptanceMetrics()
    metrics.update(result([2, 0, 3], [3, 1, 4]), torch.tensor([3, 2, 3]))
    metrics.update(result([0, 1], [1, 2]), torch.tensor([0, 4], dtype=torch.int32))
    assert metrics.num_steps == 5
    assert metrics.num_draft_tokens == 12
    assert metrics.num_accepted_tokens == 6
    assert metrics.num_emitted_tokens == 11
    assert metrics.drafted_at == [4, 4, 3, 1]
    assert metrics.accepted_at == [3, 2, 1, 0]
    assert metrics.mean_acceptance_length == 11 / 5
    assert metrics.draft_acceptance_rate == 6 / 12
    assert metrics.acceptance_by_position == [3 / 4, 2 / 4, 1 / 3, 0.0]
    # emitted 3, 1, 4, 1, 2: mean 2.2, squared deviations 0.64 + 1.44 + 3.24 + 1.44 + 0.04 = 6.8
    assert metrics.standard_error == pytest.approx(math.sqrt(6.8 / 4 / 5), rel=1e-12)


def test_the_error_of_many_steps_is_not_lost_to_rounding() -> None:
    """All but one emit 3 tokens, and one 4: the squared deviations add up to 1 - 1/n, and the error is 1/n."""
    count = 10**7
    metrics = AcceptanceMetrics(num_steps=count, num_emitted_tokens=3 * count + 1, _squares=9 * count + 7)
    assert metrics.standard_error * count == pytest.approx(1, rel=1e-12)


def test_marked_request_emits_what_it_accepted() -> None:
    metrics = AcceptanceMetrics()
    metrics.update(result([1, 0], [1, 0]), torch.tensor([2, 2]))
    assert metrics.mean_acceptance_length == 0.5
    assert metrics.draft_acceptance_rate == 0.25


def test_nothing_counted_yet() -> None:
    metrics = AcceptanceMetrics()
    assert math.isnan(metrics.mean_acceptance_length)
    assert math.isnan(metrics.draft_acceptance_rate)
    assert math.isnan(metrics.standard_error)
    assert metrics.acceptance_by_position == []
    metrics.update(result([], []), torch.empty(0, dtype=torch.int64))
    assert metrics.num_steps == 0


def test_nothing_drafted() -> None:
    metrics = AcceptanceMetrics()
    metrics.update(result([0], [1]), torch.tensor([0]))
    assert metrics.mean_acceptance_length == 1.0
    assert math.isnan(metrics.draft_acceptance_rate)
    assert math.isnan(metrics.standard_error)
    metrics.update(result([0], [1]), torch.tensor([0]))
    assert metrics.standard_error == 0.0
    assert metrics.acceptance_by_position == []


def test_metrics_share_no_lists() -> None:
    first, second = AcceptanceMetrics(), AcceptanceMetrics()
    first.update(result([1], [2]), torch.tensor([1]))
    assert second.drafted_at == []


def test_counts_of_another_batch_are_an_error() -> None:
    metrics = AcceptanceMetrics()
    wrong = (torch.tensor([1]), torch.tensor([1, -1]), torch.tensor([0, 3]), torch.tensor(1), torch.tensor([3.0, 3.0]))
    wrong = (*wrong, torch.tensor([[1], [1]]), torch.tensor([5, 3]))  # of 4 places
    for drafted in (*wrong, [1, None]):
        with pytest.raises(InputError, match=r"a tensor \[2\] of integers, each at least what was accepted, \[1, 0\]"):
            metrics.update(result([1, 0], [2, 1]), drafted)
    with pytest.raises(InputError, match=r"at most 4; got \[2\] torch\.float32, \[3\.0, 3\.0\]$"):
        metrics.update(result([1, 0], [2, 1]), torch.tensor([3.0, 3.0]))
    assert metrics == AcceptanceMetrics()


def test_metrics_of_a_verified_batch() -> None:
    strategy = acceptlib.create("synthetic", synthetic_acceptance_rates=(1.0, 1.0, 0.0))
    metrics = AcceptanceMetrics()
    ids = torch.zeros(4, 3, dtype=torch.int64)
    for _ in range(2):
        metrics.update(strategy.verify(ids, target_probs=torch.ones(4, 4, 1)), torch.full((4,), 3))
    assert metrics.num_steps == 8
    assert metrics.mean_acceptance_length == 3.0
    assert metrics.standard_error == 0.0
    assert metrics.draft_acceptance_rate == pytest.approx(2 / 3)
    assert metrics.acceptance_by_position == [1.0, 1.0, 0.0]


def test_merged_counts_are_those_of_one_run() -> None:
    """Workers' counts, of drafts of other lengths too."""
    calls = [(result([1, 0], [2, 1]), torch.tensor([1, 2])), (result([3], [4]), torch.tensor([3]))]
    whole, parts = AcceptanceMetrics(), [AcceptanceMetrics(), AcceptanceMetrics(), AcceptanceMetrics()]
    for call, part in zip(calls, parts, strict=False):
        whole.update(*call)
        part.update(*call)
    merged = AcceptanceMetrics()
    for part in parts:
        merged.merge(part)
    assert merged == whole
    assert merged.standard_error == whole.standard_error
    with pytest.raises(InputError, match="other: expected AcceptanceMetrics, got int"):
        merged.merge(3)  # type: ignore[arg-type]


def test_what_is_no_result_is_refused() -> None:
    """The lists of tokens that a result gives are not one."""
    metrics = AcceptanceMetrics()
    with pytest.raises(InputError, match="result: expected a VerifyResult, as verify returns it, got list"):
        metrics.update(result([1], [2]).to_lists(), torch.tensor([1]))  # type: ignore[arg-type]
    assert metrics == AcceptanceMetrics()


def test_more_numbers_than_requests_are_an_error_that_counts_nothing() -> None:
    metrics = AcceptanceMetrics()
    with pytest.raises(InputError, match=r"a tensor \[2\] of integers"):
        metrics.update(result([1, 0], [2, 1]), torch.tensor([1, 1, 1]))
    assert metrics == AcceptanceMetrics()


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8])
def test_numbers_of_drafted_tokens_are_integers_of_any_width(dtype: torch.dtype) -> None:
    metrics = AcceptanceMetrics()
    metrics.update(result([1, 0], [2, 1]), torch.tensor([2, 1], dtype=dtype))
    assert (metrics.num_draft_tokens, metrics.drafted_at) == (3, [2, 1])
