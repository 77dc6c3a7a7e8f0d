"""Speculative decoding behind Hugging Face transformers' `generate`, with any acceptance strategy.

`custom_generate` is a decoding loop for it; `SpeculativeDecoder`, what it runs, gives every step.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from numbers import Integral
from typing import Any, Final

import torch

from acceptlib.errors import InputError, expect_int, short_repr
from acceptlib.integrations.decoder import (
    LogitsProcessor,
    SpeculativeDecoder,
    Step,
    import_transformers,
)
from acceptlib.registry import as_strategy
from acceptlib.sampling import SamplingParams
from acceptlib.strategy import AcceptanceStrategy

__all__ = ["SpeculativeDecoder", "Step", "custom_generate"]

STATEFUL: Final = {
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "guidance_scale=None",
    "SynthIDTextWatermarkLogitsProcessor": "watermarking_config=None",
}
"""Logits processors that keep a state from token to token, which a rejection cannot take back; what turns them off."""

WARPERS: Final = {
    "TemperatureLogitsWarper": "temperature",
    "TopKLogitsWarper": "top_k",
    "TopPLogitsWarper": "top_p",
    "MinPLogitsWarper": "min_p",
}
"""Logits processors that `SamplingParams` stands for, in its order; each has an attribute of the parameter's name."""

OTHER_MODES: Final = {
    "num_beams": (None, 0, 1),
    "num_return_sequences": (None, 0, 1),
    "penalty_alpha": (None, 0),
    "dola_layers": (None,),
    "constraints": (None,),
    "force_words_ids": (None,),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "assistant_ensemble_weight": (None,),
    "use_mtp": (None, False),
    "speculation_type": (None,),
    "cache_implementation": (None, "dynamic"),
    "prefill_chunk_size": (None,),
}
"""Parameters of `generate` that ask for another decoding mode, with the values that do not; the last turns it off."""

EXTRA_OUTPUTS: Final = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")

CACHES: Final = ("cache", "past_key_values")
"""What models and `generate` call a cache, since transformers 5.24 and before."""

# What `generate` itself adds to the arguments of a decoding loop; anything else came from the caller. Extra outputs do
# not matter, because the text is returned alone.
PREPARED: Final = {
    *("attention_mask", "position_ids", "cache_position", *CACHES, "use_cache", "logits_to_keep"),
    *EXTRA_OUTPUTS,
}


