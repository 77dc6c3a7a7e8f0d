"""vLLM V1's rejection sampler as documented, and the bugs that shipped in it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import support
import torch

import acceptlib
from acceptlib import Rng, exact
from acceptlib.compat import _common, vllm_v1
from acceptlib.compat.vllm_v1 import (
    GREEDY_TEMPERATURE,
    PLACEHOLDER_TOKEN_ID,
    RejectionSampler,
    SamplingMetadata,
    SpecDecodeMetadata,
    compute_probs,
    expand_batch_to_tokens,
    generate_uniform_probs,
    rejection_sample,
    sample_recovered_tokens,
)
from acceptlib.engine import plan
from acceptlib.errors import InputError
from acceptlib.testing.simulation import FALSE_ALARM_Z, chi_square_z, world

CPU = torch.device("cpu")
GREEDY = SamplingMetadata(temperature=None, all_greedy=True, all_random=False)
TRIALS = 60_000


def random_sampling(num_requests: int, temperature: float = 1.0, **options: Any) -> SamplingMetadata:
    values = torch.full((num_requests,), temperature)
    return SamplingMetadata(temperature=values, all_greedy=False, all_random=True, **options)


def forced(tokens: Sequence[int], vocab: int = 100) -> torch.Tensor:
    """Return logits [T, V] whose argmax is given, and whose other tokens have no probability to speak of."""
    return torch.nn.functional.one_hot(torch.tensor(tokens, dtype=torch.int64), vocab).float() * 200


def batch(counts: Sequence[int], vocab: int = 11, seed: int = 0) -> dict[str, Any]:
    """Return contested rows as `forward` takes them, but for the sampling parameters."""
    requests = [support.ordinary(n, vocab, seed + index) for index, n in enumerate(counts)]
    return {
        "metadata": SpecDecodeMetadata.make_dummy([r.ids.tolist() for r in requests], CPU),
        "draft_probs": torch.cat([r.q for r in requests if r.q is not None]),
        "target_logits": torch.cat([r.p[:-1] for r in requests]).log(),
        "bonus_token_ids": torch.arange(len(counts), dtype=torch.int32)[:, None] % vocab,
    }


def of_probs(given: dict[str, Any], sampling: SamplingMetadata) -> torch.Tensor:
    """Return what `forward` does from logits, by way of probabilities."""
    metadata = given["metadata"]
    probs = compute_probs(given["target_logits"], metadata.cu_num_draft_tokens, sampling)
    return rejection_sample(
        metadata.draft_token_ids,
        metadata.num_draft_tokens,
        metadata.max_spec_len,
        metadata.cu_num_draft_tokens,
        given["draft_probs"],
        probs,
        given["bonus_token_ids"],
        sampling,
    )


def test_constants() -> None:
    assert (vllm_v1.PLACEHOLDER_TOKEN_ID, vllm_v1.GREEDY_TEMPERATURE, vllm_v1.MAX_SPEC_LEN) == (-1, -1, 32)


# Greedy requests

GREEDY_CASES: dict[str, tuple[list[list[int]], list[list[int]], list[int], list[list[int]]]] = {
    "all-match": ([[1, 2, 3]], [[1, 2, 3]], [4], [[1, 2, 3, 4]]),
    "second-differs": ([[1, 2, 3]], [[1, 5, 3]], [4], [[1, 5, -1, -1]]),
    "first-differs": ([[1, 2]], [[7, 2]], [4], [[7, -1, -1]]),
    "several": ([[1, 2], [3]], [[1, 2], [9]], [5, 6], [[1, 2, 5], [9, -1, -1]]),
    "lengths": (
        [[1, 2, 3], [4], []],
        [[1, 2, 8], [4], []],
        [5, 6, 7],
        [[1, 2, 8, -1], [4, 6, -1, -1], [7, -1, -1, -1]],
    ),
    "nothing-drafted": ([[], []], [[], []], [5, 6], [[5], [6]]),
    "one": ([[1]], [[1]], [2], [[1, 2]]),
}


@pytest.mark.parametrize("mode", ["all-greedy", "mixed", "random-with-one-hot-rows"])
@pytest.mark.parametrize("case", GREEDY_CASES)
def test_greedy_requests_take_the_argmax(case: str, mode: str) -> None:
    drafted, target, bonus, expected = GREEDY_CASES[case]
    sampling = {
        "all-greedy": GREEDY,
        "mixed": SamplingMetadata(torch.full((len(drafted),), float(GREEDY_TEMPERATURE)), False, False),  # noqa: FBT003
        "random-with-one-hot-rows": random_sampling(len(drafted)),
    }[mode]
    metadata = SpecDecodeMetadata.make_dummy(drafted, CPU)
    logits = forced(list(itertools.chain.from_iterable(target)))
    for dtype in (torch.int32, torch.int64):
        given = {
            "metadata": metadata,
            "draft_probs": None,
            "target_logits": logits,
            "bonus_token_ids": torch.tensor(bonus, dtype=dtype)[:, None],
        }
        output = RejectionSampler()(**given, sampling_metadata=sampling)
        assert output.dtype == torch.int32
        assert output.tolist() == expected
        assert of_probs(given, sampling).tolist() == expected
    parsed = RejectionSampler.parse_output(output, 100)
    assert parsed == [[token for token in row if token >= 0] for row in expected]


def test_greedy_rows_in_a_mixed_batch() -> None:
    """Greedy requests are exact, and random ones what they are among random ones alone."""
    given = batch([3, 2, 0, 4, 3, 1])
    generators = {b: support.generator(b) for b in range(6)}
    temperature = torch.tensor([-1.0, 0.7, -1.0, 1.3, -1.0, 0.0])
    sampling = SamplingMetadata(temperature, all_greedy=False, all_random=False, generators=generators)
    mixed = RejectionSampler()(**given, sampling_metadata=sampling)
    greedy = RejectionSampler()(**given, sampling_metadata=GREEDY)
    assert torch.equal(mixed[[0, 2, 4, 5]], greedy[[0, 2, 4, 5]])
    generators = {b: support.generator(b) for b in range(6)}
    warm = SamplingMetadata(temperature.where(temperature > 0, 1.0), False, True, generators=generators)  # noqa: FBT003
    alone = RejectionSampler()(**given, sampling_metadata=warm)
    assert torch.equal(mixed[[1, 3]], alone[[1, 3]])
    sampling.generators = {b: support.generator(b) for b in range(6)}
    assert torch.equal(of_probs(given, sampling)[[0, 2, 4, 5]], greedy[[0, 2, 4, 5]])


def test_greedy_requests_draw_nothing() -> None:
    before = torch.get_rng_state()
    RejectionSampler()(**batch([3, 2]), sampling_metadata=GREEDY)
    assert torch.equal(torch.get_rng_state(), before)


# The law


def law_batch(drafted: bool) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor]:  # noqa: FBT001
    """Return one request many times over, its logits [K+1, V] and the rows [K, V] its tokens were drafted from."""
    where = world(3)
    logits, q = where.target_logits[:4], where.draft_logits[:3].softmax(-1)
    torch.manual_seed(3)
    if drafted:
        ids = torch.stack([torch.multinomial(row, TRIALS, replacement=True) for row in q], 1)
    else:
        q = torch.nn.functional.one_hot(torch.tensor([2, 0, 1]), 4).float()
        ids = torch.tensor([2, 0, 1]).expand(TRIALS, -1)
    metadata = SpecDecodeMetadata(ids.flatten().int(), [3] * TRIALS, torch.arange(3, 3 * TRIALS + 1, 3).int())
    given = {
        "metadata": metadata,
        "draft_probs": q.repeat(TRIALS, 1) if drafted else None,
        "target_logits": logits[:-1].repeat(TRIALS, 1),
    }
    return given, logits, q


@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.7}, {"top_k": 3, "top_p": 0.8}], ids=str)
@pytest.mark.parametrize("drafts", ["probabilities", "n-gram"])
@pytest.mark.parametrize("way", ["forward", "rejection_sample"])
def test_law(way: str, drafts: str, options: dict[str, float]) -> None:
    """Whole emitted sequences at temperature 0.7; vllm#9834 left parameters out of verification."""
    given, logits, q = law_batch(drafts == "probabilities")
    kept = [filtered(row / 0.7, **options) for row in logits]
    p = torch.stack(kept)
    bonus = torch.multinomial(p[-1], TRIALS, replacement=True)
    dtype = {"top_k": torch.int32, "top_p": torch.float32}
    tensors = {name: torch.full((TRIALS,), value, dtype=dtype[name]) for name, value in options.items()}
    sampling = random_sampling(TRIALS, 0.7, **tensors)
    given["bonus_token_ids"] = bonus[:, None]
    output = RejectionSampler()(**given, sampling_metadata=sampling) if way == "forward" else of_probs(given, sampling)
    assert support.emitted_z(output, exact.law(acceptlib.create("rejection"), p, q), 4) < FALSE_ALARM_Z


