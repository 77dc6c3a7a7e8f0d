"""naive-speculate's two functions as documented, without the probability that leaks onto impossible tokens."""

from __future__ import annotations

import pytest
import support
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import acceptlib
from acceptlib.compat import _common
from acceptlib.compat.naive_speculate import greedy_match, speculative_sampling
from acceptlib.errors import InputError
from acceptlib.testing.simulation import FALSE_ALARM_Z, chi_square_z, world


def scalars(result: tuple[torch.Tensor, torch.Tensor]) -> tuple[int, int]:
    """Return both numbers; they must be int64 tensors of empty shape."""
    for value in result:
        assert value.shape == torch.Size([])
        assert value.dtype == torch.int64
    return int(result[0]), int(result[1])


def one_hot(*tokens: int, vocab: int = 5) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(tokens), vocab).float()


@pytest.mark.parametrize("num_accepted", range(4))
def test_index_ranges_up_to_the_number_of_drafts(num_accepted: int) -> None:
    """Rows that leave no choice: the first rejected index, or K, and the only token possible there."""
    target = one_hot(1, 2, 3, 4)
    candidates = torch.tensor([1, 2, 3])
    candidates[num_accepted:] = 0
    expected = (num_accepted, num_accepted + 1)
    assert scalars(greedy_match(target, candidates)) == expected
    draft = one_hot(*candidates.tolist())
    assert scalars(speculative_sampling(target, draft, candidates)) == expected


def test_greedy_match_is_the_argmax() -> None:
    for seed in range(50):
        request = support.ordinary(4, 6, seed)
        best = request.p.argmax(-1)
        rejected = next((i for i in range(4) if best[i] != request.ids[i]), 4)
        assert scalars(greedy_match(request.p, request.ids)) == (rejected, int(best[rejected]))
    assert scalars(greedy_match(torch.tensor([[0.4, 0.4, 0.2], [0.2, 0.4, 0.4]]), torch.tensor([0]))) == (1, 1)
    for logits in ([[-6.0, -5.0], [-7.0, -30.0], [-2.0, -1.0]], [[-1.0, 0.0], [0.0, -torch.inf], [-torch.inf, -9.0]]):
        assert scalars(greedy_match(torch.tensor(logits), torch.tensor([1, 0]))) == (2, 1)


def test_law_of_the_first_token() -> None:
    """The accepted token, or the resampled one, follows the target; so does the token after an acceptance."""
    where = world(3)
    p, q = where.target_logits[:2].softmax(-1), where.draft_logits[:1].softmax(-1)
    torch.manual_seed(2)
    candidates = torch.multinomial(q[0], 1500, replacement=True)
    first, second = torch.zeros(4), torch.zeros(4)
    for candidate in candidates:
        rejected, token = scalars(speculative_sampling(p, q, candidate[None]))
        first[candidate if rejected else token] += 1
        if rejected:
            second[token] += 1
    assert chi_square_z(first, p[0]) < FALSE_ALARM_Z
    assert chi_square_z(second, p[1]) < FALSE_ALARM_Z


def test_impossible_tokens_are_never_resampled() -> None:
    """The residual is 2^-22 on one token: 1e-9 on each of a thousand impossible ones would outweigh it."""
    target, draft = torch.zeros(2, 1000), torch.zeros(1, 1000)
    target[:, 0] = 1.0
    draft[0, 0], draft[0, 2] = 1 - 2.0**-22, 2.0**-22
    torch.manual_seed(0)
    for _ in range(300):
        assert scalars(speculative_sampling(target, draft, torch.tensor([2]))) == (0, 0)


def test_runs_reproduce_and_calls_differ() -> None:
    request = support.ordinary(4, 50, 1)
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        runs.append([scalars(speculative_sampling(request.p, request.q, request.ids)) for _ in range(20)])
    assert runs[0] == runs[1]
    assert len(set(runs[0])) > 1


def test_drafts_are_decided_on_by_rejection() -> None:
    """By the same numbers as the strategy: `block` has the same law of each token, and other rejected indices."""
    strategy = acceptlib.create("rejection")
    for seed in range(50):
        request = support.ordinary(4, 6, seed)
        assert request.q is not None
        torch.manual_seed(seed)
        found = scalars(speculative_sampling(request.p, request.q, request.ids))
        torch.manual_seed(seed)
        result = strategy.verify(request.ids[None], target_probs=request.p[None], draft_probs=request.q[None])
        rejected = int(result.num_accepted)
        assert found == (rejected, int(result.output_token_ids[0, rejected]))


