"""The pair of models behind `generate` and `compare`, and one speculative run of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from acceptlib.cli.console import CommandError, require
from acceptlib.sampling import SamplingParams

if TYPE_CHECKING:
    from acceptlib.demo.pair import ModelPair
    from acceptlib.integrations.transformers import Step
    from acceptlib.strategy import AcceptanceStrategy


def load(target: str | None, draft: str | None) -> ModelPair:
    """Load the bundled pair, or the models at two paths.

    Raises:
        CommandError: One path without the other, no such model, or transformers is not installed.
    """
    if (target is None) != (draft is None):
        given, missing = ("--target", "--draft") if draft is None else ("--draft", "--target")
        msg = f"{given} needs {missing} as well: draft and target share a tokenizer, which the bundled models do with no other"
        raise CommandError(msg)
    try:
        from transformers.utils import logging  # noqa: PLC0415 - seconds of import that other commands do not need

        from acceptlib.demo import pair  # noqa: PLC0415
    except ImportError as error:
        raise require("hf", error) from None
    logging.disable_progress_bar()  # it would draw over ours
    try:
        return pair.load_pair(target, draft)
    except (OSError, ValueError) as error:
        where = "the bundled models" if target is None else f"{target!r} and {draft!r}"
        msg = f"cannot load {where}: {error}"
        raise CommandError(msg) from None


def encode(pair: ModelPair, prompt: str) -> Any:
    """Return a prompt as token ids [1, n].

    Raises:
        CommandError: It has no tokens.
    """
    ids = pair.tokenizer(prompt, return_tensors="pt").input_ids
    if ids.shape[1] == 0:
        msg = "the prompt has no tokens: give at least one character"
        raise CommandError(msg)
    return ids


def steps(
    pair: ModelPair,
    strategy: AcceptanceStrategy,
    input_ids: Any,
    *,
    num_draft_tokens: int,
    max_new_tokens: int,
    temperature: float,
    seed: int,
) -> Iterator[Step]:
    """Generate after a prompt and yield each verified step."""
    from acceptlib.integrations.transformers import SpeculativeDecoder  # noqa: PLC0415 - as above

    decoder = SpeculativeDecoder(
        pair.target,
        pair.draft,
        strategy=strategy,
        num_draft_tokens=num_draft_tokens,
        sampling=SamplingParams(temperature=temperature),
        seed=seed,
    )
    return decoder.steps(input_ids, max_new_tokens, eos_token_ids=_end_of_text(pair))


def _end_of_text(pair: ModelPair) -> tuple[int, ...]:
    found = pair.target.generation_config.eos_token_id
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list) else (int(found),)