def filtered(logits: torch.Tensor, top_k: int = 0, top_p: float = 1.0) -> torch.Tensor:
    """Return the law of one row [V] without ties: the k largest, of which the fewest that hold the share p."""
    order = logits.argsort(descending=True)
    kept = order[: top_k or None]
    probs = logits[kept].softmax(-1)
    count = next(n for n in range(1, len(kept) + 1) if float(probs[:n].sum()) >= top_p - 1e-6)
    row = torch.full_like(logits, -math.inf)
    row[kept[:count]] = logits[kept[:count]]
    return row.softmax(-1)


# Randomness


def test_a_neighbour_s_filter_changes_no_digit_of_large_logits() -> None:
    """Its request's rows are made probabilities of by the drop-in, and not by the engine."""
    logits = 0.01 * torch.randn(5, 50, generator=support.generator(0)) + 30
    sampling = replace(random_sampling(2), temperature=torch.tensor([0.02, 1.0]), top_p=torch.tensor([1.0, 0.9]))
    counts = torch.tensor([3, 5], dtype=torch.int32)
    found = compute_probs(logits, counts, sampling)[:3]
    expected = (logits[:3].double() / sampling.temperature[0].double()).softmax(-1)
    assert float((found / expected - 1).abs().max()) < 2**-21


