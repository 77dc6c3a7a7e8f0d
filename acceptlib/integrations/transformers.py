"""Speculative decoding with Hugging Face transformers models and any acceptance strategy.

`SpeculativeDecoder` runs a draft and a target step by step; `custom_generate` puts it behind `model.generate`.
"""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from acceptlib.engine.draw import draw
from acceptlib.engine.rows import process
from acceptlib.errors import InputError
from acceptlib.inputs import VerifyResult
from acceptlib.registry import create
from acceptlib.rng import Rng
from acceptlib.sampling import SamplingParams
from acceptlib.strategy import AcceptanceStrategy

__all__ = ["SpeculativeDecoder", "Step", "custom_generate"]

REMEDIES = {
    "TopKLogitsWarper": "top_k=0",
    "TopPLogitsWarper": "top_p=1.0",
    "TopHLogitsWarper": "top_h=None",
    "MinPLogitsWarper": "min_p=None",
    "TypicalLogitsWarper": "typical_p=1.0",
    "EpsilonLogitsWarper": "epsilon_cutoff=0.0",
    "EtaLogitsWarper": "eta_cutoff=0.0",
    "RepetitionPenaltyLogitsProcessor": "repetition_penalty=1.0",
    "NoRepeatNGramLogitsProcessor": "no_repeat_ngram_size=0",
    "EncoderRepetitionPenaltyLogitsProcessor": "encoder_repetition_penalty=1.0",
    "EncoderNoRepeatNGramLogitsProcessor": "encoder_no_repeat_ngram_size=0",
    "MinLengthLogitsProcessor": "min_length=0 (or min_new_tokens=None)",
    "MinNewTokensLengthLogitsProcessor": "min_new_tokens=None",
    "NoBadWordsLogitsProcessor": "bad_words_ids=None",
    "SequenceBiasLogitsProcessor": "sequence_bias=None",
    "SuppressTokensLogitsProcessor": "suppress_tokens=None",
    "SuppressTokensAtBeginLogitsProcessor": "begin_suppress_tokens=None",
    "ForcedBOSTokenLogitsProcessor": "forced_bos_token_id=None",
    "ForcedEOSTokenLogitsProcessor": "forced_eos_token_id=None",
    "ExponentialDecayLengthPenalty": "exponential_decay_length_penalty=None",
    "InfNanRemoveLogitsProcessor": "remove_invalid_values=False",
    "LogitNormalization": "renormalize_logits=False",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "guidance_scale=None",
    "PrefixConstrainedLogitsProcessor": "prefix_allowed_tokens_fn=None",
    "WatermarkLogitsProcessor": "watermarking_config=None",
    "SynthIDTextWatermarkLogitsProcessor": "watermarking_config=None",
}
"""What turns off each of transformers' logits processors that rows are not put through here."""

OTHER_MODES = {
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
}
"""Parameters of `generate` that ask for another decoding mode, with the values that do not; the last turns it off."""

EXTRA_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")

ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}

# What `generate` itself puts beside the arguments of a decoding loop; anything else came from the caller.
PREPARED = {"attention_mask", "position_ids", "cache_position", "past_key_values", "use_cache", "logits_to_keep"}


def import_transformers() -> Any:
    """Return the `transformers` module.

    Raises:
        InputError: It is not installed.
    """
    try:
        import transformers  # noqa: PLC0415 - an extra, needed only here
    except ImportError as error:
        msg = f"transformers cannot be imported ({error}). Install it: pip install acceptlib[hf]"
        raise InputError(msg) from error
    return transformers


