"""Generation with transformers models: the target's text and law, caches, and what `generate` is refused."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode

import acceptlib
from acceptlib import AcceptanceStrategy, exact
from acceptlib.demo import DRAFT, TARGET, prompts
from acceptlib.demo.pair import ModelPair, load_pair
from acceptlib.errors import InputError, StatusError, UnknownStrategyError
from acceptlib.exact import oracle
from acceptlib.integrations import transformers as integration
from acceptlib.integrations.transformers import SpeculativeDecoder, Step, custom_generate
from acceptlib.rng import Rng
from acceptlib.sampling import SamplingParams

Texts = list[tuple[torch.Tensor, torch.Tensor]]

PROMPT = torch.tensor([[5, 17, 3, 88, 41]])
GREEDY = SamplingParams(temperature=0.0)
FALSE_ALARM_Z = 5.998  # one-sided normal quantile of 1e-9
CACHE = next(
    name for name in integration.CACHES if name in inspect.signature(transformers.LlamaForCausalLM.forward).parameters
)
"""What this version of transformers calls a cache."""


def make_model(seed: int, vocab_size: int = 97, family: str = "Llama", **options: Any) -> Any:
    """Return a tiny model with random weights, sharp enough for its argmax to be no near tie."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "initializer_range": 0.3} | options
    config = getattr(transformers, f"{family}Config")(
        vocab_size=vocab_size,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
        **sizes,
    )
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def perturbed(model: Any, noise: float) -> Any:
    """Return a copy of `model` with noise on its weights: a draft that is right now and then."""
    draft = copy.deepcopy(model)
    torch.manual_seed(7)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.add_(noise * torch.randn_like(weight))
    return draft


@pytest.fixture(scope="module")
def target() -> Any:
    return make_model(0)


@pytest.fixture(scope="module")
def draft(target: Any) -> Any:
    return perturbed(target, 0.02)


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    return load_pair()


@pytest.fixture(scope="module")
def greedy_texts(pair: ModelPair) -> Texts:
    """Three prompts and what the target alone makes of them, 300 tokens each."""
    encoded = [pair.tokenizer(text, return_tensors="pt").input_ids for text in prompts()[:3]]
    return [(ids, pair.target.generate(ids, do_sample=False, max_new_tokens=300, eos_token_id=None)) for ids in encoded]


