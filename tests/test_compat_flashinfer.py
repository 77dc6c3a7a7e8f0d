"""FlashInfer's chain speculative sampling as documented, and the bugs that shipped in it."""

from __future__ import annotations

import functools
import math
import re
from typing import Any

import numpy as np
import pytest
import support
import torch

import acceptlib
from acceptlib import exact
from acceptlib.compat import flashinfer
from acceptlib.compat.flashinfer import chain_speculative_sampling
from acceptlib.errors import InputError
from acceptlib.testing.simulation import FALSE_ALARM_Z, world

TRIALS = 60_000


def batch(num_requests: int, most: int = 3, vocab: int = 11, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return contested rows as FlashInfer takes them."""
    requests = [support.ordinary(most, vocab, seed + index) for index in range(num_requests)]
    return {
        "draft_probs": torch.stack([r.q for r in requests if r.q is not None]),
        "draft_token_ids": torch.stack([r.ids for r in requests]).int(),
        "target_probs": torch.stack([r.p for r in requests]),
    }


def alike(num_requests: int) -> dict[str, torch.Tensor]:
    """Return one request many times over, its tokens drafted anew each time."""
    where = world(3)
    p, q = where.target_logits[:4].softmax(-1), where.draft_logits[:3].softmax(-1)
    source = support.generator(3)
    ids = [torch.multinomial(row, num_requests, replacement=True, generator=source) for row in q]
    return {
        "draft_probs": q.expand(num_requests, -1, -1),
        "draft_token_ids": torch.stack(ids, 1).int(),
        "target_probs": p.expand(num_requests, -1, -1),
    }


def same(left: tuple[torch.Tensor, ...], right: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("options", [{}, {"offset": 3}], ids=["generator", "generator and offset"])
def test_a_compiled_caller_with_a_generator(options: dict[str, int]) -> None:
    """Of one batch size and another: seeds are drawn between the graphs."""
    source = torch.Generator()
    call = functools.partial(chain_speculative_sampling, generator=source, **options)
    compiled = torch.compile(call, backend="eager")
    for num_requests in (3, 5):
        given = batch(num_requests)
        source.manual_seed(1)
        found = compiled(**given)
        source.manual_seed(1)
        assert same(found, call(**given))


def test_documented_example() -> None:
    torch.manual_seed(42)
    draft_probs = torch.tensor([[[0.1, 0.2, 0.3, 0.4], [0.2, 0.3, 0.4, 0.1]]])
    draft_token_ids = torch.tensor([[2, 1]], dtype=torch.int32)
    target_probs = torch.tensor([[[0.0, 0.1, 0.6, 0.3], [1.0, 0.0, 0.0, 0.0], [0.7, 0.1, 0.1, 0.1]]])
    output_token_ids, output_accepted_token_num, output_emitted_draft_token_num = (
        flashinfer.sampling.chain_speculative_sampling(draft_probs, draft_token_ids, target_probs)
    )
    assert output_token_ids.tolist() == [[2, 0, -1]]
    assert output_token_ids.dtype == torch.int32
    assert output_accepted_token_num.tolist() == [1]
    assert output_emitted_draft_token_num.tolist() == [1]
    assert output_accepted_token_num.dtype == output_emitted_draft_token_num.dtype == torch.int32


def test_counts_are_added_in_place_and_returned() -> None:
    rows = batch(5)
    plain = chain_speculative_sampling(**rows, seed=1, offset=0)
    for dtype in (torch.int32, torch.int64):
        accepted, emitted = torch.arange(5, dtype=dtype), torch.arange(5, 10, dtype=dtype)
        result = chain_speculative_sampling(
            **rows,
            maybe_output_accepted_token_num=accepted,
            maybe_output_emitted_draft_token_num=emitted,
            seed=1,
            offset=0,
        )
        assert result[1] is accepted
        assert result[2] is emitted
        assert torch.equal(accepted, plain[1] + torch.arange(5))
        assert torch.equal(emitted, plain[2] + torch.arange(5, 10))


def test_accepted_count_takes_each_token_on_its_own() -> None:
    """Every position whose u q < p, of the numbers that decide; the emitted count stops at the first that fails."""
    rows = batch(200, most=5)
    seed = torch.arange(200)
    tokens, accepted, emitted = chain_speculative_sampling(**rows, seed=seed, offset=7)
    uniforms = acceptlib.Rng(seeds=seed, offsets=torch.full((200,), 7)).uniforms(5).accept
    index = rows["draft_token_ids"].long()[..., None]
    p = rows["target_probs"][:, :-1].gather(-1, index)[..., 0].double()
    q = rows["draft_probs"].gather(-1, index)[..., 0].double()
    passes = uniforms * q < p
    assert accepted.tolist() == passes.sum(1).tolist()
    assert emitted.tolist() == passes.long().cumprod(1).sum(1).tolist()
    assert emitted.tolist() == ((tokens >= 0).sum(1) - 1).tolist()
    assert bool((accepted > emitted).any())


@pytest.mark.parametrize("source", ["default", "generator", "int-seed", "tensor-seed", "per-request"])
def test_law(source: str) -> None:
    """Joint law of whole emitted sequences, whatever the numbers come from: rows must not share them."""
    rows = alike(TRIALS)
    torch.manual_seed(5)
    options: dict[str, Any] = {
        "default": {},
        "generator": {"generator": support.generator(6)},
        "int-seed": {"seed": 7, "offset": 3},
        "tensor-seed": {"seed": torch.tensor([8]), "offset": torch.tensor([3])},
        "per-request": {"seed": torch.arange(TRIALS) * 3, "offset": torch.arange(TRIALS) % 5},
    }[source]
    tokens, _, _ = chain_speculative_sampling(**rows, **options)
    law = exact.law(acceptlib.create("rejection"), rows["target_probs"][0], rows["draft_probs"][0])
    assert support.emitted_z(tokens, law, 4) < FALSE_ALARM_Z


def test_int_and_tensor_seeds_agree() -> None:
    rows = batch(6)
    expected = chain_speculative_sampling(**rows, seed=2**64 - 3, offset=9)
    assert same(expected, chain_speculative_sampling(**rows, seed=-3, offset=9))
    for dtype in (torch.int64, torch.uint64):
        seed = torch.tensor([-3]).view(dtype)
        assert same(expected, chain_speculative_sampling(**rows, seed=seed, offset=torch.tensor([9], dtype=dtype)))
        assert same(expected, chain_speculative_sampling(**rows, seed=seed, offset=9))
    assert same(chain_speculative_sampling(**rows, seed=4), chain_speculative_sampling(**rows, seed=4, offset=0))
    assert same(expected, chain_speculative_sampling(**rows, seed=np.uint64(2**64 - 3), offset=np.int32(9)))


def test_a_seed_sets_many_rows_apart() -> None:
    """Row b's numbers are those of the batch's first rows, however many there are: offsets must not overflow."""
    size = 1 << 20
    rows = {
        "draft_probs": torch.ones(size, 1, 1),
        "draft_token_ids": torch.zeros(size, 1, dtype=torch.int32),
        "target_probs": torch.full((size, 2, 2), 0.5),
    }
    tokens = chain_speculative_sampling(**rows, seed=7)[0]
    few = {name: value[:5] for name, value in rows.items()}
    assert torch.equal(tokens[:5], chain_speculative_sampling(**few, seed=7)[0])
    assert not torch.equal(tokens[: size // 2], tokens[size // 2 :])
    assert abs(float((tokens[:, 1] == -1).double().mean()) - 0.5) < FALSE_ALARM_Z * 0.5 / math.sqrt(size)


def test_every_seed_and_offset_is_read() -> None:
    """flashinfer#4861: only seed[0] was read."""
    rows = alike(64)
    base = chain_speculative_sampling(**rows, seed=torch.zeros(64).long(), offset=0)[0]
    for options in (
        {"seed": torch.arange(64), "offset": 0},
        {"seed": torch.zeros(64).long(), "offset": torch.arange(64)},
    ):
        other = chain_speculative_sampling(**rows, **options)[0]  # type: ignore[arg-type]
        assert torch.equal(other[0], base[0])
        assert not torch.equal(other[1:], base[1:])


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64])
def test_permuting_a_batch_permutes_the_result(dtype: torch.dtype) -> None:
    """A request with a seed of its own does not depend on its row, nor on its neighbours."""
    rows = batch(9)
    seed, offset = torch.arange(9).view(dtype), (torch.arange(9) % 4).view(dtype)
    result = chain_speculative_sampling(**rows, seed=seed, offset=offset)
    order = torch.randperm(9, generator=support.generator(1))
    for chosen in (order, torch.tensor([4, 2])):
        some = {name: value[chosen] for name, value in rows.items()}
        own = {
            "seed": seed.view(torch.int64)[chosen].view(dtype),
            "offset": offset.view(torch.int64)[chosen].view(dtype),
        }
        assert same(tuple(part[chosen] for part in result), chain_speculative_sampling(**some, **own))


