"""Sampling with transformers models: seeds, logits processors, and a law that is the target's own."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers_support import GREEDY, PROMPT, generate, make_model

import acceptlib
from acceptlib import exact
from acceptlib.demo.pair import ModelPair
from acceptlib.exact import oracle
from acceptlib.integrations import transformers as integration
from acceptlib.integrations.transformers import SpeculativeDecoder, Step
from acceptlib.rng import Rng
from acceptlib.sampling import SamplingParams

FALSE_ALARM_Z = 5.998  # one-sided normal quantile of 1e-9


# Sampling


def sample(target: Any, draft: Any, seed: int | None, **options: Any) -> torch.Tensor:
    options = {"do_sample": True, "top_k": 0, "temperature": 1.5, "max_new_tokens": 25} | options
    return generate(target, draft, loop={"seed": seed}, **options)


@pytest.mark.parametrize("seed", [0, 11])
def test_a_seed_gives_one_text(target: Any, draft: Any, seed: int) -> None:
    assert torch.equal(sample(target, draft, seed), sample(target, draft, seed))
    assert not torch.equal(sample(target, draft, seed), sample(target, draft, 12))


def test_without_a_seed_torch_decides(target: Any, draft: Any) -> None:
    torch.manual_seed(5)
    first, second = sample(target, draft, None), sample(target, draft, None)
    torch.manual_seed(5)
    assert torch.equal(first, sample(target, draft, None))
    assert not torch.equal(first, second)


def test_generate_and_decoder_agree(target: Any, draft: Any) -> None:
    decoder = SpeculativeDecoder(target=target, draft=draft, sampling=SamplingParams(temperature=1.5), rng=11)
    for _ in range(2):  # an int starts the same stream again
        tokens = [token for step in decoder.steps(PROMPT, 25) for token in step.token_ids]
        assert tokens == sample(target, draft, 11)[0, PROMPT.shape[1] :].tolist()


def law_of(model: Any, prompt: torch.Tensor, length: int, process: Any) -> dict[tuple[int, ...], float]:
    """Return the probability of every continuation of `length` tokens, from rows that `process` has gone through."""
    law = {(): 1.0}
    for _ in range(length):
        prefixes = [prefix for prefix, probability in law.items() if probability > 0]
        ids = torch.stack([torch.cat((prompt[0], torch.tensor(prefix, dtype=torch.int64))) for prefix in prefixes])
        with torch.no_grad():
            rows = process(ids, model(ids).logits[:, -1]).double().softmax(-1).tolist()
        law = {
            (*prefix, token): law[prefix] * probability
            for prefix, row in zip(prefixes, rows, strict=True)
            for token, probability in enumerate(row)
        }
    return law


def chi_square_z(counts: dict[tuple[int, ...], int], law: dict[tuple[int, ...], float], total: int) -> float:
    """Return the chi-square statistic as a normal deviate (Wilson-Hilferty), rare outcomes merged."""
    bins: list[list[float]] = []
    rare = [0.0, 0.0]
    for outcome, probability in sorted(law.items(), key=lambda item: item[1]):
        expected = total * probability
        if expected >= 10:
            bins.append([counts.get(outcome, 0), expected])
            continue
        rare[0] += counts.get(outcome, 0)
        rare[1] += expected
        if rare[1] >= 10:
            bins.append(rare)
            rare = [0.0, 0.0]
    bins[0] = [bins[0][0] + rare[0], bins[0][1] + rare[1]]
    freedom = len(bins) - 1
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in bins)
    return ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))


@pytest.mark.parametrize("strategy", ["rejection", "block"])
def test_joint_law_is_the_targets(strategy: str) -> None:
    """Three tokens come from one to three steps, so streams, caches and the law of q must all be right."""
    sizes = {"vocab_size": 7, "hidden_size": 16, "num_hidden_layers": 1}
    target, draft = make_model(21, **sizes), make_model(22, **sizes)
    prompt, temperature, total = torch.tensor([[1, 4, 2]]), 1.2, 1500
    rng = Rng(seeds=torch.tensor([77]), offsets=torch.tensor([0]))
    decoder = SpeculativeDecoder(
        target=target,
        draft=draft,
        strategy=strategy,
        num_draft_tokens=2,
        sampling=SamplingParams(temperature=temperature),
        draft_sampling=SamplingParams(temperature=0.35),  # far from the target's, so that a wrong q shows
        rng=rng,
    )
    counts: dict[tuple[int, ...], int] = {}
    partly = 0
    for _ in range(total):
        steps = list(decoder.steps(prompt, 3))
        partly += any(0 < step.num_accepted < step.num_draft_tokens for step in steps)
        outcome = tuple(itertools.chain.from_iterable(step.token_ids for step in steps))
        counts[outcome] = counts.get(outcome, 0) + 1
    assert partly > total / 20

    def z_score(model: Any, temperature: float) -> float:
        law = law_of(model, prompt, 3, lambda _, rows: rows.double() / temperature)
        return chi_square_z(counts, law, total)

    assert z_score(target, temperature) < FALSE_ALARM_Z
    # The test can tell: the draft's law, and the target's at another temperature, are far off.
    assert z_score(draft, temperature) > 2 * FALSE_ALARM_Z
    assert z_score(target, 0.7 * temperature) > FALSE_ALARM_Z


def test_each_drafted_token_has_numbers_of_its_own(target: Any, draft: Any) -> None:
    """Those of the step and of its place in the draft."""
    rng = Rng(seeds=torch.tensor([3]), offsets=torch.zeros(1, dtype=torch.int64))
    decoder = SpeculativeDecoder(target=target, draft=draft, num_draft_tokens=4, rng=rng)
    for index, step in enumerate(decoder.steps(PROMPT, 16)):
        stream = Rng(seeds=rng.seeds, offsets=torch.tensor([index]))
        found = [
            int(acceptlib.sample(row.log()[None], rng=stream, position=place)[0])
            for place, row in enumerate(step.draft_probs)
        ]
        assert found == step.draft_token_ids.tolist()


def test_draft_sampling_is_what_q_says(target: Any, draft: Any) -> None:
    """A draft at temperature 0 beside a sampled target declares one-hot rows at its tokens."""
    sampling = SamplingParams(temperature=1.5)
    decoder = SpeculativeDecoder(target=target, draft=draft, sampling=sampling, draft_sampling=GREEDY, rng=2)
    for step in decoder.steps(PROMPT, 12):
        one_hot = torch.nn.functional.one_hot(step.draft_token_ids, 97).float()
        assert torch.equal(step.draft_probs, one_hot)


# Logits processors


def shift(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Favour a token that depends on the whole text, so that a wrong prefix shows."""
    return scores.index_fill(1, input_ids.sum(1) % scores.shape[1], 30.0)


