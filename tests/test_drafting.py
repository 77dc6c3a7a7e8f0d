"""Tokens that are drafted from the law that verification is told of."""

from __future__ import annotations

import functools
import math

import pytest
import torch

import acceptlib
from acceptlib import Rng, SamplingParams, checks
from acceptlib.engine import scratch
from acceptlib.errors import InputError
from acceptlib.exact import processed
from acceptlib.testing.simulation import chi_square_z

VOCAB = 40
SAMPLING = SamplingParams(temperature=0.7, top_k=12, top_p=0.9)


def streams(num_requests: int) -> Rng:
    return Rng(seeds=torch.arange(num_requests), offsets=torch.full((num_requests,), 7))


def test_tokens_follow_the_law() -> None:
    """20,000 requests of one row, at two positions of a step, jointly."""
    count = 20_000
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3)).expand(count, VOCAB)
    (first, probs), (second, _) = (
        acceptlib.sample(logits, rng=streams(count), position=place, sampling=SAMPLING) for place in range(2)
    )
    law = processed(logits[0], temperature=0.7, top_k=12, top_p=0.9)
    assert torch.allclose(probs[0].double(), law, atol=1e-6)
    kept = law > 0
    assert bool(kept[first].all())
    joint = torch.zeros(VOCAB, VOCAB).index_put((first, second), torch.ones(count), accumulate=True)
    assert abs(chi_square_z(joint[kept][:, kept], torch.outer(law, law)[kept][:, kept])) < 6


def test_verification_reads_the_law_that_was_drawn_from() -> None:
    """Where target and draft are one model, every drafted token stands, from rows as from logits."""
    count, length = 50, 4
    logits = torch.randn(count, length + 1, VOCAB, generator=torch.Generator().manual_seed(5))
    rng = streams(count)
    drafted = [acceptlib.sample(logits[:, i], rng=rng, position=i, sampling=SAMPLING) for i in range(length)]
    assert rng.offsets.tolist() == [7] * count
    ids = torch.stack([token for token, _ in drafted], 1)
    for rows in ({"draft_probs": torch.stack([row for _, row in drafted], 1)}, {"draft_logits": logits[:, :-1]}):
        result = acceptlib.create("rejection").verify(
            ids, target_logits=logits, **rows, sampling=SAMPLING, rng=streams(count)
        )
        assert bool((result.num_accepted == length).all())


def test_a_request_does_not_depend_on_its_neighbours() -> None:
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(1))
    rng, order = streams(6), torch.tensor([4, 1])
    ids, _ = acceptlib.sample(logits, rng=rng, position=0)
    some, _ = acceptlib.sample(logits[order], rng=Rng(seeds=rng.seeds[order], offsets=rng.offsets[order]), position=0)
    assert torch.equal(some, ids[order])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_logits_of_half_precision_give_what_the_same_in_float32_give(dtype: torch.dtype) -> None:
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(2)).to(dtype)
    ids, probs = acceptlib.sample(logits, rng=streams(6), position=0, sampling=SAMPLING)
    wanted = acceptlib.sample(logits.float(), rng=streams(6), position=0, sampling=SAMPLING)
    assert torch.equal(ids, wanted[0])
    assert torch.equal(probs, wanted[1])


def test_a_row_without_a_law_gives_an_id_and_no_law() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[1] = -math.inf
    ids, probs = acceptlib.sample(logits, rng=streams(2), position=0)
    assert bool(probs[1].isnan().all())
    assert bool(((ids >= 0) & (ids < VOCAB)).all())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"logits": [0.0]}, "logits: expected a torch.Tensor, got list"),
        ({"logits": torch.zeros(3)}, r"logits: expected shape \[B, V\], got \[3\]"),
        ({"logits": torch.zeros(2, 0)}, "at least one vocabulary entry"),
        ({"logits": torch.zeros(2, 3, dtype=torch.int64)}, "logits: expected dtype"),
        ({"rng": 7}, "rng: expected an acceptlib.Rng, the one that `verify` is given, got int"),
        ({"rng": streams(3)}, r"rng: expected seeds \[2\]"),
        ({"position": -1}, "position: expected an int"),
        ({"sampling": {"temperature": 1}}, "sampling: expected an acceptlib.SamplingParams, got dict"),
        ({"sampling": SamplingParams(top_k=torch.ones(3, dtype=torch.int64))}, "sampling.top_k"),
    ],
)
def test_bad_input(arguments: dict[str, object], message: str) -> None:
    given = {"logits": torch.zeros(2, VOCAB), "rng": streams(2), "position": 0, **arguments}
    with pytest.raises(InputError, match=message):
        acceptlib.sample(given.pop("logits"), **given)  # type: ignore[arg-type]


def test_the_position_is_always_given() -> None:
    """With a default, a loop that forgets it would draw all tokens with the same numbers."""
    with pytest.raises(TypeError, match="position"):
        acceptlib.sample(torch.zeros(2, VOCAB), rng=streams(2))  # type: ignore[call-arg]