def test_runs_reproduce_and_calls_differ() -> None:
    rows = batch(40)
    for options in ({"seed": 5, "offset": 2}, {"seed": torch.arange(40), "offset": torch.arange(40)}):
        first = chain_speculative_sampling(**rows, **options)  # type: ignore[arg-type]
        assert same(first, chain_speculative_sampling(**rows, **options))  # type: ignore[arg-type]
    sequences = []
    for _ in range(2):
        source = support.generator(4)
        sequences.append([chain_speculative_sampling(**rows, generator=source)[0] for _ in range(2)])
    assert all(torch.equal(a, b) for a, b in zip(*sequences, strict=True))
    assert not torch.equal(*sequences[0])
    steps = [chain_speculative_sampling(**rows, seed=5, offset=offset)[0] for offset in (0, 1)]
    assert not torch.equal(*steps)


def test_nothing_of_the_callers_is_written() -> None:
    rows = batch(4)
    given = {**rows, "seed": torch.arange(4), "offset": torch.arange(4)}
    before = {name: value.clone() for name, value in given.items()}
    chain_speculative_sampling(**given)
    assert all(torch.equal(value, before[name]) for name, value in given.items())


@pytest.mark.parametrize("name", ["seed", "offset"])
@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(3).long(),
        torch.zeros(4, 1).long(),
        torch.zeros(4),
        torch.zeros(4, dtype=torch.int32),
        torch.zeros(4, device="meta").long(),
        1.5,
        "7",
    ],
    ids=["length", "two-dimensional", "float", "int32", "device", "number", "text"],
)
def test_bad_seeds_and_offsets_are_errors(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=rf"{name}: expected an int, or a tensor \[1\] or \[4\]"):
        chain_speculative_sampling(**batch(4), **{"seed": 1, name: value})  # type: ignore[arg-type]


