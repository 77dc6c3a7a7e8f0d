"""Tiny transformers models, and `generate` with a decoding loop of ours, which several test files share."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers

from acceptlib.integrations.transformers import custom_generate
from acceptlib.sampling import SamplingParams

PROMPT = torch.tensor([[5, 17, 3, 88, 41]])
GREEDY = SamplingParams(temperature=0.0)


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