def test_seeded_requests_do_not_depend_on_their_neighbours() -> None:
    """vllm#10863, #11123: wherever the request is in the batch, whatever the others are; step after step."""
    counts = [3, 1, 4, 0, 2, 3]
    everything = [support.ordinary(n, 11, seed) for seed, n in enumerate(counts)]

    def run(order: list[int], seeded: set[int]) -> list[torch.Tensor]:
        generators = {order.index(b): support.generator(b) for b in seeded}
        chosen = [everything[b] for b in order]
        given = {
            "metadata": SpecDecodeMetadata.make_dummy([r.ids.tolist() for r in chosen], CPU),
            "draft_probs": torch.cat([r.q for r in chosen if r.q is not None]),
            "target_logits": torch.cat([r.p[:-1] for r in chosen]).log(),
            "bonus_token_ids": torch.tensor(order)[:, None],
        }
        sampling = random_sampling(len(order), generators=generators)
        return [RejectionSampler()(**given, sampling_metadata=sampling) for _ in range(30)]

    torch.manual_seed(1)
    first = run(list(range(6)), {0, 2, 4})
    order = [4, 5, 0, 3, 2]
    again = run(order, {0, 2, 4})
    for b in (0, 2, 4):
        for left, right in zip(first, again, strict=True):
            assert torch.equal(left[b], right[order.index(b)])
        assert len({tuple(step[b].tolist()) for step in first}) > 1
    assert any(not torch.equal(left[5], right[1]) for left, right in zip(first, again, strict=True))


def test_seeded_requests_beside_filters() -> None:
    """These go through probabilities, where the generators have to be passed on too."""
    given, tokens = batch([3, 2, 3, 3]), []
    for seed in range(2):
        torch.manual_seed(seed)
        generators = {b: support.generator(b) for b in (0, 2)}
        sampling = random_sampling(4, top_p=torch.tensor([1.0, 1.0, 1.0, 0.9]), generators=generators)
        tokens.append(torch.stack([RejectionSampler()(**given, sampling_metadata=sampling) for _ in range(30)]))
    assert torch.equal(tokens[0][:, [0, 2]], tokens[1][:, [0, 2]])
    assert not torch.equal(tokens[0][:, [1, 3]], tokens[1][:, [1, 3]])


@pytest.mark.parametrize("function", ["forward", "uniforms", "recovered"])
def test_a_request_without_drafts_leaves_its_generator_alone(function: str) -> None:
    given = batch([2, 0, 1])
    generators = {b: support.generator(b) for b in range(3)}
    states = [generator.get_state() for generator in generators.values()]
    sampling = random_sampling(3, generators=generators)
    if function == "forward":
        RejectionSampler()(**given, sampling_metadata=sampling)
    elif function == "uniforms":
        generate_uniform_probs(3, [2, 0, 1], generators, CPU)
    else:
        recovered(given, sampling)
    unchanged = [torch.equal(generators[b].get_state(), states[b]) for b in range(3)]
    assert unchanged == [False, True, False]


def test_runs_reproduce() -> None:
    given = batch([3] * 20)
    runs = []
    for _ in range(2):
        torch.manual_seed(2)
        runs.append([RejectionSampler()(**given, sampling_metadata=random_sampling(20)) for _ in range(2)])
    assert torch.equal(runs[0][0], runs[1][0])
    assert torch.equal(runs[0][1], runs[1][1])
    assert not torch.equal(*runs[0])


# What is given and what is not


def test_objects_with_the_same_fields_will_do() -> None:
    given = batch([2, 3])
    sampling = random_sampling(2, 0.8, top_k=torch.tensor([5, 11]), generators={})
    outputs = []
    for make in (lambda x: x, lambda x: SimpleNamespace(**vars(x))):
        torch.manual_seed(3)
        some = given | {"metadata": make(given["metadata"])}
        outputs.append(RejectionSampler()(**some, sampling_metadata=make(sampling)))
    assert torch.equal(*outputs)


