"""Sampling parameters by themselves: what they may be, and the law they make of a row: kept set, ties, bias, mask."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import support
import torch
import transformers
from sampling_cases import VOCAB, named, normal, packed, params

from acceptlib import LogitBias, SamplingParams
from acceptlib.engine import filters, process
from acceptlib.engine import logits as of_rows
from acceptlib.engine.process import law
from acceptlib.errors import InputError
from acceptlib.exact import oracle
from acceptlib.inputs import make_rows


def nearly_one_hot() -> torch.Tensor:
    """Return rows with one large entry among equal ones, among random ones, and among impossible ones."""
    rows = torch.stack([torch.zeros(VOCAB), normal(VOCAB), torch.full((VOCAB,), -torch.inf)])
    rows[:, 17] = torch.tensor([30.0, 12.0, 0.0])
    return rows


ROWS = {
    "random": 3 * normal(6, VOCAB),
    "bfloat16": (3 * normal(6, VOCAB, seed=1)).bfloat16().float(),
    "tied": (2 * normal(6, VOCAB, seed=2)).round(),
    # 128 equal entries, and 32, have dyadic masses: top-p 1/2 is met exactly and not within rounding.
    "constant": torch.tensor([[0.0], [-7.0], [3.5]]).expand(-1, 128).contiguous(),
    "nearly-one-hot": nearly_one_hot(),
    "signed-zeros": torch.tensor([0.0, -0.0, 1.0, -1.0]).repeat(2, 32),
}
FILTERS = list(itertools.product((1.0, 0.7, 1.6), (0, 1, 5, 50, 199, 300), (1.0, 0.97, 0.5, 0.125), (0.0, 0.05, 1.0)))
FILTERED = [values for values in FILTERS if values[1] in {1, 5, 50} or values[2:] != (1.0, 0.0)]


def warped(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Return the law under transformers' own processors, built and ordered as `generate` does, in float64."""
    processors = transformers.LogitsProcessorList()
    if temperature != 1:
        processors.append(transformers.TemperatureLogitsWarper(temperature))
    if top_k:
        processors.append(transformers.TopKLogitsWarper(top_k))
    if top_p < 1:
        processors.append(transformers.TopPLogitsWarper(top_p))
    processors.append(transformers.MinPLogitsWarper(min_p))
    return processors(torch.zeros(len(logits), 1, dtype=torch.int64), logits.double()).softmax(-1)


def per_request(count: int, values: tuple[float, int, float, float]) -> SamplingParams:
    """Return the same parameters as tensors."""
    temperature, top_k, top_p, min_p = values
    return SamplingParams(
        temperature=torch.full((count,), temperature),
        top_k=torch.full((count,), top_k, dtype=torch.int32),
        top_p=torch.full((count,), top_p, dtype=torch.float64),
        min_p=torch.full((count,), min_p, dtype=torch.float64),
    )


# The kept set