def test_greedy_match_draws_nothing() -> None:
    request = support.ordinary(4, 6, 0)
    before = torch.get_rng_state()
    greedy_match(request.p, request.ids)
    assert torch.equal(torch.get_rng_state(), before)


def test_dtypes_and_no_drafts() -> None:
    request = support.ordinary(3, 9, 2)
    assert request.q is not None
    results = []
    for p, q, ids in (
        (request.p, request.q, request.ids),
        (request.p.double(), request.q.double(), request.ids.int()),
    ):
        torch.manual_seed(1)
        results.append((scalars(speculative_sampling(p, q, ids)), scalars(greedy_match(p, ids))))
    assert results[0] == results[1]
    none = torch.empty(0, dtype=torch.int64)
    assert scalars(greedy_match(one_hot(3), none)) == (0, 3)
    assert scalars(speculative_sampling(one_hot(3), torch.empty(0, 5), none)) == (0, 3)


def test_a_row_of_nan_gives_no_token() -> None:
    request = support.ordinary(2, 9, 2)
    request.p[0] = torch.nan
    assert scalars(speculative_sampling(request.p, request.q, request.ids)) == (0, -1)
    assert scalars(greedy_match(request.p, request.ids)) == (0, -1)


def test_no_rows_is_an_error() -> None:
    ids = torch.tensor([1])
    with pytest.raises(InputError, match=r"target_dists: expected a tensor \[K\+1, V\], got NoneType"):
        greedy_match(None, ids)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"target_dists: expected a tensor \[K\+1, V\], got NoneType"):
        speculative_sampling(None, torch.ones(1, 1), ids)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"proposal_dists: expected a tensor \[K, V\], got NoneType"):
        speculative_sampling(torch.ones(2, 1), None, ids)  # type: ignore[arg-type]


def test_a_batch_is_an_error() -> None:
    request = support.ordinary(2, 9, 2)
    for ids in (request.ids[None], request.ids[0]):
        with pytest.raises(InputError, match=r"candidate_tokens: expected a tensor \[K\]"):
            speculative_sampling(request.p[None], request.q[None], ids)
        with pytest.raises(InputError, match=r"candidate_tokens: expected a tensor \[K\]"):
            greedy_match(request.p[None], ids)


def test_what_a_fake_tensor_leaves_behind_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_common, "_ZEROS", {})
    p, ids = torch.full((3, 4), 0.25), torch.zeros(2, dtype=torch.int64)
    with FakeTensorMode() as mode:
        found = greedy_match(mode.from_tensor(p), mode.from_tensor(ids))
    assert [number.shape for number in found] == [(), ()]
    assert _common._ZEROS == {}
    assert scalars(greedy_match(p, ids)) == (2, 0)


def test_the_zero_that_is_kept_is_one_for_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_common, "_ZEROS", {})
    devices = [torch.device("meta"), torch.device("cpu")]
    assert [_common.zero(device).device for device in devices] == devices


def test_a_generator_s_seed_has_63_bits() -> None:
    """Fewer would give two requests of a busy engine one stream."""
    generators = {row: support.generator(row) for row in range(64)}
    streams = _common.request_streams(generators, 64, torch.device("cpu"))
    assert streams is not None
    assert 2**61 < int(streams.seeds.max()) < 2**63


@pytest.mark.parametrize("name", ["greedy_match", "speculative_sampling"])
def test_a_compiled_caller_may_be_the_first(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a process keeps from call to call is made while the graph is traced, and used outside of it after."""
    monkeypatch.setattr(_common, "_ZEROS", {})
    monkeypatch.setattr(_common, "_STRATEGIES", {})
    request = support.ordinary(3, 9, 2)
    assert request.q is not None
    function, rows = {
        "greedy_match": (greedy_match, (request.p,)),
        "speculative_sampling": (speculative_sampling, (request.p, request.q)),
    }[name]
    torch.manual_seed(1)
    found = scalars(torch.compile(function, backend="eager")(*rows, request.ids))
    assert _common._ZEROS == {}  # a tensor of the graph's memory is the graph's own
    torch.manual_seed(1)
    assert scalars(function(*rows, request.ids)) == found