def test_nothing_of_the_callers_is_written() -> None:
    """vllm#30846: the target's logits were divided in place."""
    given = batch([2, 3])
    sampling = random_sampling(2, 0.5, top_p=torch.tensor([0.5, 0.9]))
    values = (*given.values(), *vars(sampling).values(), *vars(given["metadata"]).values())
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    before = [value.clone() for value in tensors]
    for parameters in (sampling, random_sampling(2, 0.5), GREEDY):
        RejectionSampler()(**given, sampling_metadata=parameters)
        of_probs(given, parameters)
    assert all(torch.equal(value, old) for value, old in zip(tensors, before, strict=True))


def test_more_than_32_drafts() -> None:
    drafted = [list(range(40)), [5]]
    metadata = SpecDecodeMetadata.make_dummy(drafted, CPU)
    bonus = torch.tensor([[50], [51]])
    for sampling in (GREEDY, random_sampling(2)):
        output = RejectionSampler()(metadata, None, forced([*range(40), 5]), bonus, sampling)
        assert RejectionSampler.parse_output(output, 100) == [[*range(40), 50], [5, 51]]


@pytest.mark.parametrize("at", [0, 1, 2], ids=["first", "mid-chain", "trailing"])
@pytest.mark.parametrize("mode", ["greedy", "random", "mixed"])
def test_placeholders_end_a_chain_with_a_token_of_their_own_row(mode: str, at: int) -> None:
    """vllm#46533: read out of bounds. The bonus token belongs to the row after three drafts, not to this one."""
    drafted = [1, 2, 3]
    drafted[at] = PLACEHOLDER_TOKEN_ID
    metadata = SpecDecodeMetadata.make_dummy([drafted, [1, 2, 3]], CPU)
    logits = forced([1, 2, 3, 1, 2, 3])
    logits[at] = forced([70])[0]
    sampling = {
        "greedy": GREEDY,
        "random": random_sampling(2),
        "mixed": SamplingMetadata(torch.tensor([-1.0, 1.0]), all_greedy=False, all_random=False),
    }[mode]
    q = torch.nn.functional.one_hot(metadata.draft_token_ids.long().clamp(min=0), 100).float()
    for draft_probs in (None, q):
        output = RejectionSampler()(metadata, draft_probs, logits, torch.tensor([[90], [91]]), sampling)
        assert output.tolist() == [[*drafted[:at], 70, *[-1] * (3 - at)], [1, 2, 3, 91]]


def test_a_row_of_nan_spoils_its_request_alone() -> None:
    """vllm#53029: an id outside the vocabulary, an empty output for all."""
    for sampling in (GREEDY, random_sampling(4)):
        given = batch([2, 3, 1, 0])
        torch.manual_seed(4)
        clean = RejectionSampler()(**given, sampling_metadata=sampling)
        given["target_logits"][2] = math.nan  # the first row of request 1
        torch.manual_seed(4)
        output = RejectionSampler()(**given, sampling_metadata=sampling)
        assert output[1].tolist() == [-1] * 4
        assert torch.equal(output[[0, 2, 3]], clean[[0, 2, 3]])


def test_a_token_that_the_draft_does_not_give_is_accepted_if_the_target_gives_it() -> None:
    metadata = SpecDecodeMetadata.make_dummy([[0]], CPU)
    q = torch.tensor([[0.0, 1.0]])
    for p, first in (([1.0, 0.0], 0), ([0.0, 1.0], 1)):
        output = RejectionSampler()(metadata, q, torch.tensor([p]).log(), torch.tensor([[1]]), random_sampling(1))
        assert int(output[0, 0]) == first


def test_shapes_that_do_not_fit_are_errors() -> None:
    given = batch([2, 3])
    given["target_logits"] = given["target_logits"][:-1]
    with pytest.raises(InputError, match="target_logits"):
        RejectionSampler()(**given, sampling_metadata=GREEDY)


@pytest.mark.parametrize("options", [{}, {"top_k": torch.tensor([4, 4])}], ids=["plain", "filtered"])
def test_rows_of_all_tokens_are_an_error(options: dict[str, torch.Tensor]) -> None:
    """The step's logits hold bonus rows too, [T+B, V]: `target_logits_indices` says which are the drafted tokens'."""
    given = batch([2, 3])
    given["target_logits"] = torch.zeros(7, 11)
    sampling = random_sampling(2, **options)
    with pytest.raises(InputError, match=r"target_logits: expected a tensor \[5, V\], got \[7, 11\]"):
        RejectionSampler()(**given, sampling_metadata=sampling)
    with pytest.raises(InputError, match=r"target_probs: expected a tensor \[5, V\], got \[7, 11\]"):
        of_probs(given, SamplingMetadata(None, all_greedy=True, all_random=False))
    with pytest.raises(InputError, match=r"target_probs: expected a tensor \[5, V\], got \[10, 11\]"):
        recovered(given | {"target_logits": torch.zeros(10, 11)}, sampling)


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p"])
def test_parameters_of_another_batch_are_an_error(name: str) -> None:
    """They were spread over the tokens of whichever requests there were."""
    sampling = random_sampling(2, top_k=torch.tensor([4, 4]), top_p=torch.tensor([0.9, 0.9]))
    setattr(sampling, name, getattr(sampling, name)[:1])
    with pytest.raises(InputError, match=rf"sampling_metadata.{name}: expected a tensor \[2\], got \[1\]"):
        RejectionSampler()(**batch([2, 3]), sampling_metadata=sampling)
    with pytest.raises(InputError, match=r"cu_num_tokens: expected a tensor \[3\], got \[2\]"):
        expand_batch_to_tokens(torch.tensor([7, 8, 9]), torch.tensor([2, 5]), 5)