def test_padded_ids_end_a_chain_and_count_nowhere() -> None:
    """flashinfer#879: counts above the number of tokens, where ids were padded with -1."""
    rows = batch(30, most=5)
    lengths = torch.arange(30) % 6
    ids = rows["draft_token_ids"]
    ids[torch.arange(5) >= lengths[:, None]] = -1
    rows["draft_probs"][torch.arange(5) >= lengths[:, None]] = 0.0
    tokens, accepted, emitted = chain_speculative_sampling(**rows, seed=1, offset=0)
    assert bool((accepted <= lengths).all())
    assert bool((emitted <= accepted).all())
    assert ((tokens >= 0).sum(1) - 1).tolist() == emitted.tolist()
    assert bool((tokens[torch.arange(6) > lengths[:, None]] == -1).all())


def test_a_row_of_nan_spoils_its_request_alone() -> None:
    rows = batch(6)
    rows["draft_token_ids"][2, 0] = rows["target_probs"][2, 0].argmax()
    clean = chain_speculative_sampling(**rows, seed=torch.arange(6), offset=0)
    rows["target_probs"][2, 0] = math.nan
    spoiled = chain_speculative_sampling(**rows, seed=torch.arange(6), offset=0)
    assert spoiled[0][2].tolist() == [-1, -1, -1, -1]
    others = torch.arange(6) != 2
    assert same(tuple(part[others] for part in clean), tuple(part[others] for part in spoiled))