def generate(
    target: Any,
    draft: Any,
    *,
    strategy: str = "rejection",
    ids: torch.Tensor = PROMPT,
    loop: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Call the public `generate` with a decoding loop of ours; `loop` holds options of `custom_generate`."""
    return target.generate(
        ids, assistant_model=draft, custom_generate=custom_generate(strategy, **(loop or {})), **options
    )


# Greedy text


@pytest.mark.parametrize("prompt", range(3))
@pytest.mark.parametrize(("strategy", "num_draft_tokens"), [("greedy", 1), ("rejection", 3), ("block", 8)])
def test_bundled_pair_writes_what_the_target_writes(
    pair: ModelPair, greedy_texts: Texts, prompt: int, strategy: str, num_draft_tokens: int
) -> None:
    ids, expected = greedy_texts[prompt]
    steps: list[Step] = []
    text = generate(
        pair.target,
        pair.draft,
        strategy=strategy,
        ids=ids,
        loop={"num_draft_tokens": num_draft_tokens, "on_step": steps.append},
        do_sample=False,
        max_new_tokens=300,
        eos_token_id=None,
    )
    assert torch.equal(text, expected)
    # The draft was trained on the same text: fewer steps than tokens show that its tokens stand.
    assert len(steps) < 300 * (0.75 if num_draft_tokens == 1 else 0.5)


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 3, 8])
@pytest.mark.parametrize("strategy", ["greedy", "rejection", "block"])
def test_greedy_text_is_the_targets(target: Any, draft: Any, strategy: str, num_draft_tokens: int) -> None:
    expected = target.generate(PROMPT, do_sample=False, max_new_tokens=60)
    loop = {"num_draft_tokens": num_draft_tokens}
    text = generate(target, draft, strategy=strategy, loop=loop, do_sample=False, max_new_tokens=60)
    assert text.dtype == torch.int64
    assert torch.equal(text, expected)


@pytest.mark.parametrize("vocab_size", [90, 104])
def test_vocabularies_padded_differently(target: Any, vocab_size: int) -> None:
    """A draft with more rows must not propose what the target lacks; one with fewer must survive any token."""
    draft = make_model(3, vocab_size=vocab_size)
    expected = target.generate(PROMPT, do_sample=False, max_new_tokens=40)
    assert torch.equal(generate(target, draft, do_sample=False, max_new_tokens=40), expected)
    decoder = SpeculativeDecoder(target=target, draft=draft, sampling=SamplingParams(temperature=3.0), rng=1)
    emitted = [token for step in decoder.steps(PROMPT, 150) for token in step.token_ids]
    assert len(emitted) == 150
    assert max(emitted) >= 90  # the shorter draft has met a token it cannot embed


def test_sliding_window_models() -> None:
    """A layer that keeps its window alone would lack what a rejection brings back."""
    target = make_model(1, family="Mistral", sliding_window=8)
    draft = perturbed(target, 0.03)
    expected = target.generate(PROMPT, do_sample=False, max_new_tokens=60)
    steps: list[Step] = []
    text = generate(target, draft, loop={"on_step": steps.append}, do_sample=False, max_new_tokens=60)
    assert torch.equal(text, expected)
    assert any(0 < step.num_accepted < step.num_draft_tokens for step in steps)


# Where a text ends


def test_eos_in_mid_chain(target: Any) -> None:
    expected = target.generate(PROMPT, do_sample=False, max_new_tokens=30)
    new = expected[0, PROMPT.shape[1] :].tolist()
    place = next(place for place in range(3, 9) if new[place] not in new[:place])
    eos = new[place]
    steps: list[Step] = []
    text = generate(
        target,
        target,  # every drafted token stands, so that the chain goes on past the end
        loop={"num_draft_tokens": 20, "on_step": steps.append},
        do_sample=False,
        max_new_tokens=30,
        eos_token_id=[eos, 96 if eos != 96 else 95],
    )
    assert text.tolist() == [PROMPT[0].tolist() + new[: place + 1]]
    assert len(steps) == 1
    assert steps[0].num_accepted > len(steps[0].token_ids)


@pytest.mark.parametrize("max_new_tokens", [1, 2, 6, 7, 13])
def test_max_new_tokens_is_exact(target: Any, max_new_tokens: int) -> None:
    steps: list[Step] = []
    loop = {"num_draft_tokens": 5, "on_step": steps.append}
    text = generate(target, target, loop=loop, do_sample=False, max_new_tokens=max_new_tokens)
    assert text.shape == (1, PROMPT.shape[1] + max_new_tokens)
    assert [step.num_draft_tokens for step in steps[:-1]] == [5] * (len(steps) - 1)
    assert all(step.num_draft_tokens + 1 >= len(step.token_ids) for step in steps)


def test_max_length(target: Any, draft: Any) -> None:
    assert generate(target, draft, do_sample=False, max_length=19).shape == (1, 19)


def test_no_tokens_wanted(target: Any, draft: Any) -> None:
    assert list(SpeculativeDecoder(target=target, draft=draft).steps(PROMPT, 0)) == []


class StopAtLength(transformers.StoppingCriteria):
    """Stop at a length that falls inside a chain."""

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: Any) -> torch.Tensor:  # noqa: ARG002
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= 9, dtype=torch.bool)


def test_stopping_criteria_within_a_chain(target: Any) -> None:
    criteria = transformers.StoppingCriteriaList([StopAtLength()])
    expected = target.generate(PROMPT, do_sample=False, max_new_tokens=30, stopping_criteria=criteria)
    text = generate(target, target, do_sample=False, max_new_tokens=30, stopping_criteria=criteria)
    assert torch.equal(text, expected)


class Collector:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


def test_stop_strings_as_a_criterion(pair: ModelPair, greedy_texts: Texts) -> None:
    """As docs/transformers.md says, for `generate` keeps the tokenizer that `stop_strings` needs from any loop."""
    ids, expected = greedy_texts[0]
    stop = pair.tokenizer.decode(expected[0, -40:])[20:23]
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 300, "eos_token_id": None}
    plain = pair.target.generate(ids, stop_strings=[stop], tokenizer=pair.tokenizer, **options)
    assert plain.shape[1] < expected.shape[1]
    criteria = transformers.StoppingCriteriaList([transformers.StopStringCriteria(pair.tokenizer, [stop])])
    assert torch.equal(generate(pair.target, pair.draft, ids=ids, stopping_criteria=criteria, **options), plain)


def test_streamer_gets_every_token(target: Any, draft: Any) -> None:
    streamer = Collector()
    text = generate(target, draft, do_sample=False, max_new_tokens=20, streamer=streamer)
    assert streamer.tokens == text[0].tolist()
    assert streamer.ended


def wrapped(loop: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(loop)
    def call(*args: Any, **options: Any) -> Any:
        return loop(*args, **options)

    return call


@pytest.mark.parametrize("wrap", [functools.partial, wrapped])
def test_a_wrapped_loop_loses_nothing(target: Any, draft: Any, wrap: Callable[..., Any]) -> None:
    """`generate` gives a loop neither the streamer nor the assistant, and a wrapper knows neither."""
    streamer = Collector()
    text = target.generate(
        PROMPT,
        custom_generate=wrap(custom_generate()),
        assistant_model=draft,
        streamer=streamer,
        do_sample=False,
        max_new_tokens=8,
    )
    assert streamer.tokens == text[0].tolist()
    assert streamer.ended


def test_text_streamer(pair: ModelPair, greedy_texts: Texts, capsys: pytest.CaptureFixture[str]) -> None:
    ids, expected = greedy_texts[0]
    streamer = transformers.TextStreamer(pair.tokenizer, skip_prompt=True)
    generate(pair.target, pair.draft, ids=ids, do_sample=False, max_new_tokens=20, eos_token_id=None, streamer=streamer)
    new = expected[0, ids.shape[1] : ids.shape[1] + 20]
    assert capsys.readouterr().out.strip() == pair.tokenizer.decode(new).strip()


def test_return_dict(target: Any, draft: Any) -> None:
    text = generate(target, draft, do_sample=False, max_new_tokens=9)
    output = generate(target, draft, do_sample=False, max_new_tokens=9, return_dict_in_generate=True)
    assert isinstance(output, transformers.generation.GenerateDecoderOnlyOutput)
    assert torch.equal(output.sequences, text)


# Sampling


def sample(target: Any, draft: Any, seed: int | None, **options: Any) -> torch.Tensor:
    options = {"do_sample": True, "top_k": 0, "temperature": 1.5, "max_new_tokens": 25} | options
    return generate(target, draft, loop={"seed": seed}, **options)


def test_a_seed_gives_one_text(target: Any, draft: Any) -> None:
    assert torch.equal(sample(target, draft, 11), sample(target, draft, 11))
    assert not torch.equal(sample(target, draft, 11), sample(target, draft, 12))


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


def exact_law(model: Any, prompt: list[int], length: int, temperature: float) -> dict[tuple[int, ...], float]:
    """Return the probability of every continuation of `length` tokens."""
    law = {(): 1.0}
    for _ in range(length):
        prefixes = list(law)
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *prefix] for prefix in prefixes])).logits[:, -1]
        rows = torch.softmax(logits.double() / temperature, -1).tolist()
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
    prompt, temperature, total = [1, 4, 2], 1.2, 1500
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
        steps = list(decoder.steps(torch.tensor([prompt]), 3))
        partly += any(0 < step.num_accepted < step.num_draft_tokens for step in steps)
        outcome = tuple(itertools.chain.from_iterable(step.token_ids for step in steps))
        counts[outcome] = counts.get(outcome, 0) + 1
    assert partly > total / 20
    assert chi_square_z(counts, exact_law(target, prompt, 3, temperature), total) < FALSE_ALARM_Z
    # The test can tell: the draft's law, and the target's at another temperature, are far off.
    assert chi_square_z(counts, exact_law(draft, prompt, 3, temperature), total) > 2 * FALSE_ALARM_Z
    assert chi_square_z(counts, exact_law(target, prompt, 3, 0.7 * temperature), total) > FALSE_ALARM_Z


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
        assert integration._run_on(torch.device("cpu"), [built])(ids, row).device == row.device


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
    wanted = warped_law(target, prompt, 3, processors_of(target, **options))
    assert {*counts} <= {outcome for outcome, probability in wanted.items() if probability > 0}
    assert chi_square_z(counts, wanted, total) < FALSE_ALARM_Z
    assert chi_square_z(counts, exact_law(target, prompt[0].tolist(), 3, 1.0), total) > FALSE_ALARM_Z


def warped_law(model: Any, prompt: torch.Tensor, length: int, processors: Any) -> dict[tuple[int, ...], float]:
    """Return the probability of every continuation under transformers' processors."""
    law = {(): 1.0}
    for _ in range(length):
        prefixes = [prefix for prefix, probability in law.items() if probability > 0]
        ids = torch.stack([torch.cat((prompt[0], torch.tensor(prefix, dtype=torch.int64))) for prefix in prefixes])
        with torch.no_grad():
            rows = processors(ids, model(ids).logits[:, -1]).double().softmax(-1).tolist()
        law = {
            (*prefix, token): law[prefix] * probability
            for prefix, row in zip(prefixes, rows, strict=True)
            for token, probability in enumerate(row)
        }
    return law


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
    wanted = warped_law(pair.target, ids, 2, processors_of(pair.target, **FILTERS))
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


def test_a_mask_is_refused(target: Any, draft: Any) -> None:
    mask = torch.full((1, 4), -1, dtype=torch.int32)
    with pytest.raises(InputError, match="allowed_token_bitmask"):
        SpeculativeDecoder(target=target, draft=draft, sampling=SamplingParams(allowed_token_bitmask=mask))


# Steps and caches


@pytest.mark.parametrize("family", ["Llama", "Mistral"])
def test_cached_rows_are_those_of_a_full_forward(family: str) -> None:
    options = {"sliding_window": 8} if family == "Mistral" else {}
    target = make_model(4, family=family, **options)
    draft = perturbed(target, 0.03)
    decoder = SpeculativeDecoder(
        target=target, draft=draft, num_draft_tokens=3, sampling=SamplingParams(temperature=1.2), rng=3
    )
    sequence = PROMPT
    accepted = set()
    for step in decoder.steps(PROMPT, 60):
        drafted = torch.cat((sequence, step.draft_token_ids[None]), 1)
        with torch.no_grad():
            rows = target(drafted).logits[0, -step.num_draft_tokens - 1 :]
            laws = torch.softmax(draft(drafted).logits[0, sequence.shape[1] - 1 : -1] / 1.2, -1)
        assert (step.target_logits - rows).abs().max() < 1e-4
        if step.num_draft_tokens:
            assert (step.draft_probs - laws).abs().max() < 1e-4
        sequence = torch.cat((sequence, torch.tensor([step.token_ids])), 1)
        if step.num_draft_tokens == 3:
            accepted.add(step.num_accepted)
    assert accepted == {0, 1, 2, 3}


def test_no_token_is_run_twice(target: Any, draft: Any) -> None:
    """A target sees the prompt once, then a step's K + 1 tokens; a draft one token a time, two after a full success."""
    fed: dict[str, list[int]] = {"target": [], "draft": []}

    def count(name: str) -> Callable[..., None]:
        return lambda _module, _args, kwargs: fed[name].append(kwargs["input_ids"].shape[1])

    hooks = [
        model.register_forward_pre_hook(count(name), with_kwargs=True)
        for name, model in (("target", target), ("draft", draft))
    ]
    decoder = SpeculativeDecoder(target=target, draft=draft, num_draft_tokens=2, sampling=GREEDY)
    steps = list(decoder.steps(PROMPT, 40))
    for hook in hooks:
        hook.remove()
    assert fed["target"] == [PROMPT.shape[1] + 2, *(step.num_draft_tokens + 1 for step in steps[1:])]
    expected = [PROMPT.shape[1], 1]
    for before, step in itertools.pairwise(steps):
        missing = 2 if before.num_accepted == before.num_draft_tokens else 1
        expected += [missing, 1][: step.num_draft_tokens]
    assert fed["draft"] == expected
    assert {1, 2} <= set(fed["draft"])


def test_what_a_step_says(target: Any, draft: Any) -> None:
    decoder = SpeculativeDecoder(
        target=target, draft=draft, strategy=acceptlib.create("block"), num_draft_tokens=4, rng=1
    )
    for step in decoder.steps(PROMPT, 20):
        assert step.draft_token_ids.shape == (step.num_draft_tokens,)
        assert step.draft_probs.shape == (step.num_draft_tokens, 97)
        assert step.target_logits.shape == (step.num_draft_tokens + 1, 97)
        assert step.token_ids == step.result.output_token_ids[0, : step.num_accepted + 1].tolist()
        assert step.token_ids[:-1] == step.draft_token_ids[: step.num_accepted].tolist()
        assert 0 < step.verify_seconds < 10


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_no_default_dtype_matters(target: Any, draft: Any, dtype: torch.dtype) -> None:
    def text(length: int) -> list[list[int]]:
        steps = SpeculativeDecoder(target=target, draft=draft, num_draft_tokens=3, rng=0).steps(PROMPT, length)
        return [step.token_ids for step in steps]

    expected = [text(length) for length in (1, 7)]
    torch.set_default_dtype(dtype)
    try:
        assert [text(length) for length in (1, 7)] == expected
    finally:
        torch.set_default_dtype(torch.float32)


def test_draft_may_be_bound_beforehand(target: Any, draft: Any) -> None:
    expected = target.generate(PROMPT, do_sample=False, max_new_tokens=10)
    loop = custom_generate("greedy", assistant_model=draft)
    assert torch.equal(target.generate(PROMPT, custom_generate=loop, do_sample=False, max_new_tokens=10), expected)


def test_models_that_count_positions_otherwise() -> None:
    """`generate` passes positions from 0; by itself a RoBERTa begins behind its padding token's id."""
    config = transformers.RobertaConfig(
        vocab_size=97,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        is_decoder=True,
        initializer_range=0.3,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    target = transformers.RobertaForCausalLM(config).eval()
    with torch.no_grad():
        target.roberta.embeddings.position_embeddings.weight.normal_(0, 1)
    expected = target.generate(PROMPT, do_sample=False, max_new_tokens=20)
    assert torch.equal(generate(target, perturbed(target, 0.02), do_sample=False, max_new_tokens=20), expected)


def test_models_that_take_images_too() -> None:
    """For these `generate` passes an empty mapping that nobody gave it."""
    text = transformers.LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, initializer_range=0.3, eos_token_id=None,
    )  # fmt: skip
    vision = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8
    )
    torch.manual_seed(0)
    config = transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=96)
    target = transformers.LlavaForConditionalGeneration(config).eval()
    expected = target.generate(PROMPT, do_sample=False, max_new_tokens=20)
    assert torch.equal(generate(target, perturbed(target, 0.02), do_sample=False, max_new_tokens=20), expected)