def test_a_device_without_float64_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "NO_FLOAT64", {"cpu"})
    with pytest.raises(InputError, match="logits: expected a device that has float64"):
        acceptlib.sample(torch.zeros(2, VOCAB), rng=streams(2), position=0)


def test_no_requests() -> None:
    ids, probs = acceptlib.sample(torch.empty(0, VOCAB, dtype=torch.float16), rng=streams(0), position=0)
    assert (ids.shape, ids.dtype) == ((0,), torch.int64)
    assert (probs.shape, probs.dtype) == ((0, VOCAB), torch.float32)
    assert acceptlib.pack_bitmask(torch.empty(0, VOCAB, dtype=torch.bool)).shape == (0, 2)


def test_little_memory_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many rows there are, scratch memory is that of a few, and each row's law and token are its own."""
    monkeypatch.setattr(scratch, "_BUFFERS", scratch._Buffers())
    logits = torch.randn(64, 20_000, generator=torch.Generator().manual_seed(6))
    sampling, rng = SamplingParams(temperature=0.7), streams(64)
    ids, probs = acceptlib.sample(logits, rng=rng, position=0, sampling=sampling)
    assert sum(flat.nbytes for flat in scratch._BUFFERS.flat.values()) < 10 << 20
    parts = (slice(0, 9), slice(9, 64))
    one, other = (
        acceptlib.sample(
            logits[some],
            rng=Rng(seeds=rng.seeds[some], offsets=rng.offsets[some]),
            position=0,
            sampling=sampling,
        )
        for some in parts
    )
    assert torch.equal(torch.cat((one[0], other[0])), ids)
    assert torch.equal(torch.cat((one[1], other[1])), probs)


@pytest.mark.skipif(torch.__version__.startswith("2.6."), reason="its compiler follows no property of a named tuple")
@pytest.mark.parametrize(
    "sampling",
    [
        None,
        SamplingParams(temperature=torch.tensor([0.0, 0.7, 1.0])),
        SamplingParams(min_p=0.05),
        SamplingParams(top_k=5, top_p=0.8),
    ],
)
def test_in_a_compiled_function(sampling: SamplingParams | None) -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(4))
    sample = functools.partial(acceptlib.sample, position=0, sampling=sampling)
    wanted = sample(logits, rng=streams(3))
    compiled = torch.compile(lambda logits, rng: sample(logits, rng=rng), fullgraph=True, backend="eager")
    for found, same in zip(compiled(logits, streams(3)), wanted, strict=True):
        assert torch.equal(found, same)


@pytest.mark.parametrize(("vocab_size", "num_words"), [(1, 1), (31, 1), (32, 1), (33, 2), (64, 2)])
def test_flags_take_as_few_words_as_hold_them(vocab_size: int, num_words: int) -> None:
    words = acceptlib.pack_bitmask(torch.ones(2, vocab_size, dtype=torch.bool))
    assert words.shape == (2, num_words)
    last = vocab_size - 32 * (num_words - 1)
    assert int(words[0, -1]) % 2**32 == 2**last - 1


def test_flags_are_packed_where_they_are() -> None:
    words = acceptlib.pack_bitmask(torch.empty(2, 40, dtype=torch.bool, device="meta"))
    assert (words.shape, words.device.type) == ((2, 2), "meta")


def test_flags_are_packed_as_xgrammar_lays_them_out() -> None:
    allowed = torch.rand(3, 2, 70, generator=torch.Generator().manual_seed(2)) < 0.5
    words = acceptlib.pack_bitmask(allowed)
    assert words.shape == (3, 2, 3)
    assert words.dtype == torch.int32
    for token in range(70):
        assert torch.equal((words[..., token // 32] >> (token % 32)) & 1 != 0, allowed[..., token])
    logits = torch.zeros(3, 70)
    sampling = SamplingParams(allowed_token_bitmask=acceptlib.pack_bitmask(allowed[:, 0]))
    _, probs = acceptlib.sample(logits, rng=streams(3), position=0, sampling=sampling)
    assert torch.equal(probs > 0, allowed[:, 0])
    with pytest.raises(InputError, match=r"allowed: expected a tensor \[..., V\] bool, got \[2\] torch.float32"):
        acceptlib.pack_bitmask(torch.zeros(2))
    with pytest.raises(InputError, match=r"allowed: expected a tensor \[..., V\] bool, got \[\] torch.bool"):
        acceptlib.pack_bitmask(torch.tensor(True))  # noqa: FBT003 - as torch takes it
    with pytest.raises(InputError, match=r"use acceptlib.pack_bitmask"):
        acceptlib.sample(
            logits, rng=streams(3), position=0, sampling=SamplingParams(allowed_token_bitmask=allowed[:, 0])
        )