def test_rows_of_any_floating_dtype_and_of_any_length() -> None:
    rows = batch(3)
    wide = {name: value.double() if value.is_floating_point() else value.long() for name, value in rows.items()}
    assert same(chain_speculative_sampling(**rows, seed=1), chain_speculative_sampling(**wide, seed=1))
    for num_requests, most in ((0, 3), (3, 0)):
        empty = {
            "draft_probs": torch.empty(num_requests, most, 7),
            "draft_token_ids": torch.empty(num_requests, most, dtype=torch.int32),
            "target_probs": torch.full((num_requests, most + 1, 7), 1 / 7),
        }
        tokens, accepted, emitted = chain_speculative_sampling(**empty, deterministic=False)
        assert tokens.shape == (num_requests, most + 1)
        assert accepted.tolist() == emitted.tolist() == [0] * num_requests
        assert bool((tokens >= 0).all())


@pytest.mark.parametrize("name", ["maybe_output_accepted_token_num", "maybe_output_emitted_draft_token_num"])
@pytest.mark.parametrize(
    "value",
    [torch.zeros(3).int(), torch.zeros(1).int(), torch.zeros(2, 4).int(), torch.zeros(4, device="meta").int(), [0] * 4],
    ids=["length", "one", "two-dimensional", "device", "list"],
)
def test_counts_that_do_not_fit_are_errors_before_anything_is_drawn(name: str, value: Any) -> None:
    source = support.generator(1)
    before = source.get_state()
    with pytest.raises(InputError, match=rf"{name}: expected a tensor \[4\] on cpu"):
        chain_speculative_sampling(**batch(4), generator=source, **{name: value})
    assert torch.equal(source.get_state(), before)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"generator": 5}, "generator: expected a torch.Generator or None, got 5"),
        (
            {"maybe_output_accepted_token_num": torch.zeros(4)},
            "expected int32 or int64, got float32",
        ),
        ({"maybe_output_emitted_draft_token_num": torch.zeros(4).bool()}, "expected int32 or int64, got bool"),
        ({"draft_probs": None}, "draft_probs: expected a tensor [B, K, V], got NoneType"),
        ({"target_probs": [0.5]}, "target_probs: expected a tensor [B, K+1, V], got list"),
    ],
    ids=["generator", "float", "bool", "draft", "target"],
)
def test_what_is_of_another_kind_is_an_error(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        chain_speculative_sampling(**batch(4) | wrong)


def test_ids_without_a_batch_are_an_error() -> None:
    rows = batch(1)
    with pytest.raises(InputError, match=r"draft_token_ids: expected a tensor \[B, K\], got \[3\]"):
        chain_speculative_sampling(rows["draft_probs"][0], rows["draft_token_ids"][0], rows["target_probs"][0])


def test_rows_that_share_a_seed_are_far_apart() -> None:
    """Each has room for 2^40 calls, and no batch has 2^23 rows."""
    for seed in (5, torch.tensor([5])):
        streams = flashinfer._streams(seed, 7, None, 3, torch.device("cpu"))
        assert streams.seeds.tolist() == [5, 5, 5]
        assert streams.offsets.tolist() == [7, 7 + (1 << 40), 7 + (1 << 41)]


@pytest.mark.parametrize("seed", [None, torch.tensor([5])], ids=["no seed", "seed"])
def test_an_offset_that_is_a_tensor_is_left_as_it_is(seed: torch.Tensor | None) -> None:
    offset = torch.tensor([3])
    chain_speculative_sampling(**batch(1), seed=seed, offset=offset)
    assert offset.tolist() == [3]


def test_an_offset_without_a_seed_is_a_place_in_the_streams_of_drawn_seeds() -> None:
    rows, source = batch(40), torch.Generator()
    seeds = acceptlib.Rng.of(source.manual_seed(1), 40, "cpu").seeds
    for offset in (0, 3, torch.tensor([3])):
        found = chain_speculative_sampling(**rows, generator=source.manual_seed(1), offset=offset)
        assert same(found, chain_speculative_sampling(**rows, seed=seeds, offset=offset))
