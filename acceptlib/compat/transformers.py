"""transformers' own assisted generation with an acceptlib strategy; `docs/compat/transformers.md` says what differs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

import acceptlib
from acceptlib.errors import InputError, import_extra

__all__ = ["patch"]

REPLACED: Final = "_speculative_sampling"
"""The function of `transformers.generation.utils` that decides on sampled drafts, from 4.57 to 5.23 at least."""

_INSTALLED: list[Callable[..., Any]] = []
"""The function that was there before, then those of open contexts; the last one is in its place."""

_LOCK: Final = threading.Lock()


@contextlib.contextmanager
def patch(strategy: str | acceptlib.AcceptanceStrategy = "rejection") -> Iterator[None]:
    """Let `generate(assistant_model=..., do_sample=True)` use a strategy while the context is open.

    What was there before is restored at the end, also after an error. The replacement holds for the whole process: if
    several contexts are open at once, in several threads too, the one opened last counts.
    Random numbers come from torch's default generator, so `torch.manual_seed` makes a text reproducible.

    With `do_sample=False`, and for drafts without logits (prompt lookup), transformers compares drafted tokens with the
    target's own choice itself, and the strategy is not asked.

    Args:
        strategy: A name for `acceptlib.create`, or a strategy.

    Raises:
        InputError: This version of transformers has no function to replace, or `strategy` is none or keeps state.
        MissingPackageError: transformers is not installed.
        UnknownStrategyError: No strategy has this name.
    """
    chosen = acceptlib.create(strategy) if isinstance(strategy, str) else strategy
    if not isinstance(chosen, acceptlib.AcceptanceStrategy):
        msg = f"strategy: expected a name or what acceptlib.create returns, got {strategy!r}"
        raise InputError(msg)
    if chosen.resolve_traits().state:
        msg = (
            f"strategy: expected one without state, which transformers does not pass on, got {chosen.name!r}. Use "
            "acceptlib.integrations.transformers.custom_generate."
        )
        raise InputError(msg)
    utils = _generation_utils()

    def speculative_sampling(  # transformers' signature, of 4.57 and of 5.x
        candidate_input_ids: torch.Tensor,
        candidate_logits: torch.Tensor,
        candidate_length: int,
        new_logits: torch.Tensor,
        is_done_candidate: bool = False,  # noqa: FBT001, FBT002
        assistant_ensemble_weight: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if assistant_ensemble_weight is not None:
            msg = (
                f"assistant_ensemble_weight={assistant_ensemble_weight!r}: expected None while a strategy is patched "
                "in. patch(acceptlib.create('mixture', weight=...)) has the same law."
            )
            raise InputError(msg)
        result = chosen.verify(
            candidate_input_ids[:, candidate_input_ids.shape[1] - candidate_length :],
            target_logits=new_logits,
            draft_logits=candidate_logits,
        )
        result.raise_for_status()
        n_matches = result.num_accepted[0].to(torch.int64)
        if is_done_candidate and n_matches == candidate_length:
            # 4.57 takes n_matches + 1 tokens and wants none after a draft that has ended the text.
            n_matches -= 1
        return result.output_token_ids[:, : int(n_matches) + 1].to(candidate_input_ids.dtype), n_matches

    with _LOCK:
        if not _INSTALLED:
            _INSTALLED.append(getattr(utils, REPLACED))
        _INSTALLED.append(speculative_sampling)
        setattr(utils, REPLACED, speculative_sampling)
    try:
        yield
    finally:
        with _LOCK:
            _INSTALLED.remove(speculative_sampling)
            setattr(utils, REPLACED, _INSTALLED[-1])
            if len(_INSTALLED) == 1:
                _INSTALLED.clear()


def _generation_utils() -> Any:
    utils = import_extra("transformers.generation.utils", "hf")
    if not hasattr(utils, REPLACED):
        version = import_extra("transformers", "hf").__version__
        msg = (
            f"transformers {version}: expected a function {REPLACED} in transformers.generation.utils, which "
            "assisted generation calls. Use acceptlib.integrations.transformers.custom_generate instead."
        )
        raise InputError(msg)
    return utils