@pytest.mark.parametrize("name", ["output_attentions", "output_hidden_states", "output_scores"])
def test_extra_outputs_of_a_text_alone(target: Any, draft: Any, name: str) -> None:
    """Plain `generate` returns the same tensor with them, so this does too."""
    options = {"do_sample": False, "max_new_tokens": 6}
    assert torch.equal(generate(target, draft, **options, **{name: True}), target.generate(PROMPT, **options))


# What is refused


class Guided(transformers.UnbatchedClassifierFreeGuidanceLogitsProcessor):
    """A caller's own kind of a processor that keeps a state."""


def test_a_processor_derived_from_one_with_a_state(target: Any, draft: Any) -> None:
    with pytest.raises(InputError, match="guidance_scale=None"):
        generate(target, draft, logits_processor=[Guided(1.5, target)], do_sample=False, max_new_tokens=4)


def filled_cache() -> Any:
    """Return a cache with one token in it."""
    cache = transformers.DynamicCache()
    cache.update(torch.zeros(1, 2, 1, 16), torch.zeros(1, 2, 1, 16), 0)
    return cache


REFUSED = {
    "guidance_scale": ({"do_sample": False, "guidance_scale": 1.5}, "guidance_scale=None"),
    "num_beams": ({"do_sample": False, "num_beams": 2}, "\\[1, n\\], got \\[2, 5\\]|num_beams=1"),
    "prompt_lookup": ({"do_sample": False, "prompt_lookup_num_tokens": 2}, "prompt_lookup_num_tokens=None"),
    "output_logits": (
        {"do_sample": False, "return_dict_in_generate": True, "output_logits": True},
        "output_logits=False",
    ),
    "output_attentions": (
        {"do_sample": False, "return_dict_in_generate": True, "output_attentions": True},
        "output_attentions=False",
    ),
    "prefill_chunk_size": ({"do_sample": False, "prefill_chunk_size": 2}, "prefill_chunk_size=None"),
    "use_cache": ({"do_sample": False, "use_cache": False}, "use_cache=True"),
    "filled cache": ({"do_sample": False, CACHE: filled_cache()}, f"{CACHE}: expected none"),
    "batch": ({"do_sample": False, "ids": PROMPT.repeat(2, 1)}, "got \\[2, 5\\]"),
    "padding": ({"do_sample": False, "attention_mask": torch.tensor([[0, 1, 1, 1, 1]])}, "attention_mask"),
    "padding token": (
        {"do_sample": False, "pad_token_id": int(PROMPT[0, 1])},
        "attention_mask: expected all ones, got zeros: .* pass a mask of ones",
    ),
    "short mask": (
        {"do_sample": False, "attention_mask": torch.ones(1, 4, dtype=torch.int64)},
        "position_ids: expected 0, 1, ..., 4, .* got \\[1, 4\\].* attention_mask .* 5 ones",
    ),
    "positions": ({"do_sample": False, "position_ids": torch.arange(1, 6)[None]}, "position_ids"),
    "embeddings": ({"do_sample": False, "ids": None, "inputs_embeds": torch.zeros(1, 5, 32)}, "inputs_embeds: not"),
    "synced_gpus": ({"do_sample": False, "synced_gpus": True}, "synced_gpus=False"),
}
if not transformers.__version__.startswith("4."):
    # Version 4 itself replaces a static cache beside an assistant, and does not say whose an empty cache is.
    REFUSED |= {
        "static cache": ({"do_sample": False, "cache_implementation": "static"}, "cache_implementation='dynamic'"),
        "own cache": ({"do_sample": False, CACHE: transformers.DynamicCache()}, f"{CACHE}: expected none"),
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED)
def test_generate_refuses(target: Any, draft: Any, options: dict[str, Any], message: str) -> None:
    """Nothing that would change the text is ignored without a word."""
    with pytest.raises(InputError, match=message):
        generate(target, draft, max_new_tokens=4, **options)