@dataclass(frozen=True, eq=False)
class Step:
    """One draft-and-verify step of a single request; K is its number of drafted tokens.

    Attributes:
        token_ids: Emitted tokens, cut after the first end-of-sequence token.
        num_accepted: Drafted tokens that stood, as `verify` counted them, before that cut.
        num_draft_tokens: K; less than asked for near the end of the budget.
        draft_token_ids: [K] int64.
        target_logits: [K+1, V] float32, unprocessed.
        draft_probs: [K, V'] float32, the laws that the drafted tokens were drawn from; V' is at most V.
        verify_seconds: Time of the `verify` call alone, in seconds.
        result: What `verify` returned, for B = 1.
        state: The request's state before the step, [1] tensors by name; empty for most strategies.
    """

    token_ids: list[int]
    num_accepted: int
    num_draft_tokens: int
    draft_token_ids: torch.Tensor
    target_logits: torch.Tensor
    draft_probs: torch.Tensor
    verify_seconds: float
    result: VerifyResult
    state: dict[str, torch.Tensor]


class SpeculativeDecoder:
    """Generates from a target model with a draft model's help, one sequence at a time.

    Both models are decoder-only transformers models over one tokenizer; vocabulary sizes may differ by padding. They
    may be on different devices. Each token is run through each model once: caches are kept and cropped.
    """

    def __init__(  # noqa: PLR0913 - keyword-only options
        self,
        *,
        target: Any,
        draft: Any,
        strategy: str | AcceptanceStrategy = "rejection",
        num_draft_tokens: int = 5,
        sampling: SamplingParams | None = None,
        draft_sampling: SamplingParams | None = None,
        rng: Rng | torch.Generator | int | None = None,
    ) -> None:
        """Bind models, strategy and options.

        Args:
            target: The model whose text is wanted.
            draft: The model that proposes tokens.
            strategy: A name for `acceptlib.create`, or a strategy.
            num_draft_tokens: K, drafted tokens a step; 0 decodes with the target alone.
            sampling: Temperature of the target, and of the draft unless `draft_sampling` is given. None is
                temperature 1; temperature 0 drafts and verifies the argmax.
            draft_sampling: Temperature that tokens are drafted under.
            rng: Randomness for drafting and verifying. An int starts the same stream at every call of `steps`, an
                `Rng` (one request, on the target's device) goes on, and a `torch.Generator` (None: torch's default
                one) gives each call a fresh seed.

        Raises:
            InputError: A model is not a decoder-only transformers model that can be rolled back, or K < 0.
            UnknownStrategyError: No strategy has this name.
        """
        if num_draft_tokens < 0:
            msg = f"num_draft_tokens: expected an int >= 0, got {num_draft_tokens}"
            raise InputError(msg)
        for role, model in (("target", target), ("draft", draft)):
            _check_model(role, model)
        self.target = target
        self.draft = draft
        self.strategy = create(strategy) if isinstance(strategy, str) else strategy
        self.num_draft_tokens = num_draft_tokens
        self.sampling = sampling
        self.draft_sampling = draft_sampling
        self.rng = rng

    def steps(
        self, input_ids: torch.Tensor, max_new_tokens: int, eos_token_ids: Collection[int] = ()
    ) -> Iterator[Step]:
        """Generate, one verified step at a time.

        Args:
            input_ids: [1, n] integers, n >= 1, the prompt.
            max_new_tokens: Emit at most this many tokens, and exactly so many without an end of sequence.
            eos_token_ids: Tokens that end the sequence; the first one emitted is the last token.

        Returns:
            An iterator; a step is computed when it is asked for.

        Raises:
            InputError: The prompt's shape or dtype does not fit, or `max_new_tokens` < 0.
            StatusError: While iterating: a model's row has no law (NaN).
        """
        if input_ids.ndim != 2 or input_ids.shape[0] != 1 or input_ids.shape[1] < 1:  # noqa: PLR2004
            msg = f"input_ids: expected [1, n] with n >= 1, one sequence at a time, got {list(input_ids.shape)}"
            raise InputError(msg)
        if input_ids.dtype not in {torch.int32, torch.int64}:
            msg = f"input_ids: expected int32 or int64, got {str(input_ids.dtype).removeprefix('torch.')}"
            raise InputError(msg)
        if max_new_tokens < 0:
            msg = f"max_new_tokens: expected an int >= 0, got {max_new_tokens}"
            raise InputError(msg)
        return self._run(input_ids, max_new_tokens, frozenset(eos_token_ids))

    def _run(self, input_ids: torch.Tensor, max_new_tokens: int, eos_token_ids: frozenset[int]) -> Iterator[Step]:
        sequence = _Sequence(self, input_ids, max_new_tokens)
        while sequence.remaining:
            step = sequence.advance(eos_token_ids)
            yield step
            if step.token_ids[-1] in eos_token_ids:
                return


