"""What is refused with transformers models: arguments, models, folders, and what looks like those but is fine."""

from __future__ import annotations

import copy
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
import transformers
from transformers_support import GREEDY, PROMPT, generate, perturbed

import acceptlib
from acceptlib import AcceptanceStrategy
from acceptlib.demo import DRAFT, TARGET
from acceptlib.demo.pair import load_pair
from acceptlib.errors import (
    InputError,
    MissingPackageError,
    StatusError,
    StrategyDefinitionError,
    UnknownStrategyError,
)
from acceptlib.integrations import transformers as integration
from acceptlib.integrations.transformers import SpeculativeDecoder, custom_generate
from acceptlib.rng import Rng
from acceptlib.sampling import SamplingParams

CACHE = next(
    name for name in integration.CACHES if name in inspect.signature(transformers.LlamaForCausalLM.forward).parameters
)
"""What this version of transformers calls a cache."""


# Generation


class Guided(transformers.UnbatchedClassifierFreeGuidanceLogitsProcessor):
    """A caller's own kind of a processor that keeps a state."""


def test_a_processor_derived_from_one_with_a_state(target: Any, draft: Any) -> None:
    with pytest.raises(InputError, match="guidance_scale=None"):
        generate(target, draft, logits_processor=[Guided(1.5, target)], do_sample=False, max_new_tokens=4)


@pytest.mark.parametrize(("kind", "remedy"), integration.STATEFUL.items())
def test_processors_with_a_state_are_refused(kind: str, remedy: str) -> None:
    assert {"UnbatchedClassifierFreeGuidanceLogitsProcessor", "SynthIDTextWatermarkLogitsProcessor"} <= {
        *integration.STATEFUL
    }
    assert hasattr(transformers, kind)
    with pytest.raises(InputError, match=f"^{remedy.partition('=')[0]} is not supported .* set {remedy} in"):
        integration._split([type(kind, (), {})()])


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
        "attention_mask: expected ones, \\[1, 5\\], got zeros: .* pass a mask of ones",
    ),
    "short mask": (
        {"do_sample": False, "attention_mask": torch.ones(1, 4, dtype=torch.int64)},
        # Version 4 passes the mask on; later ones make positions of it.
        (
            "attention_mask: expected ones, \\[1, 5\\], got \\[1, 4\\]: .* pass a mask of ones"
            "|position_ids: expected 0, 1, ..., 4, .* got \\[1, 4\\].* attention_mask .* 5 ones"
        ),
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


OTHER_MODES = {
    "num_beams": (2, 1),
    "num_return_sequences": (2, 1),
    "penalty_alpha": (0.6, 0),
    "dola_layers": ("low", None),
    "constraints": ([()], None),
    "force_words_ids": ([[5]], None),
    "prompt_lookup_num_tokens": (2, None),
    "assistant_early_exit": (1, None),
    "assistant_ensemble_weight": (0.5, None),
    "use_mtp": (True, False),
    "speculation_type": ("mtp", None),
    "cache_implementation": ("static", "dynamic"),
    "prefill_chunk_size": (2, None),
}
"""Parameters by name: a value that asks for another decoding mode, and what turns it off."""


def test_mappings_and_caches_that_hold_something_are_refused() -> None:
    """Of either kind `generate` itself passes an empty one."""
    for name in integration.CACHES:
        integration._check_inputs(PROMPT, {name: SimpleNamespace(get_seq_length=lambda: 0), "images": {}})
        with pytest.raises(InputError, match=f"{name}: expected none"):
            integration._check_inputs(PROMPT, {name: SimpleNamespace(get_seq_length=lambda: 5)})
    with pytest.raises(InputError, match="images: not supported"):
        integration._check_inputs(PROMPT, {"images": {"pixels": 1}})


def test_a_mask_of_another_length_is_refused() -> None:
    with pytest.raises(InputError, match=r"attention_mask: expected ones, \[1, 5\], got \[1, 3\]"):
        integration._check_inputs(PROMPT, {"attention_mask": torch.ones(1, 3)})


def test_who_asks_for_an_ensemble_alone_hears_of_the_rule_that_has_its_law() -> None:
    config = SimpleNamespace(assistant_ensemble_weight=0.5, return_dict_in_generate=False)
    with pytest.raises(InputError, match=r"assistant_ensemble_weight=0\.5 is not supported .* 'mixture' has the same"):
        integration._check_config(config)
    beams = SimpleNamespace(num_beams=2, return_dict_in_generate=False)
    with pytest.raises(InputError, match=r"num_beams=2 is not supported by custom_generate: set num_beams=1\.$"):
        integration._check_config(beams)


def test_every_other_mode_is_known() -> None:
    assert OTHER_MODES.keys() == integration.OTHER_MODES.keys()


@pytest.mark.parametrize(("name", "values"), OTHER_MODES.items())
def test_other_modes_are_refused(name: str, values: tuple[Any, Any]) -> None:
    """Also those that this version of `generate` would not leave to a loop, and never when they are turned off."""
    asks, off = values
    message = f"{name}={asks!r} is not supported by custom_generate: set {name}={off!r}."
    with pytest.raises(InputError, match=re.escape(message)):
        integration._check_config(SimpleNamespace(return_dict_in_generate=False, **{name: asks}))
    for value in (None, off):
        integration._check_config(SimpleNamespace(return_dict_in_generate=False, **{name: value}))  # or raises


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
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)  # a process alone waits for none
    assert torch.equal(generate(sharded, draft, **options), expected)


