"""Generation with transformers models: the target's greedy text, where it ends, and the steps behind it."""

from __future__ import annotations

import functools
import itertools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformers_support import GREEDY, PROMPT, generate, make_model, perturbed

import acceptlib
from acceptlib.demo import prompts
from acceptlib.demo.pair import ModelPair
from acceptlib.errors import InputError
from acceptlib.integrations.transformers import SpeculativeDecoder, Step, custom_generate
from acceptlib.sampling import SamplingParams

Texts = list[tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture(scope="module")
def greedy_texts(pair: ModelPair) -> Texts:
    """Three prompts and what the target alone makes of them, 300 tokens each."""
    encoded = [pair.tokenizer(text, return_tensors="pt").input_ids for text in prompts()[:3]]
    return [(ids, pair.target.generate(ids, do_sample=False, max_new_tokens=300, eos_token_id=None)) for ids in encoded]


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


@pytest.mark.parametrize("num_draft_tokens", [1, 3, 8])
@pytest.mark.parametrize("strategy", ["greedy", "rejection", "block"])
def test_greedy_text_is_the_targets(target: Any, draft: Any, strategy: str, num_draft_tokens: int) -> None:
    expected = target.generate(PROMPT, do_sample=False, max_new_tokens=60)
    loop = {"num_draft_tokens": num_draft_tokens}
    text = generate(target, draft, strategy=strategy, loop=loop, do_sample=False, max_new_tokens=60)
    assert text.dtype == torch.int64
    assert torch.equal(text, expected)


def test_a_prompt_of_int32_makes_a_text_of_int64(target: Any, draft: Any) -> None:
    text = generate(target, draft, ids=PROMPT.int(), do_sample=False, max_new_tokens=8)
    assert text.dtype == torch.int64
    assert torch.equal(text, target.generate(PROMPT, do_sample=False, max_new_tokens=8))


def test_nothing_drafted_is_the_target_alone(target: Any, draft: Any) -> None:
    decoder = SpeculativeDecoder(target=target, draft=draft, num_draft_tokens=0, sampling=GREEDY)
    tokens = [token for step in decoder.steps(PROMPT, 12) for token in step.token_ids]
    assert tokens == target.generate(PROMPT, do_sample=False, max_new_tokens=12)[0, PROMPT.shape[1] :].tolist()


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


def test_memory_grows_with_the_text(target: Any, draft: Any) -> None:
    """Until an end of sequence, however many tokens that may take."""
    few, many = (
        list(itertools.islice(SpeculativeDecoder(target=target, draft=draft, rng=0).steps(PROMPT, most), 12))
        for most in (100, 10**12)
    )
    assert [step.token_ids for step in many] == [step.token_ids for step in few]


class StopAtLength(transformers.StoppingCriteria):
    """Stop at a length, or as soon as there is a new token."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: Any) -> torch.Tensor:  # noqa: ARG002
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.length, dtype=torch.bool)


@pytest.mark.parametrize("length", [5, 9, 11, 12])
def test_stopping_criteria_within_a_chain(target: Any, length: int) -> None:
    """At each end of one too: the prompt has 5 tokens, and a step makes 6 of which all stand."""
    criteria = transformers.StoppingCriteriaList([StopAtLength(length)])
    expected = target.generate(PROMPT, do_sample=False, max_new_tokens=30, stopping_criteria=criteria)
    assert expected.shape[1] == max(length, 6)
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
        assert not step.target_logits.requires_grad  # each step would keep its graph, and the caches theirs
        assert not step.draft_probs.requires_grad


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


def test_the_draft_that_generate_is_given_comes_before_a_bound_one(target: Any, draft: Any) -> None:
    loop = custom_generate("greedy", assistant_model=torch.nn.Linear(2, 2))  # no model to draft with
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 10}
    text = target.generate(PROMPT, custom_generate=loop, assistant_model=draft, **options)
    assert torch.equal(text, target.generate(PROMPT, **options))


def test_what_a_loop_is_handed_is_used(target: Any, draft: Any) -> None:
    """As a version of `generate` may do that keeps back neither the assistant nor the streamer."""
    streamer, config = Collector(), transformers.GenerationConfig(do_sample=False, max_length=9)
    given: dict[str, Any] = {"generation_config": config, "assistant_model": draft}
    text = custom_generate("greedy")(target, PROMPT, streamer=streamer, **given)
    assert torch.equal(text, target.generate(PROMPT, do_sample=False, max_length=9))
    assert streamer.tokens == text[0, PROMPT.shape[1] :].tolist()
    with pytest.raises(InputError, match="synced_gpus"):
        custom_generate("greedy")(target, PROMPT, synced_gpus=True, **given)
    config.max_length = PROMPT.shape[1] - 1  # reached already
    assert torch.equal(custom_generate("greedy")(target, PROMPT, **given), PROMPT)


def test_rejection_is_the_rule_unless_another_is_named(target: Any, draft: Any) -> None:
    texts = [
        target.generate(PROMPT, custom_generate=loop, assistant_model=draft, do_sample=True, max_new_tokens=20)
        for loop in (custom_generate(seed=3), custom_generate("rejection", seed=3), custom_generate("greedy", seed=3))
    ]
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])


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


# The pair


def test_bundled_pair(pair: ModelPair) -> None:
    assert not pair.target.training
    assert not pair.draft.training
    assert {weight.dtype for model in (pair.target, pair.draft) for weight in model.parameters()} == {torch.float32}
    assert pair.draft.num_parameters() < pair.target.num_parameters()
    assert pair.tokenizer.decode(pair.tokenizer("def f(x):\n").input_ids) == "def f(x):\n"


def test_transformers_is_imported_when_needed() -> None:
    code = (
        "import sys, acceptlib, acceptlib.demo.pair, acceptlib.integrations.transformers\n"
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)  # noqa: S603 - our own interpreter