def test_bonus_tokens_and_counts_of_another_batch_are_an_error() -> None:
    """They were taken for those of one request fewer, whose counts have a leading 0."""
    given, greedy = batch([0, 3, 1]), SamplingMetadata(temperature=None, all_greedy=True, all_random=False)
    for sampling in (greedy, random_sampling(3)):
        with pytest.raises(InputError, match=r"bonus_token_ids: expected a tensor \[3, 1\], got \[2, 1\]"):
            RejectionSampler()(**given | {"bonus_token_ids": given["bonus_token_ids"][:2]}, sampling_metadata=sampling)
        with pytest.raises(InputError, match=r"bonus_token_ids: expected a tensor \[3\], got \[2\]"):
            RejectionSampler()(**given | {"bonus_token_ids": torch.tensor([1, 2])}, sampling_metadata=sampling)
    given["metadata"].cu_num_draft_tokens = torch.tensor([0, 0, 3, 4], dtype=torch.int32)
    with pytest.raises(InputError, match=r"cu_num_draft_tokens: expected a tensor \[3\], got \[4\]"):
        RejectionSampler()(**given, sampling_metadata=greedy)
    for all_random in (True, False):
        sampling = SamplingMetadata(temperature=None, all_greedy=False, all_random=all_random)
        with pytest.raises(InputError, match=r"sampling_metadata.temperature: expected a tensor \[3\], got NoneType"):
            RejectionSampler()(**batch([0, 3, 1]), sampling_metadata=sampling)


def test_a_generator_of_no_request_is_passed_over() -> None:
    results = []
    for rows in ((0,), (0, 7, -2)):
        torch.manual_seed(1)
        sampling = random_sampling(2, generators={row: support.generator(4) for row in rows})
        results.append(RejectionSampler()(**batch([3, 2]), sampling_metadata=sampling))
    assert torch.equal(*results)


def test_an_empty_batch_is_all_greedy_and_all_random() -> None:
    """As vLLM's input batch has it, which counts the requests of either kind."""
    metadata = SpecDecodeMetadata.make_dummy([], CPU)
    empty = torch.empty(0, dtype=torch.float32)
    for options in ({}, {"top_k": empty.int(), "top_p": empty}):
        sampling = SamplingMetadata(empty, all_greedy=True, all_random=True, **options)
        given = {"metadata": metadata, "draft_probs": None, "target_logits": torch.empty(0, 7)}
        given["bonus_token_ids"] = torch.empty(0, 1, dtype=torch.int32)
        assert RejectionSampler()(**given, sampling_metadata=sampling).shape == (0, 1)
        assert of_probs(given, sampling).shape == (0, 1)


def test_bonus_tokens_may_be_flat_and_generators_none() -> None:
    given = batch([2, 3])
    sampling = SamplingMetadata(torch.tensor([-1.0, 1.0]), all_greedy=False, all_random=False, generators=None)  # type: ignore[arg-type]
    outputs = []
    for bonus in (given["bonus_token_ids"], given["bonus_token_ids"][:, 0]):
        torch.manual_seed(1)
        outputs.append(RejectionSampler()(**given | {"bonus_token_ids": bonus}, sampling_metadata=sampling))
    assert torch.equal(*outputs)


def test_generators_are_a_mapping() -> None:
    sampling = random_sampling(2)
    sampling.generators = [torch.Generator()]  # type: ignore[assignment]
    with pytest.raises(InputError, match="generators: expected a mapping"):
        RejectionSampler()(**batch([2, 3]), sampling_metadata=sampling)


@pytest.mark.parametrize("temperature", [torch.ones(1), torch.ones(3), torch.ones(2, 1), None])
def test_temperatures_of_another_batch_are_an_error_beside_probabilities(temperature: torch.Tensor | None) -> None:
    sampling = SamplingMetadata(temperature, all_greedy=False, all_random=False)
    with pytest.raises(InputError, match=r"sampling_metadata.temperature: expected a tensor \[2\]"):
        of_probs(batch([2, 3]), sampling)