def test_processes_in_step_for_zero_3_are_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    for enabled in (False, True):
        monkeypatch.setattr(transformers.integrations, "is_deepspeed_zero3_enabled", lambda enabled=enabled: enabled)
        assert integration._is_sharded(torch.nn.Identity()) is enabled


def test_assistant_model_is_required(target: Any) -> None:
    with pytest.raises(InputError, match="assistant_model"):
        target.generate(PROMPT, custom_generate=custom_generate(), do_sample=False, max_new_tokens=4)


def test_drafts_without_a_model_are_refused_as_such(target: Any) -> None:
    """Who asks for them has no assistant to pass."""
    with pytest.raises(InputError, match=r"prompt_lookup_num_tokens=2 is not .* prompt_lookup_num_tokens=None"):
        generate(target, None, do_sample=False, max_new_tokens=4, prompt_lookup_num_tokens=2)


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention", "chunked_attention"])
def test_every_kind_of_attention_can_be_rolled_back(target: Any, draft: Any, kind: str) -> None:
    layered = copy.deepcopy(target)
    layered.config.layer_types = [kind] * 2
    SpeculativeDecoder(target=layered, draft=draft)  # or raises


def test_default_mask_of_ones_is_fine(target: Any, draft: Any) -> None:
    mask = torch.ones_like(PROMPT)
    assert generate(target, draft, attention_mask=mask, do_sample=False, max_new_tokens=4).shape == (1, 9)


@pytest.mark.parametrize("strategy", [5, None, AcceptanceStrategy])
def test_what_is_no_strategy_shows_at_once(strategy: Any) -> None:
    with pytest.raises(InputError, match=r"strategy: expected a name or what acceptlib\.create returns, got"):
        custom_generate(strategy)


@pytest.mark.parametrize("length", [-1, 0, 2.5, None, True])
def test_what_is_no_length_shows_at_once(length: Any) -> None:
    with pytest.raises(InputError, match="num_draft_tokens: expected an int >= 1, got"):
        custom_generate(num_draft_tokens=length)


def test_what_is_no_function_shows_at_once() -> None:
    with pytest.raises(InputError, match="on_step: expected a function of a Step, or None, got 5"):
        custom_generate(on_step=5)  # type: ignore[arg-type]
    for seed in ("a", True):
        with pytest.raises(InputError, match=f"seed: expected an int or None, got {seed!r}"):
            custom_generate(seed=seed)  # type: ignore[arg-type]
    custom_generate(seed=np.int64(3))  # as `Rng.of` takes it


def test_unknown_strategy_shows_at_once() -> None:
    with pytest.raises(UnknownStrategyError, match="rejection"):
        custom_generate("rejecton")