class _CachedModel:
    """A model and the cache of the first `length` tokens of a sequence."""

    def __init__(self, model: Any, vocab_size: int) -> None:
        """Start with an empty cache; rows are cut to `vocab_size`, the target's."""
        self.model = model
        self.vocab_size = vocab_size
        self.largest_id = min(_vocab_size(model), vocab_size) - 1
        self.length = 0
        self.keep_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        # Without a config every layer keeps all it has seen, and a sliding window is a matter of the attention mask
        # alone: layers that forget cannot be rolled back in every version.
        self.cache = import_transformers().DynamicCache()

    def rows(self, token_ids: torch.Tensor, count: int) -> torch.Tensor:
        """Run the tokens of [1, n] that the cache lacks, and return the last `count` rows, [count, V] float32."""
        fed = token_ids[:, self.length :].to(self.model.device)
        if self.largest_id < self.vocab_size - 1:
            # Drafted tokens are drawn from the rows returned here whatever the draft was fed, so a token that it cannot
            # embed may be replaced; only acceptance could suffer.
            fed = fed.clamp(max=self.largest_id)
        keep = {"logits_to_keep": count} if self.keep_rows else {}
        output = self.model(input_ids=fed, past_key_values=self.cache, use_cache=True, **keep)
        self.length = token_ids.shape[1]
        rows: torch.Tensor = output.logits[0, -count:, : self.vocab_size].to(token_ids.device, torch.float32)
        return rows

    def crop(self, length: int) -> None:
        """Forget tokens from `length` on."""
        surplus = self.length - length
        if surplus > 0:
            self.cache.crop(-surplus)  # a negative count means tokens to remove in every version
            self.length = length