@pytest.mark.parametrize("kind", ["greedy", "random", "mixed"])
def test_a_compiled_caller_may_be_the_first(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_common, "_ZEROS", {})
    monkeypatch.setattr(_common, "_STRATEGIES", {})
    given = batch([2, 3])
    mixed = SamplingMetadata(torch.tensor([-1.0, 1.0]), all_greedy=False, all_random=False)
    sampling = {"greedy": GREEDY, "random": random_sampling(2), "mixed": mixed}[kind]
    torch.manual_seed(1)
    found = torch.compile(RejectionSampler(), backend="eager")(**given, sampling_metadata=sampling)
    torch.manual_seed(1)
    assert torch.equal(RejectionSampler()(**given, sampling_metadata=sampling), found)
    # What rules are tried on, by which those are found that write into what they read.
    assert not plan.TRIED.flags.writeable
    assert not plan.TRIED_FLAGS.flags.writeable


# Parts


def test_parse_output_leaves_out_what_is_no_token() -> None:
    output = torch.tensor([[3, 9, 10], [5, -1, -1], [-1, -1, -1]], dtype=torch.int32)
    assert RejectionSampler.parse_output(output, 10) == [[3, 9], [5], []]


def test_compute_probs() -> None:
    given = batch([2, 0, 3])
    logits, cu = given["target_logits"], given["metadata"].cu_num_draft_tokens
    assert compute_probs(logits, cu, GREEDY) is logits
    expected = torch.cat((logits[:2] / 0.5, logits[2:])).softmax(-1)
    for greedy in (0.0, -0.5, -1.0):
        temperature = torch.tensor([0.5, 1.0, greedy])
        sampling = SamplingMetadata(temperature, all_greedy=False, all_random=False)
        assert torch.equal(compute_probs(logits, cu, sampling), expected)
    assert compute_probs(logits.bfloat16(), cu, sampling).dtype == torch.float32
    sampling.top_k, sampling.top_p = torch.tensor([4, 11, 1]), torch.tensor([0.6, 1.0, 1.0])
    rows = [filtered(row / 0.5, 4, 0.6) for row in logits[:2]] + [filtered(row, 1) for row in logits[2:]]
    torch.testing.assert_close(compute_probs(logits, cu, sampling), torch.stack(rows))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_compute_probs_reads_half_floats_before_it_computes(dtype: torch.dtype) -> None:
    """Otherwise what is taken from each logit, the largest of its row, would be rounded too."""
    logits, cu = (8 * torch.randn(4, 50, generator=support.generator(0))).to(dtype), torch.tensor([4])
    for options in ({}, {"top_p": torch.tensor([0.9])}):
        sampling = random_sampling(1, 0.5, **options)
        assert torch.equal(compute_probs(logits, cu, sampling), compute_probs(logits.float(), cu, sampling))


def test_compute_probs_takes_temperatures_of_float64() -> None:
    """As `forward` does without filters; float64 probabilities would be refused."""
    sampling = random_sampling(2, 0.5, top_k=torch.tensor([4, 4]))
    sampling.temperature = torch.full((2,), 0.5, dtype=torch.float64)
    given = batch([2, 3])
    assert compute_probs(given["target_logits"], torch.tensor([2, 5]), sampling).dtype == torch.float32
    assert of_probs(given, sampling).shape == (2, 4)


@pytest.mark.parametrize("shape", [(11,), (1, 5, 11)])
def test_compute_probs_takes_rows_alone(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=r"logits: expected a tensor \[T, V\]"):
        compute_probs(torch.zeros(shape), torch.tensor([5]), random_sampling(1))


def test_compute_probs_keeps_ties_and_one_token() -> None:
    logits, cu = torch.tensor([[1.0, 3.0, 3.0, 0.0]]), torch.tensor([1])
    for off in (0, -1, 4, 9):
        whole = compute_probs(logits, cu, random_sampling(1, top_k=torch.tensor([off])))
        assert torch.equal(whole, logits.softmax(-1))
    one = compute_probs(logits, cu, random_sampling(1, top_k=torch.tensor([1])))
    assert one.tolist() == [[0.0, 0.5, 0.5, 0.0]]
    tiny = compute_probs(torch.tensor([[1.0, 2.0, 3.0]]), cu, random_sampling(1, top_p=torch.tensor([1e-6])))
    assert tiny.tolist() == [[0.0, 0.0, 1.0]]
    half = compute_probs(torch.zeros(1, 4), cu, random_sampling(1, top_p=torch.tensor([0.5])))
    assert half.tolist() == [[0.0, 0.0, 0.5, 0.5]]  # two of the four hold the share