@pytest.mark.parametrize(
    ("ids", "max_new_tokens", "message"),
    [
        (PROMPT.repeat(2, 1), 4, "one sequence"),
        (PROMPT[0], 4, "one sequence"),
        (PROMPT[None], 4, r"one sequence at a time, got \[1, 1, 5\]"),
        (PROMPT[:, :0], 4, "n >= 1"),
        (PROMPT.float(), 4, "float32"),
        (PROMPT.short(), 4, "int16"),
        (PROMPT > 0, 4, "bool"),
        (PROMPT.tolist(), 4, "input_ids: expected a torch.Tensor, got list"),
        (PROMPT + 97, 4, r"expected ids in \[0, 97\), the target's vocabulary, got 100 to"),
        (PROMPT - 97, 4, r"expected ids in \[0, 97\), the target's vocabulary, got -94 to"),
        (PROMPT + 9, 4, r"expected ids in \[0, 97\), the target's vocabulary, got 12 to 97"),
        (PROMPT, -1, "max_new_tokens"),
        (PROMPT, 4.0, "max_new_tokens"),
        (PROMPT, True, "max_new_tokens"),
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


def test_a_runtime_error_at_the_last_position_is_no_matter_of_positions(target: Any) -> None:
    broken = copy.deepcopy(target)
    broken.lm_head.weight = torch.nn.Parameter(torch.zeros(97, 5))
    broken.config.max_position_embeddings = PROMPT.shape[1]
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        next(SpeculativeDecoder(target=target, draft=broken, sampling=GREEDY).steps(PROMPT, 4))


def test_a_runtime_error_beyond_the_positions_says_how_many_there_are(target: Any) -> None:
    """Which kind a model raises depends on the version of transformers."""
    broken = copy.deepcopy(target)
    broken.lm_head.weight = torch.nn.Parameter(torch.zeros(97, 5))
    broken.config.max_position_embeddings = PROMPT.shape[1] - 1
    with pytest.raises(InputError, match=r"cannot run \d+ tokens \(.*shapes cannot be multiplied.* positions for 4"):
        next(SpeculativeDecoder(target=broken, draft=target, sampling=GREEDY).steps(PROMPT, 4))
    broken.config.max_position_embeddings, broken.config.max_seq_len = 0, 3  # as others call it
    with pytest.raises(InputError, match="positions for 3"):
        next(SpeculativeDecoder(target=broken, draft=target, sampling=GREEDY).steps(PROMPT, 4))


def test_what_a_verify_of_its_own_returns_is_a_result(target: Any, draft: Any) -> None:
    class Lists(AcceptanceStrategy):
        name = "lists"
        traits = acceptlib.Traits(guarantee="lossy", bound="none")

        def verify(self, *_: Any, **__: Any) -> Any:
            return [[1]]

    with pytest.raises(StrategyDefinitionError, match=r"'lists': verify returned \[\[1\]\], no VerifyResult"):
        next(SpeculativeDecoder(target=target, draft=draft, strategy=Lists()).steps(PROMPT, 4))


def test_a_model_that_keeps_no_cache_is_refused(target: Any) -> None:
    """It would see the newest tokens alone from the second step on."""
    config = transformers.OpenAIGPTConfig(vocab_size=97, n_positions=64, n_embd=8, n_layer=1, n_head=2)
    model = transformers.OpenAIGPTLMHeadModel(config).eval()
    for models in ((model, target), (target, model)):
        with pytest.raises(InputError, match=r"OpenAIGPTLMHeadModel leaves \w+ as it was"):
            next(SpeculativeDecoder(target=models[0], draft=models[1], sampling=GREEDY).steps(PROMPT, 4))


def test_decoder_refuses(target: Any, draft: Any) -> None:
    for name in ("sampling", "draft_sampling"):
        options: dict[str, Any] = {name: {"temperature": 1}}
        with pytest.raises(InputError, match=rf"^{name}: expected SamplingParams, got \{{'temperature': 1\}}"):
            SpeculativeDecoder(target=target, draft=draft, **options)
    with pytest.raises(InputError, match="num_draft_tokens"):
        SpeculativeDecoder(target=target, draft=draft, num_draft_tokens=-1)
    with pytest.raises(InputError, match="draft: expected a transformers"):
        SpeculativeDecoder(target=target, draft=torch.nn.Linear(2, 2))
    other = torch.nn.Linear(2, 2)
    other.config = {"vocab_size": 97}  # type: ignore[assignment]
    with pytest.raises(InputError, match="draft: expected a transformers causal language model, got Linear"):
        SpeculativeDecoder(target=target, draft=other)
    with pytest.raises(InputError, match=r"target: .* encoder-decoder"):
        SpeculativeDecoder(target=fake_model(is_encoder_decoder=True), draft=draft)
    with pytest.raises(InputError, match="stateful"):
        SpeculativeDecoder(target=fake_model(stateful=True), draft=draft)
    kinds = ["full_attention", "linear_attention", "conv"]
    with pytest.raises(InputError, match=r"attention layers.* with conv, linear_attention$"):
        SpeculativeDecoder(target=fake_model(layer_types=kinds), draft=draft)
    beside_images = fake_model(text_config=transformers.PretrainedConfig(layer_types=kinds[:2]))
    with pytest.raises(InputError, match=r"attention layers.* with linear_attention$"):
        SpeculativeDecoder(target=beside_images, draft=draft)


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


@pytest.mark.parametrize("name", ["sampling", "draft_sampling"])
def test_a_mask_is_refused(target: Any, draft: Any, name: str) -> None:
    mask = torch.full((1, 4), -1, dtype=torch.int32)
    options: dict[str, Any] = {name: SamplingParams(allowed_token_bitmask=mask)}
    with pytest.raises(InputError, match=rf"^{name}\.allowed_token_bitmask"):
        SpeculativeDecoder(target=target, draft=draft, **options)


# The pair


@pytest.mark.parametrize("name", ["no/such/folder", "./folder", "/folder"])
def test_missing_folder(name: str) -> None:
    with pytest.raises(InputError, match=r"draft: expected a model folder, got .* does not exist"):
        load_pair(draft=name)


def test_a_name_that_the_hub_does_not_give(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        InputError, match=r"'nope' cannot be loaded .* hub, and .* \(a local one is written \./nope\): \w+"
    ):
        load_pair("nope")


def test_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"target: expected a model folder, .* has no config\.json"):
        load_pair(str(tmp_path))


def test_different_vocabularies(tmp_path: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(DRAFT, local_files_only=True)
    tokenizer.add_tokens(["<a-token-of-its-own>"])
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_bytes((DRAFT / "config.json").read_bytes())
    with pytest.raises(InputError, match="differ in 1 entries"):
        load_pair(str(TARGET), tmp_path)


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'acceptlib\[hf\]'"):
        load_pair()


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