class _Sequence:
    """The state of one sequence between steps."""

    def __init__(self, decoder: SpeculativeDecoder, input_ids: torch.Tensor, max_new_tokens: int) -> None:
        self.decoder = decoder
        device = decoder.target.device
        self.device = device
        self.length = input_ids.shape[1]
        self.end = self.length + max_new_tokens
        self.token_ids = torch.empty(1, self.end, dtype=torch.int64, device=device)
        self.token_ids[:, : self.length] = input_ids
        self.rng = Rng.of(decoder.rng, 1, device)
        self.state = decoder.strategy.initial_state(1, device)
        self.vocab_size = _vocab_size(decoder.target)
        self.target = _CachedModel(decoder.target, self.vocab_size)
        self.draft = _CachedModel(decoder.draft, self.vocab_size)
        self.draft_temperature = _temperature(decoder.draft_sampling or decoder.sampling, device)

    @property
    def remaining(self) -> int:
        """How many tokens may still be emitted."""
        return self.end - self.length

    @torch.no_grad()
    def advance(self, eos_token_ids: frozenset[int]) -> Step:
        """Draft, verify and append."""
        # One less than the budget, so that the recovered or bonus token fits too.
        num_draft_tokens = min(self.decoder.num_draft_tokens, self.remaining - 1)
        end = self.length + num_draft_tokens
        # Drafted tokens are written where emitted ones will be.
        laws = [self._draft(position) for position in range(num_draft_tokens)]
        draft_token_ids = self.token_ids[0, self.length : end].clone()
        draft_probs = torch.cat(laws) if laws else torch.empty(0, self.vocab_size, device=self.device)
        target_logits = self.target.rows(self.token_ids[:, :end], num_draft_tokens + 1)

        # A `verify` of the strategy's own may know no state.
        further: dict[str, Any] = {"state": self.state} if self.state else {}
        start = self._now()
        result = self.decoder.strategy.verify(
            draft_token_ids[None],
            target_logits=target_logits[None],
            draft_probs=draft_probs[None],
            sampling=self.decoder.sampling,
            rng=self.rng,
            **further,
        )
        verify_seconds = self._now() - start

        result.raise_for_status()
        state = {name: tensor.clone() for name, tensor in self.state.items()}
        self.decoder.strategy.update_state(self.state, result)
        num_accepted, num_emitted = int(result.num_accepted[0]), int(result.num_emitted[0])
        # The last emitted token was drawn here and no cache holds it.
        for model in (self.target, self.draft):
            model.crop(self.length + num_accepted)
        token_ids = result.output_token_ids[0, :num_emitted].tolist()
        cut = next((place for place, token in enumerate(token_ids, 1) if token in eos_token_ids), num_emitted)
        token_ids = token_ids[:cut]
        self.token_ids[0, self.length : self.length + cut] = result.output_token_ids[0, :cut]
        self.length += cut
        return Step(
            token_ids=token_ids,
            num_accepted=num_accepted,
            num_draft_tokens=num_draft_tokens,
            draft_token_ids=draft_token_ids,
            target_logits=target_logits,
            draft_probs=draft_probs,
            verify_seconds=verify_seconds,
            result=result,
            state=state,
        )

    def _draft(self, position: int) -> torch.Tensor:
        """Append one drafted token and return the law [1, V'] float32 it was drawn from."""
        end = self.length + position
        logits = self.draft.rows(self.token_ids[:, :end], 1)
        # The engine's own processing, and the very row that `verify` is given: what is declared is what is drawn from.
        law = process(logits, self.draft_temperature)
        self.token_ids[0, end] = draw(law, self.rng.draft_bits(position))[0]
        return law

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


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

    Supported are `do_sample` with `temperature`, the length limits, end-of-sequence tokens, `stopping_criteria` and
    `streamer`; one sequence at a time. With `do_sample=True` pass `top_k=0`, since `generate` sets it to 50 otherwise.
    Parameters that change the law in other ways are errors. Those of transformers' own assisted generation
    (`num_assistant_tokens` and its kin) have no effect; `num_draft_tokens` is the one here.

    Args:
        strategy: A name for `acceptlib.create`, or a strategy.
        num_draft_tokens: K, drafted tokens a step.
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
    chosen = create(strategy) if isinstance(strategy, str) else strategy

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
        passed = _arguments_of_generate(decode)
        draft = next(
            (m for m in (assistant_model, passed.get("assistant_model"), bound_assistant) if m is not None), None
        )
        streamer = passed.get("streamer") if streamer is None else streamer
        if draft is None:
            msg = "assistant_model: expected the draft model, got None: pass it to generate beside custom_generate"
            raise InputError(msg)
        if synced_gpus or passed.get("synced_gpus"):
            msg = "synced_gpus is not supported by custom_generate: set synced_gpus=False"
            raise InputError(msg)
        _check_config(generation_config)
        _check_inputs(input_ids, model_kwargs)
        temperature = _processed_temperature(logits_processor or ())
        decoder = SpeculativeDecoder(
            target=model,
            draft=draft,
            strategy=chosen,
            num_draft_tokens=num_draft_tokens,
            sampling=SamplingParams(temperature=temperature if generation_config.do_sample else 0.0),
            rng=seed,
        )
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