PROCESSORS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.7},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "min_new_tokens": {"eos_token_id": list(range(60)), "min_new_tokens": 9},
    "bad_words_ids": {"bad_words_ids": [[token] for token in range(0, 97, 2)]},
    "sequence_bias": {"sequence_bias": [[[5, 6], 9.0], [[7], 2.5]]},
    "suppress_tokens": {"suppress_tokens": list(range(40))},
    "forced_eos": {"forced_eos_token_id": 3},
    "renormalize_logits": {"renormalize_logits": True},
    "a function": {"logits_processor": transformers.LogitsProcessorList([shift])},
}


@pytest.mark.parametrize("vocab_size", [97, 90, 104])
@pytest.mark.parametrize("options", PROCESSORS.values(), ids=PROCESSORS)
def test_processors_are_applied(target: Any, draft: Any, options: dict[str, Any], vocab_size: int) -> None:
    """Greedy text under them is the target's own; the draft sees them too, whatever its vocabulary."""
    expected = target.generate(PROMPT, do_sample=False, max_new_tokens=20, **options)
    drafting = draft if vocab_size == 97 else make_model(3, vocab_size=vocab_size)
    assert torch.equal(generate(target, drafting, do_sample=False, max_new_tokens=20, **options), expected)
    if vocab_size == 97:
        assert not torch.equal(target.generate(PROMPT, do_sample=False, max_new_tokens=20), expected) or (
            "renormalize_logits" in options
        )