def test_expand_batch_to_tokens() -> None:
    assert expand_batch_to_tokens(torch.tensor([7, 8, 9]), torch.tensor([2, 5, 6]), 6).tolist() == [7, 7, 8, 8, 8, 9]
    x = torch.tensor([-1.0, 0.5, -1.0])
    expanded = expand_batch_to_tokens(x, torch.tensor([0, 2, 3], dtype=torch.int32), 3, GREEDY_TEMPERATURE, 1)
    assert expanded.tolist() == [0.5, 0.5, 1.0]
    assert expanded.dtype == x.dtype
    assert x.tolist() == [-1.0, 0.5, -1.0]
    strided = torch.tensor([2, 0, 5, 0, 6])[::2]
    assert expand_batch_to_tokens(torch.arange(6)[::2], strided, 6).tolist() == [0, 0, 2, 2, 2, 4]
    assert expand_batch_to_tokens(torch.tensor([3]), torch.tensor([50]), 50).tolist() == [3] * 50
    assert expand_batch_to_tokens(torch.tensor([3, 4]), torch.tensor([0, 0]), 0).tolist() == []


def test_generate_uniform_probs(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = [3, 0, 2]
    runs = [generate_uniform_probs(5, counts, {0: support.generator(1)}, CPU) for _ in range(2)]
    assert runs[0].shape == (5,)
    assert runs[0].dtype == torch.float32
    assert torch.equal(runs[0][:3], runs[1][:3])
    assert not torch.equal(runs[0][3:], runs[1][3:])
    assert len(set(runs[0].tolist())) == 5
    many = generate_uniform_probs(20_000, [20_000], {0: support.generator(2)}, CPU)
    assert chi_square_z(torch.histc(many, 50, 0, 1), torch.full((50,), 1 / 50)) < FALSE_ALARM_Z
    assert generate_uniform_probs(0, [], {}, CPU).shape == (0,)
    named = generate_uniform_probs(5, counts, {0: support.generator(1)}, "cpu")  # type: ignore[arg-type]
    assert torch.equal(named[:3], runs[0][:3])
    with pytest.raises(InputError, match="num_tokens: expected 3, the sum of num_draft_tokens, got 8"):
        generate_uniform_probs(8, [2, 1], {}, CPU)
    # sglang#30822: the largest number there is must not be rounded to 1.
    largest = SimpleNamespace(accept=torch.full((1, 4), support.ALMOST_ONE, dtype=torch.float64))
    monkeypatch.setattr(Rng, "uniforms", lambda _self, _most: largest)
    assert bool((generate_uniform_probs(4, [4], {}, CPU) < 1).all())


def test_a_bound_below_a_request() -> None:
    given = (torch.tensor([1, 2, 3]), [2, 0, 1], 1, torch.tensor([2, 2, 3]), None, torch.full((3, 4), 0.25))
    with pytest.raises(InputError, match="max_spec_len: expected at least 2, as in num_draft_tokens, got 1"):
        rejection_sample(
            *given,
            torch.zeros(3, dtype=torch.int64),
            SamplingMetadata(torch.ones(3), all_greedy=False, all_random=True),
        )
    metadata = SpecDecodeMetadata.make_dummy([[1, 2], [0]], CPU)
    metadata.max_spec_len = 1
    for sampling in (GREEDY, random_sampling(2), random_sampling(2, top_k=torch.tensor([2, 2]))):
        with pytest.raises(InputError, match="max_spec_len: expected at least 2"):
            RejectionSampler()(metadata, None, torch.zeros(3, 4), torch.zeros(2, 1).int(), sampling)


def test_fields_that_versions_order_differently_are_given_by_name() -> None:
    with pytest.raises(TypeError, match="positional"):
        SamplingMetadata(torch.ones(1), False, True, None, None, {0: support.generator(1)})  # type: ignore[misc]  # noqa: FBT003


def recovered(given: dict[str, Any], sampling: SamplingMetadata) -> torch.Tensor:
    metadata = given["metadata"]
    return sample_recovered_tokens(
        metadata.max_spec_len,
        metadata.num_draft_tokens,
        metadata.cu_num_draft_tokens,
        metadata.draft_token_ids,
        given["draft_probs"],
        given["target_logits"].softmax(-1),
        sampling,
        CPU,
    )


@pytest.mark.parametrize("drafts", ["probabilities", "n-gram"])
def test_recovered_tokens_follow_the_residual(drafts: str) -> None:
    given, logits, q = law_batch(drafts == "probabilities")
    tokens = recovered(given, random_sampling(TRIALS))
    assert tokens.dtype == given["metadata"].draft_token_ids.dtype
    for position, row in enumerate((logits[:3].softmax(-1) - q).clamp(min=0)):
        observed = torch.bincount(tokens[position::3].long(), minlength=4)
        assert chi_square_z(observed, row / row.sum()) < FALSE_ALARM_Z


def test_recovered_tokens_are_seeded_and_defined_at_placeholders() -> None:
    given = batch([3, 2])
    given["metadata"].draft_token_ids[1] = PLACEHOLDER_TOKEN_ID
    runs = []
    for _ in range(2):
        sampling = random_sampling(2, generators={b: support.generator(b) for b in range(2)})
        runs.append(torch.stack([recovered(given, sampling) for _ in range(10)]))
    assert torch.equal(*runs)
    assert bool((runs[0] >= 0).all())
    assert len({tuple(step.tolist()) for step in runs[0]}) > 1


def test_dummy_metadata() -> None:
    metadata = SpecDecodeMetadata.make_dummy([[1, 2], [], [3]], CPU)
    assert metadata.draft_token_ids.tolist() == [1, 2, 3]
    assert metadata.num_draft_tokens == [2, 0, 1]
    assert metadata.cu_num_draft_tokens.tolist() == [2, 2, 3]
    assert metadata.max_spec_len == 2
    assert metadata.draft_token_ids.dtype == metadata.cu_num_draft_tokens.dtype == torch.int32


def test_a_sampler_of_later_versions_is_refused() -> None:
    with pytest.raises(InputError, match="RejectionSampler: expected no arguments"):
        RejectionSampler(torch.nn.Identity())


@pytest.mark.parametrize("top_p", [0.0, 1e-9])
def test_a_top_p_below_what_float32_tells_from_zero_keeps_the_largest_entry(top_p: float) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 2.0, 1.0]])
    probs = compute_probs(logits, torch.tensor([2], dtype=torch.int32), random_sampling(1, top_p=torch.tensor([top_p])))
    assert probs.tolist() == [[0, 1, 0], [1, 0, 0]]