def custom_generate(
    strategy: str | AcceptanceStrategy = "rejection",
    *,
    num_draft_tokens: int = 5,
    seed: int | None = None,
    on_step: Callable[[Step], object] | None = None,
    assistant_model: Any = None,
) -> Callable[..., Any]:
    """Return a decoding loop for `model.generate`.

    ```python
    model.generate(**inputs, assistant_model=draft, custom_generate=custom_generate("block"), max_new_tokens=100)
    ```

    Supported are `do_sample` with `temperature`, `top_k` (50 unless given), `top_p` and `min_p`, applied by `verify`,
    or as processors where `generate` has another one behind them; every other logits processor, of `generate`'s
    parameters or the caller's, that keeps no state; the length limits, end-of-sequence tokens, `stopping_criteria` and
    `streamer`; one sequence at a time. Other decoding modes are errors. Parameters of transformers' own assisted
    generation (`num_assistant_tokens` and its kin) have no effect; `num_draft_tokens` is the one here. `generate` drops
    `tokenizer` and `assistant_tokenizer` before it calls a loop: both models must have one tokenizer, and
    `stop_strings` are passed as a `StopStringCriteria`.

    Args:
        strategy: A name for `acceptlib.create`, or a strategy.
        num_draft_tokens: K, drafted tokens a step, at least 1.
        seed: Makes the text reproducible. None takes one from torch's default generator at each call.
        on_step: Called with every `Step`.
        assistant_model: The draft, for wrappers of `generate` that have no such argument; `generate`'s own wins.

    Returns:
        A callable for `generate(custom_generate=...)`. `generate` then returns [1, n + new] int64, or a
        `GenerateDecoderOnlyOutput` with `sequences` alone if `return_dict_in_generate` is set. It raises `InputError`
        for what is not supported, naming the parameter.
    """
    bound_assistant = assistant_model
    # Here rather than at the first `generate`, so that a misspelt name shows at once.
    chosen = as_strategy(strategy)
    expect_int("num_draft_tokens", num_draft_tokens, least=1)
    if isinstance(seed, bool) or not (seed is None or isinstance(seed, Integral)):  # NumPy's too
        msg = f"seed: expected an int or None, got {short_repr(seed)}"
        raise InputError(msg)
    if on_step is not None and not callable(on_step):
        msg = f"on_step: expected a function of a Step, or None, got {short_repr(on_step)}"
        raise InputError(msg)

    def decode(  # noqa: PLR0913, PLR0917 - the signature that `generate` calls
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        generation_config: Any = None,
        synced_gpus: bool = False,  # noqa: FBT001, FBT002 - as `generate` passes it
        streamer: Any = None,
        assistant_model: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        passed = _arguments_of_generate(model)
        draft = next(
            (m for m in (assistant_model, passed.get("assistant_model"), bound_assistant) if m is not None), None
        )
        streamer = passed.get("streamer") if streamer is None else streamer
        if draft is None:
            _check_config(generation_config)  # it may ask for drafts without a model: that is what to turn off
            msg = "assistant_model: expected the draft model, got None: pass it to generate beside custom_generate"
            raise InputError(msg)
        synced = passed.get("synced_gpus", synced_gpus)
        if _is_sharded(model) if synced is None else synced:
            msg = (
                "synced_gpus, which generate turns on by itself for a model split by FSDP or DeepSpeed ZeRO-3, is not "
                "supported by custom_generate: set synced_gpus=False, and give every process one prompt and seed"
            )
            raise InputError(msg)
        processors, sampling = _split(list(logits_processor or ()))
        if processors and input_ids.device != model.device:
            processors = [_run_on(input_ids.device, processors)]
        # The models are checked here, before what `generate` has prepared for them, such as a cache of another kind.
        decoder = SpeculativeDecoder(
            target=model,
            draft=draft,
            strategy=chosen,
            num_draft_tokens=num_draft_tokens,
            sampling=sampling if generation_config.do_sample else SamplingParams(temperature=0.0),
            logits_processors=processors,
            rng=seed,
        )
        _check_config(generation_config)
        _check_inputs(input_ids, model_kwargs)
        sequences = _generate(decoder, input_ids, generation_config, stopping_criteria or (), streamer, on_step)
        if generation_config.return_dict_in_generate:
            return import_transformers().generation.GenerateDecoderOnlyOutput(sequences=sequences)
        return sequences

    return decode


def _generate(
    decoder: SpeculativeDecoder,
    input_ids: torch.Tensor,
    generation_config: Any,
    stopping_criteria: Any,
    streamer: Any,
    on_step: Callable[[Step], object] | None,
) -> torch.Tensor:
    """Decode until a criterion says stop; return [1, n + new] int64."""
    eos = getattr(generation_config, "_eos_token_tensor", None)
    eos_token_ids = () if eos is None else eos.tolist()
    sequences = input_ids.to(torch.int64)
    for step in decoder.steps(input_ids, max(generation_config.max_length - input_ids.shape[1], 0), eos_token_ids):
        if on_step is not None:
            on_step(step)
        start = sequences.shape[1]
        sequences = torch.cat((sequences, sequences.new_tensor(step.token_ids)[None]), 1)
        # Criteria read the last token, so they are asked after each, as in decoding one by one.
        lengths = range(start + 1, sequences.shape[1] + 1)
        stop = next(
            (n for n in lengths if stopping_criteria and bool(stopping_criteria(sequences[:, :n], None).all())), None
        )
        sequences = sequences[:, :stop]
        if streamer is not None:
            streamer.put(sequences[:, start:].cpu())
        if stop is not None:
            break
    if streamer is not None:
        streamer.end()
    return sequences


def _arguments_of_generate(model: Any) -> dict[str, Any]:
    """Return what was passed to the `model.generate` call that runs a loop, or nothing.

    transformers (4.57 to 5.24 at least) hands a callable `custom_generate` neither `assistant_model` nor `streamer`,
    although `generate` accepts both beside it. Reading them where they were passed is the only way not to lose them
    without a word. The callable there may be a wrapper of the loop, so the call is recognised by its model.
    """
    frame = sys._getframe(1)  # noqa: SLF001
    while frame is not None:
        if frame.f_code.co_name == "generate":
            found = frame.f_locals
            if found.get("self") is model and callable(found.get("custom_generate")):
                return {name: found.get(name) for name in ("assistant_model", "streamer", "synced_gpus")}
        frame = frame.f_back  # type: ignore[assignment]
    return {}


def _is_sharded(model: Any) -> bool:
    """Return whether all processes must run: what `generate` takes `synced_gpus=None` for, without telling a loop."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
        return False
    integrations = import_transformers().integrations
    return bool(integrations.is_deepspeed_zero3_enabled() or integrations.is_fsdp_managed_module(model))


def _check_config(generation_config: Any) -> None:
    """Raise `InputError` for a parameter of `generate` that this loop would not follow."""
    for name, neutral in OTHER_MODES.items():
        value = getattr(generation_config, name, None)
        if value not in neutral:
            hint = " The strategy 'mixture' has the same law." if name == "assistant_ensemble_weight" else ""
            msg = f"{name}={value!r} is not supported by custom_generate: set {name}={neutral[-1]!r}.{hint}"
            raise InputError(msg)
    for name in EXTRA_OUTPUTS if generation_config.return_dict_in_generate else ():
        if getattr(generation_config, name, None):
            msg = f"{name} is not supported by custom_generate: set {name}=False. `on_step` receives each step's rows."
            raise InputError(msg)


def _check_inputs(input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> None:
    """Raise `InputError` unless the prompt is one sequence of tokens and nothing else."""
    if input_ids.ndim != 2 or input_ids.shape[0] != 1:  # noqa: PLR2004
        msg = f"input_ids: expected one sequence, [1, n], got {list(input_ids.shape)}. Generate sequences one by one."
        raise InputError(msg)
    # `generate` itself passes an empty mapping to models that take images too.
    absent = {name for name, value in model_kwargs.items() if value is None or (isinstance(value, dict) and not value)}
    unknown = sorted(model_kwargs.keys() - absent - PREPARED)
    if unknown:
        msg = f"{', '.join(unknown)}: not supported by custom_generate, which takes text prompts as input_ids alone"
        raise InputError(msg)
    if model_kwargs.get("use_cache") is False:
        msg = "use_cache=False is not supported: speculative decoding keeps its caches, set use_cache=True"
        raise InputError(msg)
    for name in CACHES:
        cache = model_kwargs.get(name)
        if cache is not None and (getattr(cache, "_is_user_defined", False) or cache.get_seq_length() > 0):
            msg = f"{name}: expected none, the decoder keeps its own caches: leave it out and pass the whole prompt"
            raise InputError(msg)
    attention_mask = model_kwargs.get("attention_mask")
    if attention_mask is not None:
        fits = attention_mask.shape == input_ids.shape
        if not (fits and bool((attention_mask == 1).all())):
            # `generate` makes a mask of its own where the prompt has padding tokens.
            wanted, found = list(input_ids.shape), "zeros" if fits else list(attention_mask.shape)
            msg = (
                f"attention_mask: expected ones, {wanted}, got {found}: remove the padding from input_ids, or pass a "
                "mask of ones"
            )
            raise InputError(msg)
    position_ids = model_kwargs.get("position_ids")
    if position_ids is not None:
        length = input_ids.shape[1]
        expected = torch.arange(length, device=position_ids.device)
        if position_ids.shape[-1] != length or not bool((position_ids == expected).all()):
            # `generate` makes them from the mask where there is one.
            msg = (
                f"position_ids: expected 0, 1, ..., {length - 1}, as without them, got {list(position_ids.shape)}: "
                f"leave them out, and attention_mask too or give it {length} ones"
            )
            raise InputError(msg)


def _split(processors: list[Any]) -> tuple[list[Any], SamplingParams]:
    """Split `generate`'s logits processors: those at the end become sampling parameters, those before them stay."""
    for processor in processors:
        remedy = next(filter(None, (STATEFUL.get(kind.__name__) for kind in type(processor).__mro__)), None)
        if remedy is not None:
            parameter = remedy.split("=", maxsplit=1)[0]
            msg = f"{parameter} is not supported by custom_generate: set {remedy} in generate or in the model's config"
            raise InputError(msg)
    found: dict[str, Any] = {}
    left = list(WARPERS)
    while processors and (name := type(processors[-1]).__name__) in left and _is_plain(processors[-1]):
        found[WARPERS[name]] = getattr(processors[-1], WARPERS[name])
        left = left[: left.index(name)]
        processors = processors[:-1]
    return processors, SamplingParams(**found)


def _run_on(device: torch.device, processors: list[Any]) -> LogitsProcessor:
    """Return a logits processor that runs others on the prompt's device, for which `generate` has built them."""

    def process(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        placed = scores.to(device)
        for processor in processors:
            placed = processor(input_ids.to(device), placed)
        return placed.to(scores.device)

    return process


def _is_plain(warper: Any) -> bool:
    """Return whether a warper filters to -inf, need not keep more than one token, and keeps some mass."""
    usual = {"filter_value": -math.inf, "min_tokens_to_keep": 1}
    return getattr(warper, "top_p", 1) > 0 and all(
        getattr(warper, name, value) == value for name, value in usual.items()
    )