def test_processes_in_step_are_refused_where_generate_chooses_them(
    target: Any, draft: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It passes a loop False whatever it has worked out, and processes that wait for one another would hang."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    sharded = copy.deepcopy(target)
    sharded._is_fsdp_managed_module = True
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 4}
    with pytest.raises(InputError, match=r"synced_gpus, which generate turns on by itself .* set synced_gpus=False"):
        generate(sharded, draft, **options)
    expected = generate(target, draft, **options)
    assert torch.equal(generate(sharded, draft, synced_gpus=False, **options), expected)


def test_assistant_model_is_required(target: Any) -> None:
    with pytest.raises(InputError, match="assistant_model"):
        target.generate(PROMPT, custom_generate=custom_generate(), do_sample=False, max_new_tokens=4)


def test_default_mask_of_ones_is_fine(target: Any, draft: Any) -> None:
    mask = torch.ones_like(PROMPT)
    assert generate(target, draft, attention_mask=mask, do_sample=False, max_new_tokens=4).shape == (1, 9)


@pytest.mark.parametrize("strategy", [5, None, AcceptanceStrategy])
def test_what_is_no_strategy_shows_at_once(strategy: Any) -> None:
    with pytest.raises(InputError, match=r"strategy: expected a name or what acceptlib\.create returns, got"):
        custom_generate(strategy)