def _arguments_of_generate(decode: Callable[..., Any]) -> dict[str, Any]:
    """Return what was passed to the `generate` call that runs `decode`, or nothing.

    transformers (4.57 to 5.23 at least) hands a callable `custom_generate` neither `assistant_model` nor `streamer`,
    although `generate` accepts both beside it. Reading them where they were passed is the only way not to lose them
    without a word.
    """
    frame = sys._getframe(1)  # noqa: SLF001
    while frame is not None:
        if frame.f_code.co_name == "generate" and frame.f_locals.get("custom_generate") is decode:
            return {name: frame.f_locals.get(name) for name in ("assistant_model", "streamer", "synced_gpus")}
        frame = frame.f_back  # type: ignore[assignment]
    return {}


def _check_model(role: str, model: Any) -> None:
    """Raise `InputError` unless `model` is a decoder-only transformers model whose cache can be rolled back."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        msg = f"{role}: expected a transformers causal language model, got {type(model).__name__}"
        raise InputError(msg)
    if getattr(config, "is_encoder_decoder", False):
        msg = f"{role}: expected a decoder-only model, got {type(model).__name__}, an encoder-decoder"
        raise InputError(msg)
    if getattr(model, "_is_stateful", False):
        msg = f"{role}: expected a model whose cache can be rolled back, got {type(model).__name__}, which is stateful"
        raise InputError(msg)
    recurrent = set(getattr(config.get_text_config(decoder=True), "layer_types", None) or ()) - ATTENTION_LAYERS
    if recurrent:
        kinds = ", ".join(sorted(recurrent))
        msg = f"{role}: expected attention layers, which can be rolled back, got {type(model).__name__} with {kinds}"
        raise InputError(msg)


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
    if model_kwargs.get("use_cache") is False:
        msg = "use_cache=False is not supported: speculative decoding keeps its caches, set use_cache=True"
        raise InputError(msg)
    cache = model_kwargs.get("past_key_values")
    if cache is not None and (getattr(cache, "_is_user_defined", False) or cache.get_seq_length() > 0):
        msg = "past_key_values: expected none, the decoder keeps its own caches: leave it out and pass the whole prompt"
        raise InputError(msg)
    attention_mask = model_kwargs.get("attention_mask")
    if attention_mask is not None and not bool((attention_mask == 1).all()):
        msg = "attention_mask: expected all ones, got zeros: remove the padding from input_ids"
        raise InputError(msg)
    position_ids = model_kwargs.get("position_ids")
    if position_ids is not None:
        expected = torch.arange(input_ids.shape[1], device=position_ids.device).expand_as(position_ids)
        if not bool((position_ids == expected).all()):
            msg = "position_ids: expected 0, 1, ..., n - 1, as without them: leave them out"
            raise InputError(msg)
    unknown = sorted(name for name, value in model_kwargs.items() if value is not None and name not in PREPARED)
    if unknown:
        msg = f"{', '.join(unknown)}: not supported by custom_generate, which takes text prompts as input_ids alone"
        raise InputError(msg)


def _processed_temperature(logits_processor: Any) -> float:
    """Return the temperature that `generate`'s logits processors apply; any other processor is an `InputError`."""
    temperature = 1.0
    for processor in logits_processor:
        name = type(processor).__name__
        if name == "TemperatureLogitsWarper":
            temperature *= float(processor.temperature)
            continue
        remedy = REMEDIES.get(name)
        if remedy is None:
            msg = f"logits_processor: {name} is not supported by custom_generate: leave it out"
        else:
            parameter = remedy.split("=", maxsplit=1)[0]
            msg = (
                f"{parameter} is not supported by custom_generate: set {remedy} in generate or in the model's "
                "generation_config"
            )
        raise InputError(msg)
    return temperature


def _vocab_size(model: Any) -> int:
    return int(model.config.get_text_config(decoder=True).vocab_size)


def _temperature(sampling: SamplingParams | None, device: torch.device) -> torch.Tensor | None:
    """Return the temperature as [1] float32, or None for 1."""
    if sampling is None or sampling.temperature is None:
        return None
    return torch.as_tensor(sampling.temperature, dtype=torch.float32, device=device).reshape(1)
