"""transformers' own assisted generation with a strategy patched in."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import support
import torch
import transformers
from acceptlib_relaxed import Relaxed
from transformers.generation import utils
from transformers_support import PROMPT

import acceptlib
from acceptlib import exact
from acceptlib.compat.transformers import patch
from acceptlib.errors import InputError, StatusError, UnknownStrategyError
from acceptlib.testing.simulation import FALSE_ALARM_Z, world

ORIGINAL = utils._speculative_sampling


def assisted(target: Any, draft: Any, **options: Any) -> Any:
    """Call transformers' own assisted generation."""
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": 40} | options
    return target.generate(PROMPT, assistant_model=draft, **options)


def candidates(seed: int, num_trials: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return sequences [n, 3] whose last two tokens are drafted, and the rows [1, 2, V] and [1, 3, V]."""
    where = world(seed)
    logits, draft_logits = where.target_logits[None, :3], where.draft_logits[None, :2]
    torch.manual_seed(seed)
    ids = [torch.multinomial(row, num_trials, replacement=True) for row in draft_logits[0].softmax(-1)]
    return torch.stack((torch.zeros(num_trials, dtype=torch.int64), *ids), 1), draft_logits, logits


class Spy(acceptlib.AcceptanceStrategy):
    """`greedy`, counting its calls and the tokens that stood."""

    name = "spy"
    traits = acceptlib.create("greedy").traits
    calls = 0
    accepted = 0

    def verify(self, *args: Any, **options: Any) -> acceptlib.VerifyResult:
        result = acceptlib.create("greedy").verify(*args, **options)
        self.calls += 1
        self.accepted += int(result.num_accepted.sum())
        return result


def test_assisted_generation_asks_the_strategy(target: Any, draft: Any) -> None:
    """A greedy strategy makes of sampled drafts what the target writes greedily, in fewer calls than tokens."""
    spy = Spy()
    with patch(spy):
        text = assisted(target, draft)
    # In the last step nothing is drafted, and transformers samples by itself.
    assert torch.equal(text[:, :-1], target.generate(PROMPT, do_sample=False, max_new_tokens=39))
    assert 0 < spy.calls < 40
    assert spy.accepted > 0


@pytest.mark.parametrize("strategy", ["rejection", "block", "typical"])
def test_texts_reproduce(target: Any, draft: Any, strategy: str) -> None:
    texts = []
    for seed in (1, 1, 2):
        transformers.set_seed(seed)
        with patch(strategy=strategy):
            texts.append(assisted(target, draft))
    assert torch.equal(texts[0], texts[1])
    assert texts[0].shape == (1, PROMPT.shape[1] + 40)
    assert strategy == "typical" or not torch.equal(texts[0], texts[2])


@pytest.mark.parametrize("strategy", ["rejection", "block", "lenience"])
def test_law(strategy: str) -> None:
    """What the replacement emits, by the strategy's exact law."""
    sequences, draft_logits, logits = candidates(3, 1200)
    emitted = torch.full((len(sequences), 3), -1)
    with patch(strategy):
        for row, sequence in zip(emitted, sequences, strict=True):
            tokens, matches = utils._speculative_sampling(sequence[None], draft_logits, 2, logits)
            assert tokens.shape == (1, int(matches) + 1)
            row[: int(matches) + 1] = tokens[0]
    law = exact.law(acceptlib.create(strategy), logits[0].softmax(-1), draft_logits[0].softmax(-1))
    assert support.emitted_z(emitted, law, 4) < FALSE_ALARM_Z


def test_signature_of_4_57() -> None:
    """There the fifth argument says that the draft ended the text: no token after it."""
    sequences, draft_logits, logits = candidates(3, 1)
    logits = logits.clone()
    logits[0, [0, 1], sequences[0, 1:]] = 50.0
    with patch():
        tokens, matches = utils._speculative_sampling(sequences, draft_logits, 2, logits, False)  # noqa: FBT003
        assert (tokens.shape[1], int(matches)) == (3, 2)
        tokens, matches = utils._speculative_sampling(sequences, draft_logits, 2, logits, True)  # noqa: FBT003
        assert (tokens.tolist(), int(matches)) == (sequences[:, 1:].tolist(), 1)
    assert tokens.dtype == torch.int64


def test_without_drafts_a_token_comes_from_the_only_row() -> None:
    logits = torch.tensor([[[0.0, 0.0, 99.0, 0.0]]])
    with patch():
        tokens, matches = utils._speculative_sampling(torch.tensor([[0, 1]]), torch.zeros(1, 0, 4), 0, logits)
    assert (tokens.tolist(), int(matches)) == ([[2]], 0)


def test_the_strategy_is_rejection_unless_one_is_named() -> None:
    sequences, draft_logits, logits = candidates(3, 200)
    found = []
    for arguments in ((), ("rejection",), ("block",)):
        torch.manual_seed(1)
        with patch(*arguments):
            found.append([utils._speculative_sampling(row[None], draft_logits, 2, logits)[1] for row in sequences])
    assert found[0] == found[1]
    assert found[0] != found[2]


def raise_inside(strategy: str) -> None:
    with patch(strategy):
        assert utils._speculative_sampling is not ORIGINAL
        msg = "inside"
        raise RuntimeError(msg)


def test_restored_after_an_error_and_when_nested() -> None:
    with pytest.raises(RuntimeError, match="inside"):
        raise_inside("block")
    assert utils._speculative_sampling is ORIGINAL
    with pytest.raises(UnknownStrategyError, match="rejection"):
        raise_inside("rejecton")
    assert utils._speculative_sampling is ORIGINAL
    with pytest.raises(InputError, match="returns, got 5"), patch(5):  # type: ignore[arg-type]
        pass
    with pytest.raises(InputError, match=r"without state, .* got 'relaxed'"), patch(Relaxed()):
        pass
    assert utils._speculative_sampling is ORIGINAL
    with patch("block"):
        outer = utils._speculative_sampling
        with patch("typical"):
            assert utils._speculative_sampling is not outer
        assert utils._speculative_sampling is outer
    with patch(), pytest.raises(StatusError):
        utils._speculative_sampling(torch.tensor([[0, 1]]), torch.zeros(1, 1, 4), 1, torch.full((1, 2, 4), torch.nan))
    assert utils._speculative_sampling is ORIGINAL


def test_what_another_library_puts_there_between_contexts_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    with patch():
        pass

    def another() -> None:
        """Stand for another library's replacement."""

    monkeypatch.setattr(utils, "_speculative_sampling", another)
    with patch():
        assert utils._speculative_sampling is not another
    assert utils._speculative_sampling is another


def test_contexts_of_two_threads_that_overlap() -> None:
    """The one opened last counts, whichever closes first."""
    opened, closed = threading.Event(), threading.Event()

    def work() -> None:
        with patch("typical"):
            opened.set()
            closed.wait()

    thread = threading.Thread(target=work)
    with patch("block"):
        outer = utils._speculative_sampling
        thread.start()
        opened.wait()
        inner = utils._speculative_sampling
    assert inner not in {outer, ORIGINAL}
    assert utils._speculative_sampling is inner
    closed.set()
    thread.join()
    assert utils._speculative_sampling is ORIGINAL


@pytest.mark.skipif(
    not hasattr(transformers.GenerationConfig(), "assistant_ensemble_weight"), reason="a newer version's parameter"
)
def test_ensemble_weight_is_refused(target: Any, draft: Any) -> None:
    with patch(), pytest.raises(InputError, match="mixture"):
        assisted(target, draft, assistant_ensemble_weight=0.5)
    assert utils._speculative_sampling is ORIGINAL


def test_an_ensemble_weight_of_zero_is_refused_too() -> None:
    sequences, draft_logits, logits = candidates(3, 1)
    with patch(), pytest.raises(InputError, match=r"assistant_ensemble_weight=0\.0: expected None"):
        utils._speculative_sampling(sequences, draft_logits, 2, logits, assistant_ensemble_weight=0.0)


def test_a_version_without_the_function_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(utils, "_speculative_sampling")
    with pytest.raises(InputError, match="custom_generate"), patch():
        pass