@pytest.mark.parametrize("length", [-1, 2.5, None])
def test_what_is_no_length_shows_at_once(length: Any) -> None:
    with pytest.raises(InputError, match="num_draft_tokens: expected an int >= 0, got"):
        custom_generate(num_draft_tokens=length)


def test_what_is_no_function_shows_at_once() -> None:
    with pytest.raises(InputError, match="on_step: expected a function of a Step, or None, got 5"):
        custom_generate(on_step=5)  # type: ignore[arg-type]


def test_unknown_strategy_shows_at_once() -> None:
    with pytest.raises(UnknownStrategyError, match="rejection"):
        custom_generate("rejecton")


@pytest.mark.parametrize(
    ("ids", "max_new_tokens", "message"),
    [
        (PROMPT.repeat(2, 1), 4, "one sequence"),
        (PROMPT[0], 4, "one sequence"),
        (PROMPT[:, :0], 4, "n >= 1"),
        (PROMPT.float(), 4, "float32"),
        (PROMPT.tolist(), 4, "input_ids: expected a torch.Tensor, got list"),
        (PROMPT + 97, 4, r"expected ids in \[0, 97\), the target's vocabulary, got 100 to"),
        (PROMPT - 97, 4, r"expected ids in \[0, 97\), the target's vocabulary, got -94 to"),
        (PROMPT, -1, "max_new_tokens"),
        (PROMPT, 4.0, "max_new_tokens"),
    ],
)
def test_steps_refuses(target: Any, draft: Any, ids: Any, max_new_tokens: Any, message: str) -> None:
    """At the call, not at the first step."""
    with pytest.raises(InputError, match=message):
        SpeculativeDecoder(target=target, draft=draft).steps(ids, max_new_tokens)


