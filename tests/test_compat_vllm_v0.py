"""vLLM V0's two samplers as documented: masks, counters, strict mode, and convergence to the target."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import support
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import acceptlib
from acceptlib import AcceptlibError, exact
from acceptlib.compat import _common
from acceptlib.compat.vllm_v0 import RejectionSampler, StrictModeError, TypicalAcceptanceSampler
from acceptlib.errors import InputError, StatusError
from acceptlib.testing.simulation import FALSE_ALARM_Z, world

SAMPLERS = {"rejection": RejectionSampler, "typical": TypicalAcceptanceSampler}
samplers = pytest.mark.parametrize("kind", SAMPLERS)

ACCEPTED = torch.tensor(
    [
        [True, False, True],
        [False, False, False],
        [True, True, False],
        [True, True, True],
        [False, True, False],
    ]
)
"""Which tokens pass, each on its own, and below which of them stand: the example of the sampler's pull request."""

STANDS = torch.tensor(
    [
        [True, False, False],
        [False, False, False],
        [True, True, False],
        [True, True, True],
        [False, False, False],
    ]
)


def inputs(num_requests: int, k: int = 3, vocab: int = 11, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return contested rows as the samplers take them."""
    requests = [support.ordinary(k, vocab, seed + index) for index in range(num_requests)]
    return {
        "target_with_bonus_probs": torch.stack([r.p for r in requests]),
        "bonus_token_ids": torch.arange(num_requests)[:, None] % vocab,
        "draft_probs": torch.stack([r.q for r in requests if r.q is not None]),
        "draft_token_ids": torch.stack([r.ids for r in requests]),
    }


def forced(accepted: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return rows that leave no choice: token 1 passes, token 2 does not, 3 recovers and 4 is the bonus."""
    batch_size = len(accepted)
    ids = torch.where(accepted, 1, 2)
    target = torch.nn.functional.one_hot(torch.where(accepted, 1, 3), 5).float()
    return {
        "target_with_bonus_probs": torch.cat((target, torch.full((batch_size, 1, 5), 0.2)), 1),
        "bonus_token_ids": torch.full((batch_size, 1), 4),
        "draft_probs": torch.nn.functional.one_hot(ids, 5).float(),
        "draft_token_ids": ids,
    }


def passes(sampler: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the sampler's own mask of the tokens that pass."""
    target, ids = given["target_with_bonus_probs"][:, :-1], given["draft_token_ids"]
    if isinstance(sampler, RejectionSampler):
        return sampler._get_accepted(target, given["draft_probs"], ids)
    return sampler._evaluate_accepted_tokens(target, ids)


# Output and counters


@samplers
@pytest.mark.parametrize("bonus", [4, -1], ids=["bonus", "no-bonus"])
@pytest.mark.parametrize("mode", ["lax", "strict"])
def test_accepted_and_stands(kind: str, mode: str, bonus: int) -> None:
    sampler = SAMPLERS[kind](strict_mode=mode == "strict", disable_bonus_tokens=bonus == -1)
    given = forced(ACCEPTED)
    assert torch.equal(passes(sampler, given), ACCEPTED)
    output = sampler(**given)
    assert output.dtype == torch.int64
    expected = torch.full((5, 4), -1)
    expected[:, :3][STANDS] = 1
    stop = STANDS.sum(1)
    expected[torch.arange(5), stop] = torch.tensor([3, 3, 3, bonus, 3])
    assert torch.equal(output, expected)
    assert sampler.num_accepted_tokens == ACCEPTED.sum()
    assert sampler.num_emitted_tokens == (expected >= 0).sum()
    assert sampler.num_draft_tokens == ACCEPTED.numel()


@samplers
def test_counters_add_up(kind: str) -> None:
    sampler = SAMPLERS[kind]()
    assert sampler.num_accepted_tokens is None
    assert sampler.num_emitted_tokens is None
    for _ in range(3):
        sampler(**forced(ACCEPTED))
    assert sampler.num_accepted_tokens is not None
    assert sampler.num_accepted_tokens.dtype == torch.int64
    assert sampler.num_accepted_tokens.shape == torch.Size([])
    assert (int(sampler.num_accepted_tokens), int(sampler.num_emitted_tokens)) == (3 * 8, 3 * 11)
    assert sampler.num_draft_tokens == 3 * 15
    sampler.init_tensors("cpu")
    assert (int(sampler.num_accepted_tokens), int(sampler.num_emitted_tokens), sampler.num_draft_tokens) == (0, 0, 0)
    sampler.init_tensors(torch.device("meta"))
    assert sampler.num_accepted_tokens.device.type == "meta"
    # As vLLM's worker calls it: its rank, and its device for the kind of device.
    sampler.init_tensors(0, device_type=torch.device("cpu"))
    sampler(**forced(ACCEPTED))
    assert int(sampler.num_accepted_tokens) == 8


@samplers
def test_counters_that_were_read_show_what_later_calls_add(kind: str) -> None:
    sampler = SAMPLERS[kind]()
    sampler(**forced(ACCEPTED))
    accepted, emitted = sampler.num_accepted_tokens, sampler.num_emitted_tokens
    sampler(**forced(ACCEPTED))
    assert (int(accepted), int(emitted)) == (2 * 8, 2 * 11)


@pytest.mark.parametrize("name", ["init_tensors", "init_gpu_tensors"])
def test_an_index_of_a_device_is_a_gpu_s(name: str) -> None:
    sampler = RejectionSampler()
    with FakeTensorMode():  # of a device that there need not be
        getattr(sampler, name)(1)
    assert sampler._totals is not None
    assert sampler._totals.device == torch.device("cuda", 1)


@samplers
@pytest.mark.parametrize("made_by", ["init_tensors", "forward"])
def test_counters_made_in_inference_mode_can_be_added_to_outside_of_it(kind: str, made_by: str) -> None:
    sampler = SAMPLERS[kind]()
    with torch.inference_mode():
        if made_by == "init_tensors":
            sampler.init_tensors("cpu")
        sampler(**forced(ACCEPTED))
    sampler(**forced(ACCEPTED))
    assert sampler.num_accepted_tokens == 2 * 8


@samplers
@pytest.mark.parametrize("copied", [copy.deepcopy, support.pickled])
def test_copies(kind: str, copied: Any) -> None:
    sampler = SAMPLERS[kind](strict_mode=True)
    sampler(**forced(ACCEPTED))
    twin = copied(sampler)
    assert torch.equal(twin(**forced(ACCEPTED)), sampler(**forced(ACCEPTED)))
    assert twin.num_accepted_tokens == sampler.num_accepted_tokens == 2 * 8
    twin(**forced(ACCEPTED))
    assert sampler.num_accepted_tokens == 2 * 8


@samplers
def test_a_compiled_caller_may_be_the_first(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_common, "_ZEROS", {})
    given = inputs(4)
    torch.manual_seed(1)
    found = torch.compile(SAMPLERS[kind](), backend="eager")(**given)
    torch.manual_seed(1)
    assert torch.equal(SAMPLERS[kind]()(**given), found)


def test_a_compiled_caller_with_generators() -> None:
    """Of one batch size and another: seeds are drawn in the graph."""
    sampler, source = RejectionSampler(), torch.Generator()
    sampler.init_tensors("cpu")
    compiled = torch.compile(sampler, backend="eager")
    for num_requests in (3, 5):
        outputs = []
        for function in (compiled, sampler):
            torch.manual_seed(1)
            outputs.append(function(**inputs(num_requests), seeded_seqs={0: source.manual_seed(2)}))
        assert torch.equal(*outputs)


@samplers
def test_float64_rows(kind: str) -> None:
    """Read as float32, but in strict mode, which wants float32."""
    given = inputs(30)
    wide = {name: value.double() if value.is_floating_point() else value for name, value in given.items()}
    outputs = []
    for some in (given, wide):
        torch.manual_seed(1)
        outputs.append(torch.cat((SAMPLERS[kind]()(**some), passes(SAMPLERS[kind](), some)), 1))
    assert torch.equal(*outputs)
    with pytest.raises(StrictModeError, match="float32"):
        SAMPLERS[kind](strict_mode=True)(**wide)


@samplers
def test_at_least_one_token_is_emitted(kind: str) -> None:
    output = SAMPLERS[kind]()(**inputs(200))
    emitted = (output >= 0).sum(1)
    assert int(emitted.min()) == 1
    assert int(emitted.max()) == 4
    assert bool((output[torch.arange(4) >= emitted[:, None]] == -1).all())


@samplers
def test_an_empty_batch(kind: str) -> None:
    output = SAMPLERS[kind]()(
        torch.empty(0, 4, 7), torch.empty(0, 1, dtype=torch.int64), torch.empty(0, 3, 7), torch.empty(0, 3).long()
    )
    assert output.shape == (0, 4)
    assert output.dtype == torch.int64
    for num_requests, k in ((0, 3), (2, 0)):
        given = {
            "target_with_bonus_probs": torch.empty(num_requests, k + 1, 7),
            "draft_probs": torch.empty(num_requests, k, 7),
            "draft_token_ids": torch.empty(num_requests, k).long(),
        }
        mask = passes(SAMPLERS[kind](), given)
        assert mask.shape == (num_requests, k)
        assert mask.dtype == torch.bool


@samplers
@pytest.mark.parametrize("strict", [False, True], ids=["lax", "strict"])
def test_rows_without_the_bonus_row(kind: str, *, strict: bool) -> None:
    """What the first version took: the bonus token is given, so its row is not needed."""
    given, sampler = inputs(30), SAMPLERS[kind](strict_mode=strict)
    torch.manual_seed(1)
    expected = sampler(**given)
    torch.manual_seed(1)
    given["target_with_bonus_probs"] = given["target_with_bonus_probs"][:, :-1]
    assert torch.equal(sampler(**given), expected)


def test_thresholds_are_read_and_not_set() -> None:
    sampler = TypicalAcceptanceSampler(0.2, 0.4)
    assert (sampler._posterior_threshold, sampler._posterior_alpha) == (0.2, 0.4)
    for name in ("_posterior_threshold", "_posterior_alpha"):
        with pytest.raises(AttributeError):
            setattr(sampler, name, 0.0)


@samplers
def test_nothing_of_the_callers_is_written(kind: str) -> None:
    given = inputs(5)
    before = {name: value.clone() for name, value in given.items()}
    SAMPLERS[kind](strict_mode=True)(**given)
    assert all(torch.equal(value, before[name]) for name, value in given.items())


# Strict mode

BROKEN: dict[str, tuple[str, Any]] = {
    "target-rows": ("target_with_bonus_probs", lambda x: x[:, :-2]),
    "target-dimensions": ("target_with_bonus_probs", lambda x: x[0]),
    "target-vocabulary": ("target_with_bonus_probs", lambda x: x[..., :-1]),
    "target-dtype": ("target_with_bonus_probs", lambda x: x.half()),
    "draft-shape": ("draft_probs", lambda x: x[:-1]),
    "draft-dtype": ("draft_probs", lambda x: x.bfloat16()),
    "draft-device": ("draft_probs", lambda x: x.to("meta")),
    "ids-dimensions": ("draft_token_ids", lambda x: x[0]),
    "ids-dtype": ("draft_token_ids", lambda x: x.int()),
    "ids-negative": ("draft_token_ids", lambda x: x - 11),
    "ids-above": ("draft_token_ids", lambda x: x + 11),
    "ids-list": ("draft_token_ids", lambda x: x.tolist()),
    "bonus-shape": ("bonus_token_ids", lambda x: x.expand(-1, 2)),
    "bonus-dtype": ("bonus_token_ids", lambda x: x.int()),
    "bonus-negative": ("bonus_token_ids", lambda x: x - 11),
    "bonus-above": ("bonus_token_ids", lambda x: x + 11),
}


NOT_READ = {"target-vocabulary", "draft-shape", "draft-dtype", "draft-device"}
"""Cases that need the draft's probabilities to be seen, which typical acceptance does not read."""


@pytest.mark.parametrize(
    ("kind", "case"), [(k, c) for k in SAMPLERS for c in BROKEN if k == "rejection" or c not in NOT_READ]
)
def test_strict_mode_raises(kind: str, case: str) -> None:
    name, spoil = BROKEN[case]
    given = inputs(4)
    given[name] = spoil(given[name])
    sampler = SAMPLERS[kind](strict_mode=True)
    torch.manual_seed(6)
    before = torch.get_rng_state()
    with pytest.raises(StrictModeError, match="expected") as caught:
        sampler(**given)
    assert torch.equal(torch.get_rng_state(), before)
    assert isinstance(caught.value, AssertionError)
    assert isinstance(caught.value, AcceptlibError)
    assert sampler.num_draft_tokens == 0


def test_a_flag_is_no_threshold() -> None:
    with pytest.raises(InputError, match="posterior_threshold: expected a number, got True; strict_mode is the third"):
        TypicalAcceptanceSampler(True)  # noqa: FBT003 - what it is told of


@samplers
def test_rows_that_are_no_law(kind: str) -> None:
    """Strict mode raises; without it the request alone is left without a token, and its neighbours are the same."""
    given = inputs(6)
    given["draft_token_ids"][2, 0] = given["target_with_bonus_probs"][2, 0].argmax()
    torch.manual_seed(4)
    clean = SAMPLERS[kind]()(**given)
    given["target_with_bonus_probs"][2, 0] = math.nan
    torch.manual_seed(4)
    output = SAMPLERS[kind]()(**given)
    assert output[2].tolist() == [-1] * 4
    others = torch.arange(6) != 2
    assert torch.equal(output[others], clean[others])
    strict = SAMPLERS[kind](strict_mode=True)
    with pytest.raises(StatusError, match="request 2, position 0"):
        strict(**given)
    counters = (strict.num_accepted_tokens, strict.num_emitted_tokens, strict.num_draft_tokens)
    assert counters == (0, 0, 0)  # as of a step that was not taken


@pytest.mark.parametrize(
    ("row", "token"),
    [
        ([0.0, 0.8, 0.3, 0.2], 1),  # sums to 1.3, as rows of vLLM's own tests do
        ([0.0, 0.6, 0.2, -3.0], 1),
        ([0.0, 0.6, 0.2, -math.inf], 1),
        ([0.0, 0.0, 0.0, 0.0], -1),
        ([0.0, 0.6, math.nan, 0.4], -1),
        ([0.0, 0.6, math.inf, 0.4], -1),
    ],
)
def test_typical_takes_the_argmax_of_any_row_that_has_one(row: list[float], token: int) -> None:
    """Nothing is drawn, so what a row sums to does not matter."""
    rows = torch.tensor([[row, [0.25] * 4]])
    drafted, bonus = torch.tensor([[0]]), torch.tensor([[3]])
    assert TypicalAcceptanceSampler()(rows, bonus, None, drafted).tolist() == [[token, -1]]


@samplers
def test_shapes_that_do_not_fit_raise_without_strict_mode(kind: str) -> None:
    given = inputs(4)
    given["bonus_token_ids"] = given["bonus_token_ids"][:-1]
    with pytest.raises(InputError, match="bonus_token_ids"):
        SAMPLERS[kind]()(**given)
    with pytest.raises(InputError, match=r"bonus_token_ids: .* got NoneType"):
        SAMPLERS[kind]()(**given | {"bonus_token_ids": None})
    with pytest.raises(InputError, match=r"target_with_bonus_probs: .* got ndarray"):
        SAMPLERS[kind]()(**given | {"target_with_bonus_probs": given["target_with_bonus_probs"].numpy()})
    with pytest.raises(InputError, match=r"bonus_token_ids: .* got a nested one"):
        SAMPLERS[kind]()(**given | {"bonus_token_ids": support.NESTED})
    given["draft_token_ids"] = given["draft_token_ids"][0]
    with pytest.raises(InputError, match=r"draft_token_ids: expected a tensor \[B, k\], got \[3\]"):
        SAMPLERS[kind]()(**given)


@samplers
@pytest.mark.parametrize("name", ["target_with_bonus_probs", "bonus_token_ids", "draft_token_ids"])
def test_strict_mode_refuses_what_is_no_tensor(kind: str, name: str) -> None:
    sampler = SAMPLERS[kind](strict_mode=True)
    for other in (None, 3, support.NESTED):
        with pytest.raises(StrictModeError, match=f"{name}: expected a torch.Tensor, got"):
            sampler(**inputs(4) | {name: other})


def test_draft_probs_that_are_no_tensor() -> None:
    with pytest.raises(InputError, match=r"draft_probs: .* got int"):
        RejectionSampler()(**inputs(4) | {"draft_probs": 3})


@pytest.mark.parametrize("strict", [False, True], ids=["lax", "strict"])
def test_rejection_needs_the_rows_that_drafts_came_from(strict: bool) -> None:  # noqa: FBT001
    """Without them it would take sampled drafts for one-hot ones, and follow another law."""
    given = inputs(4) | {"draft_probs": None}
    with pytest.raises(InputError, match=r"draft_probs: expected .* got None"):
        RejectionSampler(strict_mode=strict)(**given)


# Rejection


def distance_after(num_samples: int, target: torch.Tensor, draft: torch.Tensor) -> torch.Tensor:
    """Return the law of the first token of many samples, estimated by a sampler."""
    ids = torch.multinomial(draft, num_samples, replacement=True)[:, None]
    output = RejectionSampler()(
        target.expand(num_samples, 2, -1),
        torch.zeros(num_samples, 1, dtype=torch.int64),
        draft.expand(num_samples, 1, -1),
        ids,
    )
    return torch.bincount(output[:, 0], minlength=len(target)) / num_samples


def test_convergence_to_the_target_and_to_nothing_else() -> None:
    """With 100 times the samples, the distance to the target falls about 10-fold, and to another law it stays."""
    torch.manual_seed(8)
    vocab = 30
    ratios, other = [], []
    for _ in range(10):
        draft, target, reference = torch.rand(3, vocab).softmax(-1)
        few, many = (distance_after(n, target, draft) for n in (500, 50_000))
        ratios.append(float((few - target).norm() / (many - target).norm()))
        other.append(float((few - reference).norm() / (many - reference).norm()))
    assert 7 < sum(ratios) / len(ratios) < 14
    assert sum(other) / len(other) < 2


def test_law_of_rejection() -> None:
    """Whole emitted sequences, with bonus tokens drawn from the last row."""
    where, trials = world(3), 60_000
    p, q = where.target_logits[:4].softmax(-1), where.draft_logits[:3].softmax(-1)
    torch.manual_seed(4)
    ids = torch.stack([torch.multinomial(row, trials, replacement=True) for row in q], 1)
    bonus = torch.multinomial(p[-1], trials, replacement=True)[:, None]
    output = RejectionSampler()(p.expand(trials, -1, -1), bonus, q.expand(trials, -1, -1), ids)
    assert support.emitted_z(output, exact.law(acceptlib.create("rejection"), p, q), 4) < FALSE_ALARM_Z


def test_masks_pass_with_the_ratio() -> None:
    """`_get_accepted` of one pair of rows, many times: min(1, p / q), within six standard deviations."""
    p, q = torch.tensor([0.1, 0.6, 0.3]), torch.tensor([0.4, 0.2, 0.4])
    torch.manual_seed(9)
    for token, h in enumerate((0.25, 1.0, 0.75)):
        ids = torch.full((10_000, 2), token)
        mask = RejectionSampler()._get_accepted(p.expand(10_000, 2, -1), q.expand(10_000, 2, -1), ids)
        assert abs(float(mask.double().mean()) - h) <= 6 * math.sqrt(h * (1 - h) / mask.numel())


def test_generators_of_rows_that_the_batch_lacks_are_passed_over() -> None:
    given, before = inputs(3), support.generator(1).get_state()
    elsewhere = {row: support.generator(1) for row in (-1, 3)}
    outputs = []
    for seeded in ({1: support.generator(2)}, {**elsewhere, 1: support.generator(2)}):
        torch.manual_seed(0)
        outputs.append([RejectionSampler()(**given, seeded_seqs=seeded) for _ in range(20)])
    assert all(torch.equal(one, other) for one, other in zip(*outputs, strict=True))
    assert all(torch.equal(generator.get_state(), before) for generator in elsewhere.values())


def test_seeded_requests_do_not_depend_on_their_neighbours() -> None:
    """vllm#10863: a request with a generator, wherever it is in the batch, and whatever the others are."""
    given = inputs(8, seed=5)

    def run(order: list[int], seeded: set[int]) -> list[torch.Tensor]:
        sampler, generators = RejectionSampler(), {b: support.generator(b) for b in seeded}
        some = {name: value[order] for name, value in given.items()}
        seeded_seqs = {order.index(b): generator for b, generator in generators.items() if b in order}
        return [sampler(**some, seeded_seqs=seeded_seqs) for _ in range(30)]

    torch.manual_seed(1)
    first = run(list(range(8)), {1, 3, 6})
    order = [6, 7, 3, 0, 1]
    again = run(order, {1, 3, 6})
    for b in (1, 3, 6):
        for left, right in zip(first, again, strict=True):
            assert torch.equal(left[b], right[order.index(b)])
        assert len({tuple(step[b].tolist()) for step in first}) > 1
    assert any(not torch.equal(left[7], right[1]) for left, right in zip(first, again, strict=True))


def test_generators_of_rows_that_the_batch_does_not_have_are_passed_over() -> None:
    """vLLM's worker numbers them in a batch that also holds the requests without drafts."""
    given = inputs(4)
    generators = {row: support.generator(row) for row in (1, 4, 7)}
    runs = []
    for seeded in (generators, {1: support.generator(1)}):
        torch.manual_seed(1)
        runs.append(RejectionSampler()(**given, seeded_seqs=seeded))
    assert torch.equal(*runs)
    assert torch.equal(generators[7].get_state(), support.generator(7).get_state())


def test_a_seed_is_no_generator() -> None:
    with pytest.raises(InputError, match=r"generators: expected a torch\.Generator for request 0, got 1"):
        RejectionSampler()(**inputs(2), seeded_seqs={0: 1})  # type: ignore[dict-item]


def test_runs_reproduce() -> None:
    given = inputs(30)
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        sampler = RejectionSampler()
        runs.append([sampler(**given) for _ in range(2)])
    assert torch.equal(runs[0][0], runs[1][0])
    assert torch.equal(runs[0][1], runs[1][1])
    assert not torch.equal(*runs[0])


# Typical


@pytest.mark.parametrize(("threshold", "alpha"), [(0.09, 0.3), (0.3, 0.09), (0.02, 2.0), (1.0, 1.0), (5.0, 1.0)])
def test_typical_is_the_documented_formula(threshold: float, alpha: float) -> None:
    given = inputs(300, vocab=30)
    sampler = TypicalAcceptanceSampler(threshold, alpha, True)  # noqa: FBT003 - vLLM's order
    target, ids = given["target_with_bonus_probs"][:, :-1], given["draft_token_ids"]
    before = torch.get_rng_state()
    p = target.double()
    entropy = -(p * (p + 1e-5).log()).sum(-1)
    limit = ((-entropy).exp() * alpha).clamp(max=threshold)
    accepted = p.gather(-1, ids[..., None])[..., 0] > limit
    assert torch.equal(sampler._evaluate_accepted_tokens(target, ids), accepted)
    recovered = sampler._get_recovered_token_ids(target)
    assert recovered.dtype == torch.int64
    assert torch.equal(recovered, target.argmax(-1))
    stop = accepted.long().cumprod(1).sum(1)
    expected = torch.where(torch.arange(4) < stop[:, None], torch.nn.functional.pad(ids, (0, 1)), -1)
    last = torch.cat((recovered, given["bonus_token_ids"]), 1).gather(1, stop[:, None])
    expected.scatter_(1, stop[:, None], last)
    output = sampler(given["target_with_bonus_probs"], given["bonus_token_ids"], None, ids)
    assert torch.equal(output, expected)
    assert sampler.num_accepted_tokens == accepted.sum()
    order = torch.randperm(300, generator=support.generator(1))
    assert torch.equal(sampler(**{name: value[order] for name, value in given.items()}), expected[order])
    assert torch.equal(torch.get_rng_state(), before)  # nothing was drawn


def test_masks_of_ids_with_strides() -> None:
    given = inputs(6)
    ids = given["draft_token_ids"].t().contiguous().t()
    assert not ids.is_contiguous()
    sampler = TypicalAcceptanceSampler()
    assert torch.equal(passes(sampler, given | {"draft_token_ids": ids}), passes(sampler, given))


@pytest.mark.parametrize(("threshold", "alpha"), [(0.0, 0.3), (0.09, 0.0)])
def test_a_threshold_of_zero_lets_every_possible_token_pass(threshold: float, alpha: float) -> None:
    rows, ids = torch.tensor([0.999, 0.001, 0.0]).expand(3, 1, 3), torch.tensor([[0], [1], [2]])
    sampler = TypicalAcceptanceSampler(threshold, alpha)
    assert sampler._evaluate_accepted_tokens(rows, ids).tolist() == [[True], [True], [False]]


def test_typical_extremes() -> None:
    """A certain row takes its token alone; a flat one takes anything, for its threshold is small."""
    flat = torch.full((3, 2, 50), 1 / 50)
    ids = torch.tensor([[0], [25], [49]])
    sampler = TypicalAcceptanceSampler(strict_mode=True)
    assert sampler._evaluate_accepted_tokens(flat[:, :1], ids).all()
    certain = torch.nn.functional.one_hot(ids.expand(-1, 2), 50).float()
    bonus = torch.tensor([[7], [8], [9]])
    assert sampler(certain, bonus, None, ids).tolist() == [[0, 7], [25, 8], [49, 9]]
    assert sampler(certain, bonus, None, ids - ids % 2 + 1).tolist() == [[0, -1], [25, 8], [49, 9]]


@samplers
def test_a_sampler_first_called_in_inference_mode_counts_outside_of_it(kind: str) -> None:
    sampler = SAMPLERS[kind](strict_mode=True, disable_bonus_tokens=True)
    given = forced(ACCEPTED)
    with torch.inference_mode():
        sampler(**given)
    once = sampler.num_emitted_tokens.item()
    sampler(**given)
    assert sampler.num_emitted_tokens.item() == 2 * once


@samplers
@pytest.mark.parametrize("name", ["draft_token_ids", "bonus_token_ids"])
@pytest.mark.parametrize("token", [-1, 5])
def test_strict_mode_refuses_the_nearest_ids_outside_the_vocabulary(kind: str, name: str, token: int) -> None:
    given = forced(ACCEPTED)
    given[name][0, 0] = token
    with pytest.raises(StrictModeError, match=rf"{name}: expected ids in \[0, 5\)"):
        SAMPLERS[kind](strict_mode=True)(**given)


@pytest.mark.parametrize(("alpha", "passing"), [(0.45, True), (0.8, False)])
def test_the_guard_of_the_logarithm_is_that_of_vllm(alpha: float, passing: bool) -> None:  # noqa: FBT001
    """Of 100000 equal entries the law is exp(-entropy) = 1e-5, and with the guard 2e-5."""
    sampler = TypicalAcceptanceSampler(posterior_alpha=alpha)
    rows, ids = torch.full((1, 1, 100_000), 1e-5), torch.tensor([[3]])
    assert sampler._evaluate_accepted_tokens(rows, ids).tolist() == [[passing]]


def test_a_token_as_likely_as_the_threshold_does_not_pass() -> None:
    rows, ids = torch.full((1, 1, 4), 0.25), torch.tensor([[3]])
    for threshold, passing in ((0.25, False), (0.2499, True)):
        sampler = TypicalAcceptanceSampler(posterior_threshold=threshold, posterior_alpha=10.0)
        assert sampler._evaluate_accepted_tokens(rows, ids).tolist() == [[passing]]


def test_numbers_of_typical_acceptance_are_those_of_vllm() -> None:
    sampler = TypicalAcceptanceSampler()
    assert (sampler._posterior_threshold, sampler._posterior_alpha) == (0.09, 0.3)


@pytest.mark.parametrize("name", ["posterior_threshold", "posterior_alpha"])
@pytest.mark.parametrize("number", [-0.1, math.inf, math.nan])
def test_numbers_of_typical_acceptance_out_of_range(name: str, number: float) -> None:
    with pytest.raises(acceptlib.errors.OptionError, match=f"option '{name}'"):
        TypicalAcceptanceSampler(**{name: number})
