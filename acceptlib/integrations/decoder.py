"""Speculative decoding of one sequence with Hugging Face transformers models and any acceptance strategy."""

from __future__ import annotations

import inspect
import operator
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch.nn import functional

from acceptlib.drafting import sample
from acceptlib.errors import (
    InputError,
    StatusError,
    StrategyDefinitionError,
    expect_int,
    import_extra,
    short_repr,
)
from acceptlib.registry import as_strategy
from acceptlib.result import VerifyResult
from acceptlib.rng import Rng
from acceptlib.sampling import SamplingParams
from acceptlib.strategy import AcceptanceStrategy

LogitsProcessor: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

ATTENTION_LAYERS: Final = {"full_attention", "sliding_attention", "chunked_attention"}


def import_transformers() -> Any:
    """Return the `transformers` module.

    Raises:
        MissingPackageError: It is not installed.
    """
    return import_extra("transformers", "hf")


@dataclass(frozen=True, eq=False)
class Step:
    """One draft-and-verify step of a single request; K is its number of drafted tokens.

    Attributes:
        token_ids: Emitted tokens, cut after the first end-of-sequence token.
        num_accepted: Drafted tokens that stood, as `verify` counted them, before that cut.
        num_draft_tokens: K; less than asked for near the end of the budget, and where logits processors mask all
            tokens of a draft with fewer.
        draft_token_ids: [K] int64.
        target_logits: [K+1, V] float32, after logits processors and before the sampling parameters.
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

    Both models are causal transformers models over one tokenizer; vocabulary sizes may differ by padding. They may be
    on different devices. Each token is run through each model once: caches are kept and cropped.
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
        logits_processors: Sequence[LogitsProcessor] = (),
        rng: Rng | torch.Generator | int | None = None,
    ) -> None:
        """Bind models, strategy and options.

        Args:
            target: The model whose text is wanted.
            draft: The model that proposes tokens.
            strategy: A name for `acceptlib.create`, or a strategy.
            num_draft_tokens: K, drafted tokens a step; 0 decodes with the target alone.
            sampling: Of the target, and of the draft unless `draft_sampling` is given; no bitmask. Temperature 0 drafts
                and verifies the argmax.
            draft_sampling: What tokens are drafted under.
            logits_processors: Applied to the rows of both models before that, in order. Each takes the tokens so far,
                [1, n] int64, and the row that follows them, [1, V] float32, and returns such a row, whatever it was
                asked before.
            rng: Randomness for drafting and verifying. An int starts the same stream at every call of `steps`, an
                `Rng` (one request, on the target's device) goes on, and a `torch.Generator` (None: torch's default
                one) gives each call a fresh seed.

        Raises:
            InputError: A model is not a causal decoder-only transformers model that can be rolled back, K < 0, there is
                a bitmask, or an `Rng` that does not advance.
            UnknownStrategyError: No strategy has this name.
        """
        expect_int("num_draft_tokens", num_draft_tokens)
        for role, model in (("target", target), ("draft", draft)):
            _check_model(role, model)
        for name, params in (("sampling", sampling), ("draft_sampling", draft_sampling)):
            if not isinstance(params, SamplingParams | None):
                msg = f"{name}: expected SamplingParams, got {params!r}"
                raise InputError(msg)
            if params is not None and params.allowed_token_bitmask is not None:
                msg = f"{name}.allowed_token_bitmask: expected None, a mask changes from row to row: pass a processor"
                raise InputError(msg)
        if isinstance(rng, Rng) and not rng.advances:
            msg = "rng: expected an Rng that advances, for every step needs numbers of its own, got advances=False"
            raise InputError(msg)
        self.target = target
        self.draft = draft
        self.strategy = as_strategy(strategy)
        self.num_draft_tokens = num_draft_tokens
        self.sampling = sampling
        self.draft_sampling = draft_sampling or sampling
        self.logits_processors = logits_processors
        self.rng = rng

    def steps(
        self, input_ids: torch.Tensor, max_new_tokens: int, eos_token_ids: Collection[int] | torch.Tensor = ()
    ) -> Iterator[Step]:
        """Generate, one verified step at a time.

        Args:
            input_ids: [1, n] integers, n >= 1, the prompt.
            max_new_tokens: Emit at most this many tokens, and exactly so many without an end of sequence.
            eos_token_ids: Tokens that end the sequence, ints or a tensor of them; the first one emitted is the last
                token.

        Returns:
            An iterator; a step is computed when it is asked for.

        Raises:
            InputError: The prompt's shape or dtype does not fit, it has ids beyond the target's vocabulary,
                `max_new_tokens` < 0, or an end is no int; while iterating, where a model cannot run as many tokens.
            StatusError: While iterating: a model's row has no law (NaN).
        """
        if not isinstance(input_ids, torch.Tensor):
            msg = f"input_ids: expected a torch.Tensor, got {type(input_ids).__name__}"
            raise InputError(msg)
        if input_ids.ndim != 2 or input_ids.shape[0] != 1 or input_ids.shape[1] < 1:  # noqa: PLR2004
            msg = f"input_ids: expected [1, n] with n >= 1, one sequence at a time, got {list(input_ids.shape)}"
            raise InputError(msg)
        if input_ids.dtype not in {torch.int32, torch.int64}:
            msg = f"input_ids: expected int32 or int64, got {str(input_ids.dtype).removeprefix('torch.')}"
            raise InputError(msg)
        lowest, highest, size = int(input_ids.min()), int(input_ids.max()), _vocab_size(self.target)
        if lowest < 0 or highest >= size:
            msg = f"input_ids: expected ids in [0, {size}), the target's vocabulary, got {lowest} to {highest}"
            raise InputError(msg)
        expect_int("max_new_tokens", max_new_tokens)
        try:
            ends = frozenset(operator.index(token) for token in eos_token_ids)  # tensors in a set equal no int
        except TypeError as error:
            msg = f"eos_token_ids: expected a collection of ids, got {eos_token_ids!r}: pass ints, such as [2]"
            raise InputError(msg) from error
        return self._run(input_ids, max_new_tokens, ends)

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
        self.arguments = inspect.signature(model.forward).parameters
        self.cache_name = "cache" if "cache" in self.arguments else "past_key_values"  # before transformers 5.24
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
        length = token_ids.shape[1]
        further: dict[str, Any] = {"logits_to_keep": count} if "logits_to_keep" in self.arguments else {}
        if "position_ids" in self.arguments:  # as `generate` gives them: some models would count otherwise
            further["position_ids"] = torch.arange(self.length, length, device=fed.device)[None]
        try:
            output = self.model(input_ids=fed, use_cache=True, **{self.cache_name: self.cache}, **further)
        except (IndexError, RuntimeError) as error:  # of learned positions, or of any other kind
            config = self.model.config.get_text_config(decoder=True)
            longest = getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)
            if not (longest and length > longest):
                raise
            msg = (
                f"{type(self.model).__name__} cannot run {length} tokens ({error}); its config says that there are "
                f"positions for {longest}: give a shorter prompt, or ask for fewer tokens"
            )
            raise InputError(msg) from error
        if self.cache.get_seq_length() != length:
            msg = f"{type(self.model).__name__} leaves {self.cache_name} as it was: expected a model that keeps a cache"
            raise InputError(msg)
        self.length = length
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
        self.token_ids = input_ids.to(device, torch.int64, copy=True)
        self.rng = Rng.of(decoder.rng, 1, device)
        self.state = decoder.strategy.initial_state(1, device)
        self.vocab_size = _vocab_size(decoder.target)
        self.target = _CachedModel(decoder.target, self.vocab_size)
        self.draft = _CachedModel(decoder.draft, self.vocab_size)

    @property
    def remaining(self) -> int:
        """How many tokens may still be emitted."""
        return self.end - self.length

    def _have_room(self, num_tokens: int) -> None:
        """Have memory for so many more tokens, and for more than these so that this happens a few times."""
        longest = self.token_ids.shape[1]
        if self.length + num_tokens > longest:
            more = max(num_tokens, min(longest, self.remaining))
            self.token_ids = torch.cat((self.token_ids, self.token_ids.new_empty(1, more)), 1)

    @torch.no_grad()
    def advance(self, eos_token_ids: frozenset[int]) -> Step:
        """Draft, verify and append."""
        # One less than the budget, so that the recovered or bonus token fits too.
        wanted = min(self.decoder.num_draft_tokens, self.remaining - 1)
        self._have_room(wanted + 1)
        laws: list[torch.Tensor] = []
        # Drafted tokens are written where emitted ones will be.
        while len(laws) < wanted and (drafted := self._draft(len(laws))) is not None:
            laws.append(drafted)
        num_draft_tokens = len(laws)
        end = self.length + num_draft_tokens
        draft_token_ids = self.token_ids[0, self.length : end].clone()
        draft_probs = (
            torch.cat(laws) if laws else torch.empty(0, self.vocab_size, dtype=torch.float32, device=self.device)
        )
        no_law = draft_probs.isnan().any(1).nonzero()[:, 0].tolist()  # `verify` would take NaN for 0, and q for a law
        if no_law:
            msg = f"the draft's row at drafted position {no_law[0]} has no law (NaN or no finite logit)"
            raise StatusError(msg)
        target_logits = self._process(self.target.rows(self.token_ids[:, :end], num_draft_tokens + 1), end)

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

        if not isinstance(result, VerifyResult):  # of a `verify` of the strategy's own
            msg = f"strategy {self.decoder.strategy.name!r}: verify returned {short_repr(result)}, no VerifyResult"
            raise StrategyDefinitionError(msg)
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

    def _draft(self, position: int) -> torch.Tensor | None:
        """Append one drafted token and return the law [1, V'] float32 it was drawn from, or None: all masked."""
        end = self.length + position
        logits = self._process(self.draft.rows(self.token_ids[:, :end], 1), end)
        # Processors may leave only tokens that a smaller draft lacks. Asking the device takes time: no other pair does.
        smaller = self.draft.largest_id < self.vocab_size - 1
        if smaller and self.decoder.logits_processors and bool(logits.isneginf().all()):
            return None
        # The very row that `verify` is given: what is declared is what is drawn from.
        ids, probs = sample(logits, rng=self.rng, position=position, sampling=self.decoder.draft_sampling)
        self.token_ids[0, end] = ids[0]
        return probs

    def _process(self, logits: torch.Tensor, end: int) -> torch.Tensor:
        """Apply the logits processors to rows [n, V'], the last of which follows `end` tokens."""
        if not self.decoder.logits_processors:
            return logits
        logits = functional.pad(logits, (0, self.vocab_size - logits.shape[1]), value=-torch.inf)
        rows = list(torch.split(logits, 1))
        for place in range(len(rows)):
            for processor in self.decoder.logits_processors:
                rows[place] = processor(self.token_ids[:, : end - len(rows) + 1 + place], rows[place])
        return torch.cat(rows).to(torch.float32)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def _check_model(role: str, model: Any) -> None:
    """Raise `InputError` unless `model` is a causal transformers model whose cache can be rolled back."""
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
    text_config = config.get_text_config(decoder=True)
    recurrent = set(getattr(text_config, "layer_types", None) or ()) - ATTENTION_LAYERS
    if recurrent:
        kinds = ", ".join(sorted(recurrent))
        msg = f"{role}: expected attention layers, which can be rolled back, got {type(model).__name__} with {kinds}"
        raise InputError(msg)
    # A causal model's config may say is_decoder=False, as each does before transformers 5: what counts is whether a
    # layer has read it. Parts for images or sound have configs of their own, in which it is right.
    if text_config is config and any(vars(module).get("is_decoder") is False for module in model.modules()):
        msg = (
            f"{role}: expected a causal model, got {type(model).__name__} as an encoder, whose tokens see later ones: "
            "load it with is_decoder=True"
        )
        raise InputError(msg)
    # Before it had the flag, PaliGemma was always bidirectional. "vision" is for images alone, which does not matter.
    bidirectional = getattr(text_config, "use_bidirectional_attention", config.model_type == "paligemma")
    if bidirectional not in {None, False, "vision"} or getattr(text_config, "is_causal", None) is False:
        msg = (
            f"{role}: expected a causal model, got {type(model).__name__} with attention in both directions, whose "
            "prompt would see drafted tokens: take another model, or generate without drafts"
        )
        raise InputError(msg)


def _vocab_size(model: Any) -> int:
    return int(model.config.get_text_config(decoder=True).vocab_size)