@pytest.mark.parametrize("ends", [3, torch.tensor(3), "3", ["3"], [3.0], torch.tensor([3.0])])
def test_what_is_no_collection_of_ends(target: Any, draft: Any, ends: Any) -> None:
    with pytest.raises(InputError, match=r"eos_token_ids: expected a collection of ids, got .*3.*: pass ints"):
        SpeculativeDecoder(target=target, draft=draft).steps(PROMPT, 4, eos_token_ids=ends)


@pytest.mark.parametrize("kind", [set, torch.tensor, lambda ends: [torch.tensor(end) for end in ends]])
def test_ends_of_any_kind_of_integer(target: Any, draft: Any, kind: Callable[[list[int]], Any]) -> None:
    decoder = SpeculativeDecoder(target=target, draft=draft, sampling=GREEDY)
    text = [token for step in decoder.steps(PROMPT, 12) for token in step.token_ids]
    place = next(place for place in range(2, 12) if text[place] not in text[:place])
    cut = [token for step in decoder.steps(PROMPT, 12, kind([text[place], 96])) for token in step.token_ids]
    assert cut == text[: place + 1]


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("GPT2LMHeadModel", {}),  # an IndexError
        ("GPTJForCausalLM", {"rotary_dim": 4}),  # a RuntimeError
    ],
)
def test_more_tokens_than_learned_positions(family: str, options: dict[str, Any]) -> None:
    model = getattr(transformers, family)
    sizes = {"n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2, "eos_token_id": None} | options
    model = model(model.config_class(vocab_size=97, **sizes)).eval()
    steps = SpeculativeDecoder(target=model, draft=model, num_draft_tokens=2, rng=0).steps(PROMPT, 20)
    with pytest.raises(InputError, match=rf"{family} cannot run \d+ tokens .* positions for 8: give a shorter prompt"):
        list(steps)


def test_another_index_error_is_no_matter_of_positions(target: Any) -> None:
    broken = copy.deepcopy(target)
    broken.model.embed_tokens.weight = torch.nn.Parameter(broken.model.embed_tokens.weight[:2])
    with pytest.raises(IndexError):
        next(SpeculativeDecoder(target=broken, draft=target, sampling=GREEDY).steps(PROMPT, 4))


def test_another_runtime_error_is_no_matter_of_positions(target: Any) -> None:
    broken = copy.deepcopy(target)
    broken.lm_head.weight = torch.nn.Parameter(torch.zeros(97, 5))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        next(SpeculativeDecoder(target=broken, draft=target, sampling=GREEDY).steps(PROMPT, 4))


def test_a_model_that_keeps_no_cache_is_refused(target: Any) -> None:
    """It would see the newest tokens alone from the second step on."""
    config = transformers.OpenAIGPTConfig(vocab_size=97, n_positions=64, n_embd=8, n_layer=1, n_head=2)
    model = transformers.OpenAIGPTLMHeadModel(config).eval()
    for models in ((model, target), (target, model)):
        with pytest.raises(InputError, match=r"OpenAIGPTLMHeadModel leaves \w+ as it was"):
            next(SpeculativeDecoder(target=models[0], draft=models[1], sampling=GREEDY).steps(PROMPT, 4))


@pytest.mark.parametrize("damage", [b"short", None])
def test_a_damaged_model_is_a_clear_error(damage: bytes | None, tmp_path: Path) -> None:
    for file in Path(TARGET).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "model.safetensors").write_bytes(damage or (TARGET / "model.safetensors").read_bytes()[:100])
    with pytest.raises(InputError, match=r"target: .* cannot be loaded as a model folder"):
        load_pair(target=tmp_path)