def test_a_processor_may_return_another_dtype(target: Any, draft: Any) -> None:
    """Rows become float32 again, as `verify` takes no logits of float64."""
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12}
    text = generate(target, draft, logits_processor=[lambda _, scores: scores.double()], **options)
    assert torch.equal(text, target.generate(PROMPT, **options))


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_draft_that_may_say_nothing(target: Any, *, do_sample: bool) -> None:
    """Every other token is one that it lacks: such a step has no drafted token there, and ends before it."""

    def by_turns(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        known = torch.arange(97) < 90
        return scores.masked_fill(known if input_ids.shape[1] % 4 == 0 else ~known, -torch.inf)

    options: dict[str, Any] = {"do_sample": do_sample, "max_new_tokens": 30, "logits_processor": [by_turns]}
    steps: list[Step] = []
    loop = {"on_step": steps.append, "num_draft_tokens": 6, "seed": 0}
    text = generate(target, make_model(3, vocab_size=90), loop=loop, **options)
    assert [bool(token >= 90) for token in text[0, 5:]] == [place % 4 == 0 for place in range(5, 35)]
    assert {step.num_draft_tokens for step in steps} == {0, 1, 2, 3}
    if not do_sample:
        assert torch.equal(text, target.generate(PROMPT, **options))


def processors_of(model: Any, **options: Any) -> Any:
    """Return what `generate` makes of options, as it hands them to a decoding loop."""
    seen: list[Any] = []

    def keep(_model: Any, input_ids: torch.Tensor, logits_processor: Any, **_: Any) -> torch.Tensor:
        seen.append(logits_processor)
        return input_ids

    model.generate(PROMPT, custom_generate=keep, do_sample=True, max_new_tokens=1, **options)
    return seen[0]


def test_processors_run_where_the_prompt_is() -> None:
    """`generate` builds them there, and plain sampling runs them there, whatever the model's device."""
    with FakeTensorMode():  # of a device that there need not be
        built = transformers.MinNewTokensLengthLogitsProcessor(5, 3, torch.tensor([2]), device="cpu")
        ids, row = torch.zeros(1, 5, dtype=torch.int64, device="cuda"), torch.zeros(1, 97, device="cuda")
        with pytest.raises(RuntimeError, match=r"cuda.* cpu"):
            built(ids, row)
        both = [built, transformers.RepetitionPenaltyLogitsProcessor(1.7)]  # the latter reads the ids too
        assert integration._run_on(torch.device("cpu"), both)(ids, row).device == row.device


def test_a_prompt_on_another_device(target: Any, draft: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another name, that is: there may be no other here."""
    used: list[torch.device] = []
    original = integration._run_on
    monkeypatch.setattr(integration, "_run_on", lambda device, left: used.append(device) or original(device, left))
    options = {
        "do_sample": False,
        "max_new_tokens": 20,
        "eos_token_id": [2],
        "min_new_tokens": 9,
        "repetition_penalty": 1.7,
    }
    expected = target.generate(PROMPT, **options)
    assert torch.equal(generate(target, draft, **options), expected)
    assert not used
    monkeypatch.setattr(type(target), "device", torch.device("cpu:0"))
    assert torch.equal(generate(target, draft, **options), expected)
    assert used == [PROMPT.device]


WARPERS: dict[str, tuple[dict[str, Any], list[str], SamplingParams]] = {
    "default": ({}, [], SamplingParams(top_k=50)),
    "none": ({"top_k": 0}, [], SamplingParams()),
    "all": (
        {"temperature": 0.7, "top_k": 9, "top_p": 0.8, "min_p": 0.1},
        [],
        SamplingParams(temperature=0.7, top_k=9, top_p=0.8, min_p=0.1),
    ),
    "after a penalty": (
        {"repetition_penalty": 1.5, "top_k": 0, "top_p": 0.8},
        ["RepetitionPenaltyLogitsProcessor"],
        SamplingParams(top_p=0.8),
    ),
    "before another": (
        {"temperature": 0.5, "top_k": 7, "typical_p": 0.9},
        ["TemperatureLogitsWarper", "TopKLogitsWarper", "TypicalLogitsWarper"],
        SamplingParams(),
    ),
    "nothing to keep": ({"top_k": 7, "top_p": 0.0}, ["TopKLogitsWarper", "TopPLogitsWarper"], SamplingParams()),
    "in another order": (
        {"top_k": 7, "logits_processor": [transformers.TopPLogitsWarper(0.8)]},
        ["TopPLogitsWarper"],
        SamplingParams(top_k=7),
    ),
    "two to keep": (
        {"top_k": 0, "logits_processor": [transformers.TopPLogitsWarper(0.8, min_tokens_to_keep=2)]},
        ["TopPLogitsWarper"],
        SamplingParams(),
    ),
    "another value to fill with": (
        {"top_k": 0, "logits_processor": [transformers.TopPLogitsWarper(0.8, filter_value=-9.0)]},
        ["TopPLogitsWarper"],
        SamplingParams(),
    ),
    "twice": (
        {"temperature": 0.5, "top_k": 0, "logits_processor": [transformers.TemperatureLogitsWarper(2.0)]},
        ["TemperatureLogitsWarper"],
        SamplingParams(temperature=0.5),
    ),
}


@pytest.mark.parametrize(("options", "left", "sampling"), WARPERS.values(), ids=WARPERS)
def test_warpers_become_sampling_parameters(
    target: Any, options: dict[str, Any], left: list[str], sampling: SamplingParams
) -> None:
    """Those at the end, in their order, which `verify` has too; the rest are applied as they are."""
    found, params = integration._split(list(processors_of(target, **options)))
    assert [type(processor).__name__ for processor in found] == left
    assert params == sampling


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.4, "top_k": 5, "top_p": 0.9, "min_p": 0.03},
        {"temperature": 1.4, "top_k": 0, "repetition_penalty": 1.6, "top_p": 0.9},
        {"temperature": 2.5, "top_k": 6, "typical_p": 0.9},
    ],
    ids=["filters", "penalty", "typical"],
)
def test_sampled_law_is_that_of_plain_sampling(options: dict[str, Any]) -> None:
    """Joint law of three tokens of `generate` under its own parameters, at a small vocabulary."""
    sizes = {"vocab_size": 7, "hidden_size": 16, "num_hidden_layers": 1}
    target, draft = make_model(21, **sizes), make_model(22, **sizes)
    prompt, total = torch.tensor([[1, 4, 2]]), 900
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(total):
        loop = {"seed": seed, "num_draft_tokens": 2}
        text = generate(target, draft, ids=prompt, loop=loop, do_sample=True, max_new_tokens=3, **options)
        outcome = tuple(text[0, 3:].tolist())
        counts[outcome] = counts.get(outcome, 0) + 1
    wanted = law_of(target, prompt, 3, processors_of(target, **options))
    assert {*counts} <= {outcome for outcome, probability in wanted.items() if probability > 0}
    assert chi_square_z(counts, wanted, total) < FALSE_ALARM_Z
    assert chi_square_z(counts, law_of(target, prompt, 3, lambda _, rows: rows), total) > FALSE_ALARM_Z


FILTERS = {"temperature": 0.9, "top_k": 12, "top_p": 0.9, "min_p": 0.02}


def test_bundled_pair_under_filters(pair: ModelPair) -> None:
    """Chi-square on real rows: two tokens of `generate`, accepted, recovered and bonus, against plain sampling."""
    ids, total = pair.tokenizer("def parse(", return_tensors="pt").input_ids, 500
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(total):
        text = generate(
            pair.target, pair.draft, ids=ids, loop={"seed": seed, "num_draft_tokens": 1},
            do_sample=True, max_new_tokens=2, eos_token_id=None, **FILTERS,
        )  # fmt: skip
        outcome = tuple(text[0, ids.shape[1] :].tolist())
        counts[outcome] = counts.get(outcome, 0) + 1
    wanted = law_of(pair.target, ids, 2, processors_of(pair.target, **FILTERS))
    assert {*counts} <= {outcome for outcome, probability in wanted.items() if probability > 0}
    assert chi_square_z(counts, wanted, total) < FALSE_ALARM_Z


@pytest.mark.parametrize("strategy", ["rejection", "block"])
def test_exact_law_on_real_rows(pair: ModelPair, strategy: str) -> None:
    """The bundled pair's rows cut to their likeliest entries, under the same filters: equality, not statistics."""
    decoder = SpeculativeDecoder(
        target=pair.target, draft=pair.draft, strategy=strategy, num_draft_tokens=2, sampling=SamplingParams(**FILTERS)
    )
    ids = pair.tokenizer("def parse(", return_tensors="pt").input_ids
    for step in itertools.islice(decoder.steps(ids, 12), 3):
        likely = step.target_logits.softmax(-1)
        likely[:-1] += step.draft_probs
        likeliest = likely.topk(6).indices
        cut = step.target_logits.gather(1, likeliest)
        p = torch.stack([oracle.processed(row.tolist(), **FILTERS) for row in cut])
        q = step.draft_probs.gather(1, likeliest[:-1]).double()
        q /= q.sum(1, keepdim=True)
        found = exact.complete(exact.law(decoder.strategy, p, q), p, 3)
        assert float((found - p[0][:, None, None] * p[1][:, None] * p[2]).abs().max()) < 1e-12