def test_tokens_behind_the_last_count_are_of_the_last_request() -> None:
    """On a GPU nobody sees that counts do not add up, and no index may lead out of a tensor."""
    counts = torch.tensor([1, 2], dtype=torch.int32)
    assert expand_batch_to_tokens(torch.tensor([5, 7]), counts, 4).tolist() == [5, 7, 7, 7]


@pytest.mark.parametrize("num_tokens", [2, 4])
def test_uniform_numbers_of_another_number_of_tokens_are_an_error(num_tokens: int) -> None:
    with pytest.raises(InputError, match=f"num_tokens: expected 3, the sum of num_draft_tokens, got {num_tokens}"):
        generate_uniform_probs(num_tokens, [1, 2], {}, CPU)


def test_a_bound_above_the_longest_draft_sets_the_width() -> None:
    given = batch([2, 1])
    metadata = given["metadata"]
    for some in (random_sampling(2), GREEDY):
        found = rejection_sample(
            metadata.draft_token_ids,
            metadata.num_draft_tokens,
            5,
            metadata.cu_num_draft_tokens,
            given["draft_probs"],
            given["target_logits"].exp(),
            given["bonus_token_ids"],
            some,
        )
        assert found.shape == (2, 6)
        assert (found[:, 3:] == PLACEHOLDER_TOKEN_ID).all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_recovered_tokens_have_the_dtype_of_drafted_ones(dtype: torch.dtype) -> None:
    given = batch([2, 1])
    metadata = given["metadata"]
    found = sample_recovered_tokens(
        2,
        metadata.num_draft_tokens,
        metadata.cu_num_draft_tokens,
        metadata.draft_token_ids.to(dtype),
        given["draft_probs"],
        given["target_logits"].exp(),
        random_sampling(2),
        CPU,
    )
    assert found.dtype == dtype


def test_a_sampler_is_made_of_nothing_by_name_either() -> None:
    with pytest.raises(InputError, match="RejectionSampler: expected no arguments"):
        RejectionSampler(sampler=object())


def test_temperatures_of_another_batch_are_an_error_from_probabilities_too() -> None:
    given = batch([2, 1])
    mixed = SamplingMetadata(temperature=torch.zeros(1), all_greedy=False, all_random=False)
    metadata = given["metadata"]
    with pytest.raises(InputError, match=r"sampling_metadata\.temperature: expected a tensor \[2\], got \[1\]"):
        rejection_sample(
            metadata.draft_token_ids,
            metadata.num_draft_tokens,
            metadata.max_spec_len,
            metadata.cu_num_draft_tokens,
            given["draft_probs"],
            given["target_logits"].exp(),
            given["bonus_token_ids"],
            mixed,
        )


def test_without_generators_numbers_come_from_torch_s_default_one() -> None:
    def uniform() -> torch.Tensor:
        return generate_uniform_probs(40, [20, 20], {}, CPU)

    def recovered() -> torch.Tensor:
        given = batch([1] * 40)
        metadata = given["metadata"]
        return sample_recovered_tokens(
            1,
            metadata.num_draft_tokens,
            metadata.cu_num_draft_tokens,
            metadata.draft_token_ids,
            None,
            given["target_logits"].exp(),
            random_sampling(40),
            CPU,
        )

    for draw in (uniform, recovered):
        torch.manual_seed(3)
        first, second = draw(), draw()
        torch.manual_seed(3)
        assert torch.equal(draw(), first)
        assert not torch.equal(second, first)