def test_a_device_that_there_is_not() -> None:
    with pytest.raises(InputError, match="device 'foo'"):
        load_pair(device="foo")


def test_decoder_refuses(target: Any, draft: Any) -> None:
    with pytest.raises(InputError, match=r"sampling: expected SamplingParams, got \{'temperature': 1\}"):
        SpeculativeDecoder(target=target, draft=draft, sampling={"temperature": 1})  # type: ignore[arg-type]
    with pytest.raises(InputError, match="num_draft_tokens"):
        SpeculativeDecoder(target=target, draft=draft, num_draft_tokens=-1)
    with pytest.raises(InputError, match="draft: expected a transformers"):
        SpeculativeDecoder(target=target, draft=torch.nn.Linear(2, 2))
    with pytest.raises(InputError, match=r"target: .* encoder-decoder"):
        SpeculativeDecoder(target=fake_model(is_encoder_decoder=True), draft=draft)
    with pytest.raises(InputError, match="stateful"):
        SpeculativeDecoder(target=fake_model(stateful=True), draft=draft)
    with pytest.raises(InputError, match=r"attention layers.*linear_attention"):
        SpeculativeDecoder(target=fake_model(layer_types=["full_attention", "linear_attention"]), draft=draft)


SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("BertLMHeadModel", SMALL),
        ("BertGenerationDecoder", SMALL),
        ("ElectraForCausalLM", SMALL | {"embedding_size": 32}),
        ("RoFormerForCausalLM", SMALL),
        ("XLMWithLMHeadModel", {"vocab_size": 97, "emb_dim": 32, "n_layers": 1, "n_heads": 2}),
    ],
)
def test_encoders_are_refused(target: Any, name: str, sizes: dict[str, Any]) -> None:
    """The prompt would see the tokens drafted behind it, and say something else."""
    kind = getattr(transformers, name)
    with pytest.raises(
        InputError, match=rf"target: expected a causal model, got {name} as an encoder.*is_decoder=True"
    ):
        SpeculativeDecoder(target=kind(kind.config_class(**sizes)), draft=target)


@pytest.mark.parametrize("name", ["BertLMHeadModel", "GPTNeoXForCausalLM"])
def test_causal_models_are_not_taken_for_encoders(name: str) -> None:
    """BERT where it is told to be a decoder; the other's config says `is_decoder=False`, which it does not read."""
    kind = getattr(transformers, name)
    config = kind.config_class(**SMALL, eos_token_id=None, **({"is_decoder": True} if name.startswith("Bert") else {}))
    torch.manual_seed(0)
    model = kind(config).eval()
    assert config.is_decoder is name.startswith("Bert")
    expected = model.generate(PROMPT, do_sample=False, max_new_tokens=20)
    assert torch.equal(generate(model, perturbed(model, 0.02), do_sample=False, max_new_tokens=20), expected)


def paligemma() -> Any:
    vision = {
        "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 16, "patch_size": 8,
    }  # fmt: skip
    text = {"model_type": "gemma", "num_key_value_heads": 2, "head_dim": 16} | SMALL
    config = transformers.PaliGemmaConfig(text_config=text, vision_config=vision, projection_dim=32)
    return transformers.PaliGemmaForConditionalGeneration(config)


