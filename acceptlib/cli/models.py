"""The pair of models behind `generate` and `compare`, and one speculative run of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from acceptlib.cli.console import CommandError, stderr, use_one_thread
from acceptlib.demo.pair import load_pair
from acceptlib.errors import import_extra
from acceptlib.integrations.transformers import SpeculativeDecoder

if TYPE_CHECKING:
    import torch

    from acceptlib.demo.pair import ModelPair
    from acceptlib.integrations.transformers import Step
    from acceptlib.sampling import SamplingParams
    from acceptlib.strategy import AcceptanceStrategy


def load(target: str | None, draft: str | None, device: torch.device) -> ModelPair:
    """Load the bundled pair, which runs on one core of a CPU, or the models at two paths.

    Raises:
        MissingPackageError: transformers is not installed.
        InputError: A model cannot be loaded, or the two do not go together.
    """
    prepare()
    if target is None and draft is None:
        use_one_thread()  # the bundled models are tiny
        return load_pair(device=device)
    with stderr().status("loading the models"):  # the hub may take a minute, to fail too
        return load_pair(target, draft, device=device)


def prepare() -> None:
    """Import transformers, and silence its progress bars and the hub's retries, which would be drawn over ours.

    Raises:
        MissingPackageError: It is not installed.
    """
    import_extra("transformers.utils.logging", "hf").disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


def encode(pair: ModelPair, prompt: str) -> torch.Tensor:
    """Return a prompt as token ids [1, n].

    Raises:
        CommandError: It has no tokens, or is no text.
    """
    try:
        prompt.encode()
    except UnicodeEncodeError:
        msg = "the prompt is not valid UTF-8"
        raise CommandError(msg) from None
    # Not verbose: too many tokens are an error of ours.
    ids: torch.Tensor = pair.tokenizer(prompt, return_tensors="pt", verbose=False).input_ids
    if ids.shape[1] == 0:
        msg = "the prompt has no tokens: give at least one character"
        raise CommandError(msg)
    return ids


def steps(  # noqa: PLR0913 - what one run is made of
    pair: ModelPair,
    strategy: AcceptanceStrategy,
    input_ids: torch.Tensor,
    *,
    num_draft_tokens: int,
    max_new_tokens: int,
    sampling: SamplingParams,
    seed: int,
) -> Iterator[Step]:
    """Generate after a prompt and yield each verified step.

    Raises:
        CommandError: The text would be longer than what a model was made for.
    """
    expect_room(pair, input_ids.shape[1], max_new_tokens)
    decoder = SpeculativeDecoder(
        target=pair.target,
        draft=pair.draft,
        strategy=strategy,
        num_draft_tokens=num_draft_tokens,
        sampling=sampling,
        rng=seed,
    )
    return decoder.steps(input_ids, max_new_tokens, eos_token_ids=_end_of_text(pair))


def expect_room(pair: ModelPair, num_tokens: int, max_new_tokens: int) -> None:
    """Check that a prompt and the text after it are no longer than what the models were made for.

    Raises:
        CommandError: They are.
    """
    known = [getattr(model.config, "max_position_embeddings", None) for model in (pair.target, pair.draft)]
    most = min((number for number in known if isinstance(number, int)), default=None)
    if most is None or num_tokens + max_new_tokens <= most:
        return
    if num_tokens >= most:
        msg = (
            f"the prompt ({num_tokens} tokens) does not fit the models' {most} positions: expected at most {most - 1} "
            "tokens, which leaves room for one more"
        )
    else:
        msg = (
            f"the models have {most} positions, of which the prompt takes {num_tokens}: expected a --max-new-tokens of "
            f"at most {most - num_tokens}, got {max_new_tokens}"
        )
    raise CommandError(msg)


def _end_of_text(pair: ModelPair) -> tuple[int, ...]:
    found = pair.target.generation_config.eos_token_id
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list) else (int(found),)