@pytest.mark.parametrize("rows", ROWS)
def test_kept_set_is_that_of_transformers(rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stable sort, which transformers has on a GPU: then its own order of ties is definite."""
    sort = torch.sort
    monkeypatch.setattr(torch, "sort", lambda scores, descending: sort(scores, descending=descending, stable=True))
    for values in FILTERS:
        found, wanted = law(ROWS[rows], params(*values)), warped(ROWS[rows], *values)
        # float32 has no entry below 1e-45, and such a one is kept or not without a trace.
        assert torch.equal(found > 0, wanted.float() > 0), values
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("rows", ROWS)
def test_as_many_of_equal_logits_are_kept_as_in_transformers(rows: str) -> None:
    """Its sort on the CPU leaves open which of equal logits are kept, but not how many."""
    for values in FILTERS:
        found, wanted = law(ROWS[rows], params(*values)), warped(ROWS[rows], *values)
        for row, ours, theirs in zip(ROWS[rows], found > 0, wanted.float() > 0, strict=True):
            assert torch.equal(row[ours].sort().values, row[theirs].sort().values), values


@pytest.mark.parametrize("rows", ROWS)
def test_oracle(rows: str) -> None:
    for row, values in itertools.product(ROWS[rows][:3], FILTERS):
        temperature, top_k, top_p, min_p = values
        wanted = oracle.processed(row.tolist(), temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        found = law(row[None], params(*values))[0]
        assert torch.equal(found > 0, wanted.float() > 0), values
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("rows", ROWS)
def test_every_way_to_the_kept_set_gives_the_same_bits(rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates, digits of the logits, with k known or not: which is taken must not show."""
    for values in FILTERED:
        quick = law(ROWS[rows], params(*values))
        assert torch.equal(quick, law(ROWS[rows], per_request(len(quick), values))), values
        with monkeypatch.context() as patch:
            patch.setattr(filters, "MAX_CANDIDATES", 60)
            patch.setattr(filters, "BLOCK", 4)
            assert torch.equal(quick, law(ROWS[rows], params(*values))), values
            assert torch.equal(quick, law(ROWS[rows], per_request(len(quick), values))), values
            support.read_as_on_a_device(patch)
            assert torch.equal(quick, law(ROWS[rows], params(*values))), values
            assert torch.equal(quick, law(ROWS[rows], per_request(len(quick), values))), values


WIDE = {
    "random": 3 * normal(3, 50_000),
    "flat": normal(3, 50_000) / 8,
    "peaked": 12 * normal(3, 50_000),
    "tied": (2 * normal(3, 50_000)).round(),
    "equal": torch.zeros(2, 50_000),
    "halves": torch.cat((normal(2, 25_000), torch.full((2, 25_000), -torch.inf)), 1),
    "far": 1e6 + 3 * normal(3, 50_000),
    "runs": torch.cat((torch.full((2, 2000), 5.0), torch.full((2, 2000), 4.0), torch.zeros(2, 46_000)), 1),
    "bad": normal(3, 50_000).index_put_(
        (torch.tensor([0, 2]), torch.tensor([7, 9])), torch.tensor([-math.nan, math.inf])
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", WIDE)
def test_every_way_through_wide_rows_gives_the_same_bits(
    rows: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where candidates are found by blocks and buckets, and a row is a chunk of its own."""
    data = WIDE[rows].to(dtype)
    temperatures = (1.0, 0.7, 1e-30, 0.0)
    filtered = [
        (0, 1.0, 0.05),
        (0, 0.9, 0.0),
        (0, 0.5, 0.3),
        (0, 1.0, 1e-42),
        (0, 1e-9, 1.0),
        (9, 0.9, 0.0),
        (9, 1.0, 0.05),
    ]
    filtered += [(1000, 1.0, 0.01), (1025, 0.99, 0.0)]
    for temperature, (top_k, top_p, min_p) in itertools.product(temperatures, filtered):
        values = (temperature, top_k, top_p, min_p)
        found = law(data, params(*values))
        with monkeypatch.context() as patch:
            support.read_as_on_a_device(patch)
            patch.setattr(of_rows, "SCRATCH_BYTES", 1)
            wanted = law(data, params(*values))
        assert torch.equal(found.nan_to_num(7), wanted.nan_to_num(7)), values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wide_rows(dtype: torch.dtype) -> None:
    """Half precision ties many entries."""
    data = WIDE["random"].to(dtype)
    for values in (
        (0.7, 50, 0.9, 0.0),
        (1.0, 0, 0.9, 0.0),
        (1.0, 0, 1.0, 0.05),
        (1.0, 1024, 1.0, 0.01),
        (0.8, 1025, 0.99, 0.0),
    ):
        wanted = [oracle.processed(row.tolist(), **named(values)) for row in data]
        assert torch.equal(law(data, params(*values)) > 0, torch.stack(wanted) > 0), values


def test_a_wide_row_whose_min_p_is_beyond_its_range_is_nan_throughout() -> None:
    sampling = SamplingParams(min_p=torch.tensor([0.5, 1.5, math.nan]))
    assert law(WIDE["peaked"], sampling).isnan().float().mean(1).tolist() == [0, 1, 1]


def test_wide_rows_of_one_batch_have_their_own_filters() -> None:
    """Each found in another way, and written beside the others."""
    data = WIDE["random"].repeat(3, 1)
    top_k, top_p, min_p = (
        [0, 0, 9, 0, 2000, 0, 0, 50, 0],
        [1, 0.9, 1, 0.5, 1, 1, 1, 0.9, 1],
        [0, 0, 0, 0.1, 0, 0.05, 0.5, 0, 0],
    )
    each = {"top_k": torch.tensor(top_k), "top_p": torch.tensor(top_p), "min_p": torch.tensor(min_p)}
    alone = [
        law(data[b : b + 1], SamplingParams(**{name: value[b : b + 1] for name, value in each.items()}))
        for b in range(9)
    ]
    assert torch.equal(law(data, SamplingParams(**each)), torch.cat(alone))


def test_requests_do_not_see_each_others_parameters() -> None:
    """A mixture of every kind in one batch is each request's own law, in any order, bit for bit."""
    chosen = FILTERED[::5]
    logits = ROWS["tied"].repeat(len(chosen) // 6 + 1, 1)[: len(chosen)]
    columns = [torch.tensor(column) for column in zip(*chosen, strict=True)]
    mixed = SamplingParams(
        temperature=columns[0], top_k=columns[1], top_p=columns[2].double(), min_p=columns[3].double()
    )
    alone = torch.cat([law(row[None], per_request(1, values)) for row, values in zip(logits, chosen, strict=True)])
    order = torch.randperm(len(chosen), generator=support.generator(3))
    shuffled = SamplingParams(
        temperature=columns[0][order],
        top_k=columns[1][order],
        top_p=columns[2].double()[order],
        min_p=columns[3].double()[order],
    )
    # float32 tensors hold 0.97 as another number than float64 ones do; here both hold float32's.
    for found, wanted in ((law(logits, mixed), alone), (law(logits[order], shuffled), alone[order])):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)
    assert torch.equal(law(logits, mixed)[order], law(logits[order], shuffled))


def test_a_k_of_all_entries_filters_nothing() -> None:
    """To the bit, as a number: the sum is torch's own."""
    logits = ROWS["random"]
    for top_k in (logits.shape[1], logits.shape[1] + 1):
        assert torch.equal(law(logits, SamplingParams(top_k=top_k)), law(logits, None))


def test_a_request_without_a_k_keeps_all_beside_one_with_it() -> None:
    logits = torch.randn(2, 3000, generator=support.generator(4))
    found = law(logits, SamplingParams(top_k=torch.tensor([0, 5])))
    assert (found > 0).sum(1).tolist() == [3000, 5]


def test_a_bias_for_what_a_row_lacks_is_passed_over() -> None:
    """As a narrower draft's do; nor does it go to the last entry."""
    none, beyond = (
        SamplingParams(top_k=3, logit_bias=LogitBias(torch.tensor([[1, token]]), torch.ones(1, 2))) for token in (-1, 9)
    )
    logits = ROWS["random"][:1, :9]
    assert torch.equal(law(logits, beyond), law(logits, none))


def test_all_rows_of_a_request_have_its_parameters() -> None:
    rows = ROWS["random"][:6].view(3, 2, -1)
    each = {"temperature": torch.tensor([0.5, 1.0, 2.0]), "top_k": torch.tensor([3, 0, 5])}
    alone = [law(rows[b], SamplingParams(**{name: value[[b, b]] for name, value in each.items()})) for b in range(3)]
    assert torch.equal(law(rows, SamplingParams(**each)), torch.stack(alone))


@pytest.mark.parametrize("vocab_size", [2047, 2048, 2049, 2050])
def test_the_last_logit_may_be_the_largest(vocab_size: int) -> None:
    """Past the last whole block of 64, and alone there too."""
    logits = torch.arange(vocab_size)[None] / 64
    assert law(logits, SamplingParams(top_k=1)).nonzero().tolist() == [[0, vocab_size - 1]]


@pytest.mark.parametrize("vocab_size", [9, 3000])
def test_a_row_of_which_all_is_masked_is_nan_throughout(vocab_size: int) -> None:
    rows = torch.full((1, vocab_size), -torch.inf)
    assert law(rows, SamplingParams(top_k=5)).isnan().all()


def test_temperature_0_ignores_the_filters() -> None:
    """Lowest id among equal logits, of which top-p would keep the highest."""
    found = law(ROWS["tied"], params(0.0, 5, 0.1, 0.5))
    assert torch.equal(found, torch.nn.functional.one_hot(ROWS["tied"].argmax(-1), VOCAB).float())


def test_a_temperature_does_not_tie_what_differs() -> None:
    """Two logits that one division makes equal stay two: the k-th is cut where the caller's logits differ."""
    logits = torch.tensor([[1.5 + 2**-23, 1.5 + 2**-22, 0.0]])
    assert (logits / 1.5)[0, :2].unique().numel() == 1
    assert (law(logits, SamplingParams(temperature=1.5, top_k=1)) > 0).tolist() == [[False, True, False]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_rows_are_their_values_in_float32(dtype: torch.dtype) -> None:
    half = ROWS["random"].to(dtype)
    for values in FILTERS[::7]:
        assert torch.equal(law(half, params(*values)), law(half.float(), params(*values)))


# Bias and mask


def test_bitmask_and_bias_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = support.generator(5)
    for rows, values in itertools.product(("random", "tied"), [(0.0, 0, 1.0, 0.0), *FILTERS[::11]]):
        logits = ROWS[rows]
        allowed = torch.rand(logits.shape, generator=generator) < 0.3
        ids = torch.stack([torch.randperm(VOCAB, generator=generator)[:4] for _ in logits])
        bias = 4 * torch.randn(ids.shape, generator=generator).round()
        bias[:, 0] = -torch.inf
        ids[0, 2:] = -1  # padding
        sampling = SamplingParams(
            **named(values), allowed_token_bitmask=packed(allowed), logit_bias=LogitBias(ids, bias)
        )
        found = law(logits, sampling)
        for b, row in enumerate(logits):
            biases = dict(zip(ids[b].tolist(), bias[b].tolist(), strict=True))
            kept = set(allowed[b].nonzero()[:, 0].tolist())
            wanted = oracle.processed(row.tolist(), **named(values), allowed=kept, bias=biases)
            assert torch.equal(found[b] > 0, wanted.float() > 0), values
            torch.testing.assert_close(found[b].double(), wanted, rtol=1e-5, atol=1e-7)
        with monkeypatch.context() as patch:
            support.read_as_on_a_device(patch)
            assert torch.equal(found, law(logits, sampling))


def test_a_bitmask_may_have_any_strides() -> None:
    words = torch.randint(-(2**31), 2**31, (6, 14), generator=support.generator(6)).to(torch.int32)
    for mask in (words[:, ::2], words[:, :7].T.contiguous().T, words[:1, :7].expand(6, 7)):
        found, wanted = (
            law(ROWS["random"], SamplingParams(allowed_token_bitmask=m)) for m in (mask, mask.contiguous())
        )
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("shape", [(0, 7), (2, 0, 7)])
def test_no_rows_have_no_law_to_mask(shape: tuple[int, ...]) -> None:
    mask = torch.zeros((*shape[:-1], 1), dtype=torch.int32)
    assert law(torch.zeros(shape), SamplingParams(allowed_token_bitmask=mask)).shape == shape


def test_a_bitmask_may_be_a_negation() -> None:
    words = torch.randint(-(2**30), 2**30, (6, 7), generator=support.generator(6)).to(torch.int32)
    found, wanted = (
        law(ROWS["random"], SamplingParams(allowed_token_bitmask=mask)) for mask in (torch._neg_view(-words), words)
    )
    assert torch.equal(found, wanted)


def test_nan_under_a_mask_is_no_fault() -> None:
    logits, allowed = ROWS["random"].clone(), torch.ones(6, VOCAB, dtype=torch.bool)
    logits[:, 3], allowed[:, 3] = torch.nan, False
    found = law(logits, SamplingParams(top_p=0.9, allowed_token_bitmask=packed(allowed)))
    assert not found.isnan().any()


def test_a_law_has_no_gradient_and_leaves_none_behind() -> None:
    logits = torch.randn(2, 9, generator=torch.manual_seed(0))
    expected = process.law(logits, SamplingParams(temperature=0.5, top_k=3))
    found = process.law(logits.clone().requires_grad_(), SamplingParams(temperature=0.5, top_k=3))
    assert not found.requires_grad
    assert torch.equal(found, expected)
    assert torch.equal(process.law(logits, SamplingParams(temperature=0.5, top_k=3)), expected)


@pytest.mark.parametrize("top_k", [0, 5])
@pytest.mark.parametrize("bad", [math.nan, math.inf, "all masked"])
def test_a_row_without_a_law_is_nan_throughout(bad: float | str, top_k: int) -> None:
    logits = ROWS["random"].clone()
    logits[1, slice(None) if isinstance(bad, str) else 7] = -torch.inf if isinstance(bad, str) else bad
    for sampling in (SamplingParams(top_k=top_k, top_p=0.9), SamplingParams(min_p=0.1, temperature=0.0)):
        found = law(logits, sampling)
        assert found[1].isnan().all()
        assert not found[[0, 2, 3, 4, 5]].isnan().any()


# The parameters themselves


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("temperature", -0.1, "a finite float32 number >= 0"),
        ("temperature", math.inf, "a finite float32 number >= 0"),
        ("temperature", math.nan, "a finite float32 number >= 0"),
        ("temperature", 1e39, "a finite float32 number >= 0"),
        ("temperature", 10**39, "a finite float32 number >= 0"),
        ("top_k", -1, "an int >= 0"),
        ("top_k", 2.5, "an int >= 0"),
        ("top_p", 0.0, r"in \(0, 1\]"),
        ("top_p", 1.01, r"in \(0, 1\]"),
        ("top_p", math.nan, r"in \(0, 1\]"),
        ("min_p", -0.1, r"in \[0, 1\]"),
        ("min_p", 1.1, r"in \[0, 1\]"),
        ("min_p", "much", r"in \[0, 1\]"),
    ],
)
def test_a_number_out_of_range_is_an_error(name: str, value: Any, expected: str) -> None:
    with pytest.raises(InputError, match=f"{name}: expected .*{expected}.*tensor.*, got {re.escape(repr(value))}"):
        SamplingParams(**{name: value})


def test_numbers_of_numpy_are_numbers_and_flags_are_not() -> None:
    SamplingParams(temperature=np.float16(0.5))  # without a warning that a bound is beyond its range
    found = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3), top_p=np.float64(0.5), min_p=np.float16(0))
    assert found == SamplingParams(temperature=0.5, top_k=3, top_p=0.5, min_p=0.0)
    assert [type(getattr(found, name)) for name in ("temperature", "top_k")] == [float, int]
    for name in ("temperature", "top_k", "top_p", "min_p"):
        with pytest.raises(InputError, match=f"{name}: expected .* got True"):
            SamplingParams(**{name: True})
    with pytest.raises(InputError, match=r"temperature: expected .{,300}$"):
        SamplingParams(temperature=[1.0] * 1000)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SamplingParams(logit_bias={5: 1.0}), r"logit_bias: expected LogitBias\(.*\), got \{5: 1.0\} \(dict\)"),
        (lambda: LogitBias([3], torch.ones(1, 1)), r"LogitBias token_ids: expected a torch.Tensor \[B, n\], got list"),
        (lambda: LogitBias(torch.ones(1, 1), 1.0), r"LogitBias values: expected a torch.Tensor \[B, n\], got float"),
    ],
)
def test_a_bias_of_another_kind_is_an_error_where_it_is_made(make: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


def test_parameters_are_compared_by_their_numbers_and_the_tensors_themselves() -> None:
    """Tensors have no truth value to compare by."""
    ones = torch.ones(2)
    one, same, other = (SamplingParams(temperature=given, top_k=3) for given in (ones, ones, ones.clone()))
    assert one == same
    assert one != other
    assert one != SamplingParams(temperature=ones, top_k=4)
    assert one != 3
    assert len({one, same, other}) == 2
    assert SamplingParams(top_p=0.5) == SamplingParams(top_p=0.5)
    assert SamplingParams(top_k=int("5000")) == SamplingParams(top_k=int("5000"))  # two objects, unlike small ints


@pytest.mark.parametrize("vocab_size", [2, 5000])
def test_min_p_is_compared_as_the_float64_that_it_is(vocab_size: int) -> None:
    """0.7 lies above the float32 next to it, which a weight may be."""
    weight = torch.tensor(0.7)
    assert float(weight) < 0.7
    near = weight.log() + torch.arange(-4, 5) * 2.0**-25
    logits = torch.full((1, vocab_size), -torch.inf)
    logits[0, 0], logits[0, 1] = 0.0, near[near.exp() == weight][0]
    for min_p, kept in ((0.7, 1), (float(weight), 2), (weight[None], 2), (torch.tensor([0.7], dtype=torch.float64), 1)):
        assert int((law(logits, SamplingParams(min_p=min_p)) > 0).sum()) == kept


@pytest.mark.parametrize(
    ("name", "given", "taken"),
    [
        ("temperature", torch.float64, torch.float32),
        ("temperature", torch.bfloat16, torch.float32),
        ("top_p", torch.float64, torch.float64),
        ("min_p", torch.float64, torch.float64),
        ("min_p", torch.float16, torch.float32),
    ],
)
def test_a_tensor_of_parameters_is_taken_in_a_dtype_that_engines_read(
    name: str, given: torch.dtype, taken: torch.dtype
) -> None:
    parameters = SamplingParams(**{name: torch.full((2,), 0.5, dtype=given)})
    assert getattr(make_rows(torch.zeros(2, 3, 5), None, parameters, 2), name).dtype == taken


def test_parameters_whose_negation_is_a_flag_are_copied() -> None:
    """Kernels read what lies in memory."""
    number, ids = torch._neg_view(torch.full((2,), -0.5)), torch.zeros(2, 1, dtype=torch.int64)
    parameters = SamplingParams(
        temperature=number, top_p=number, min_p=number, logit_bias=LogitBias(ids, number[:, None])
    )
    rows = make_rows(torch._neg_view(torch.zeros(2, 3, 5)), None, parameters, 2)
    for found in (rows.data, rows.temperature, rows.top_p, rows.min_p, rows.bias_values):
        assert found is not None
        assert not found.is_neg()


def test_rows_say_what_acts_on_them() -> None:
    data, number = torch.zeros(2, 3, 5), torch.full((2,), 0.5)
    ids = torch.zeros(2, 1, dtype=torch.int64)
    for parameters, constrained, filtered in (
        ({}, False, False),
        ({"temperature": number}, False, False),
        ({"logit_bias": LogitBias(ids, number[:, None])}, True, False),
        ({"allowed_token_bitmask": torch.ones(2, 3, 1, dtype=torch.int32)}, True, False),
        ({"top_k": ids[:, 0]}, False, True),
        ({"top_p": number}, False, True),
        ({"min_p": number}, False, True),
    ):
        rows = make_rows(data, None, SamplingParams(**parameters), 2)
        assert (rows.is_constrained, rows.is_filtered, rows.is_plain) == (constrained, filtered, not parameters)