def test_models_that_attend_in_both_directions_are_refused(target: Any) -> None:
    config = transformers.Gemma3TextConfig(
        num_key_value_heads=2, head_dim=16, use_bidirectional_attention=True, **SMALL
    )
    gemma = transformers.Gemma3ForCausalLM(config)
    turned = copy.deepcopy(target)
    turned.config.is_causal = False
    for model in (paligemma(), gemma, turned):
        with pytest.raises(InputError, match=r"draft: expected a causal model, got \w+ with attention in both direct"):
            SpeculativeDecoder(target=target, draft=model)


@pytest.mark.parametrize("where", [None, False, "vision"])
def test_attention_in_both_directions_within_images_is_no_matter(target: Any, where: Any) -> None:
    model = copy.deepcopy(target)
    model.config.use_bidirectional_attention = where
    SpeculativeDecoder(target=model, draft=target)


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        (
            "MambaForCausalLM",
            {"num_hidden_layers": 1, "hidden_size": 32},
            "can be rolled back, got Mamba.* is stateful",
        ),
        (
            "T5ForConditionalGeneration",
            {"num_layers": 1, "d_model": 32, "decoder_start_token_id": 0},
            "got T5.* an encoder-de",
        ),
    ],
)
def test_models_are_checked_before_what_was_prepared_for_them(
    target: Any, name: str, sizes: dict[str, Any], message: str
) -> None:
    """A cache of states that cannot be asked for its length, or an encoder's outputs, which nobody passed."""
    kind = getattr(transformers, name)
    model = kind(kind.config_class(vocab_size=97, **sizes)).eval()
    loop = custom_generate(assistant_model=target)
    with pytest.raises(InputError, match=f"target: expected .*{message}"):
        model.generate(PROMPT, custom_generate=loop, do_sample=False, max_new_tokens=4)


def fake_model(*, stateful: bool = False, **config: Any) -> Any:
    model = torch.nn.Module()
    model.config = transformers.PretrainedConfig(**config)
    model._is_stateful = stateful
    return model


def test_rows_without_a_law_are_reported(target: Any) -> None:
    broken = copy.deepcopy(target)
    with torch.no_grad():
        broken.lm_head.weight.fill_(torch.nan)
    decoder = SpeculativeDecoder(target=broken, draft=target, sampling=GREEDY)
    with pytest.raises(acceptlib.AcceptlibError, match="NaN"):
        next(decoder.steps(PROMPT, 4))


def test_a_draft_without_a_law_is_reported(target: Any) -> None:
    """`verify` takes NaN in the draft's rows for 0, and would accept whatever was drafted."""
    broken = copy.deepcopy(target)
    with torch.no_grad():
        broken.lm_head.weight.fill_(torch.nan)
    decoder = SpeculativeDecoder(target=target, draft=broken, num_draft_tokens=2, rng=0)
    with pytest.raises(StatusError, match="the draft's row at drafted position 0 has no law"):
        next(decoder.steps(PROMPT, 4))


def test_a_stream_that_stays_is_refused(target: Any, draft: Any) -> None:
    """Every step would use the same numbers."""
    rng = Rng(seeds=torch.zeros(1, dtype=torch.int64), offsets=torch.zeros(1, dtype=torch.int64), advances=False)
    with pytest.raises(InputError, match="rng: expected an Rng that advances"):
        SpeculativeDecoder(target=target, draft=draft, rng=rng)


# The pair


def test_bundled_pair(pair: ModelPair) -> None:
    assert not pair.target.training
    assert not pair.draft.training
    assert {weight.dtype for model in (pair.target, pair.draft) for weight in model.parameters()} == {torch.float32}
    assert pair.draft.num_parameters() < pair.target.num_parameters()
    assert pair.tokenizer.decode(pair.tokenizer("def f(x):\n").input_ids) == "def f(x):\n"


@pytest.mark.parametrize("name", ["no/such/folder", "./folder", "/folder"])
def test_missing_folder(name: str) -> None:
    with pytest.raises(InputError, match=r"draft: expected a model folder, got .* does not exist"):
        load_pair(draft=name)


def test_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"target: .* cannot be loaded as a model folder"):
        load_pair(str(tmp_path))


def test_different_vocabularies(tmp_path: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(DRAFT, local_files_only=True)
    tokenizer.add_tokens(["<a-token-of-its-own>"])
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="differ in 1 entries"):
        load_pair(str(TARGET), tmp_path)


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match=r"pip install acceptlib\[hf\]"):
        load_pair()


def test_transformers_is_imported_when_needed() -> None:
    code = (
        "import sys, acceptlib, acceptlib.demo.pair, acceptlib.integrations.transformers\n"
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)  # noqa: S603 - our own interpreter
