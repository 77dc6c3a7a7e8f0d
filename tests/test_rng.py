"""The random streams: Philox against published vectors, and what a stream may depend on."""

from __future__ import annotations

import itertools
import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from statistics import NormalDist
from unittest import mock

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from acceptlib import AcceptlibError, Rng, create
from acceptlib.errors import InputError
from acceptlib.rng import Purpose, Root, bits_at, counters, join, philox, resolve, to_uniform, uniform_at

MASK = 0xFFFFFFFF

KNOWN_ANSWERS = {
    "zeros": ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    "ones": ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    "pi": ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
}
"""Counter, key and result of philox4x32 10 in Random123's kat_vectors."""


def plain_philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 as the paper writes it, in Python integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        left, right = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (right >> 32) ^ c1 ^ k0, right & MASK, (left >> 32) ^ c3 ^ k1, left & MASK
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return [c0, c1, c2, c3]


def words(text: str) -> list[int]:
    """Parse words written in hexadecimal."""
    return [int(word, 16) for word in text.split()]


def signed(value: int) -> int:
    """Return 64 bits as a two's complement int64."""
    return value - 2**64 if value >= 2**63 else value


def streams(seeds: list[int], offsets: list[int]) -> Rng:
    """Return an `Rng` from plain integers."""
    return Rng(seeds=torch.tensor(seeds, dtype=torch.int64), offsets=torch.tensor(offsets, dtype=torch.int64))


def plain_words(seed: int, offset: int, purpose: int, position: int) -> list[int]:
    """Return the four words of a stream from the documented counter layout."""
    seed, offset = seed % 2**64, offset % 2**64
    return plain_philox([position, purpose, offset & MASK, offset >> 32], [seed & MASK, seed >> 32])


def chi_square_threshold(degrees: int) -> float:
    """Return what a chi-square statistic exceeds with probability 1e-9, by Wilson and Hilferty above one degree."""
    if degrees == 1:
        return NormalDist().inv_cdf(1 - 0.5e-9) ** 2
    return degrees * (1 - 2 / (9 * degrees) + NormalDist().inv_cdf(1 - 1e-9) * math.sqrt(2 / (9 * degrees))) ** 3


def chi_square(counts: torch.Tensor) -> float:
    """Return the chi-square statistic of counts that should be equal."""
    expected = counts.sum().item() / counts.numel()
    return ((counts.double() - expected) ** 2 / expected).sum().item()


@pytest.mark.parametrize("name", KNOWN_ANSWERS)
def test_philox_known_answers(name: str) -> None:
    """The published vectors: catches a wrong constant, word order, round count or key schedule."""
    counter, key, expected = map(words, KNOWN_ANSWERS[name])
    seed = torch.tensor(signed(key[0] | key[1] << 32))
    assert philox(torch.tensor(counter), seed).tolist() == expected
    assert plain_philox(counter, key) == expected


def test_philox_random_inputs() -> None:
    """Random counters and keys, high bits included: catches an overflow or a signed shift in 64-bit arithmetic."""
    source = random.Random(0)  # noqa: S311
    counter = [[source.getrandbits(32) for _ in range(500)] for _ in range(4)]
    seed = [source.getrandbits(64) for _ in range(500)]
    actual = philox(torch.tensor(counter), torch.tensor([signed(value) for value in seed])).T.tolist()
    for i, result in enumerate(actual):
        assert result == plain_philox([word[i] for word in counter], [seed[i] & MASK, seed[i] >> 32])


def test_one_number_of_a_stream_is_that_of_all() -> None:
    source = random.Random(1)  # noqa: S311
    for _ in range(200):
        seed, offset = (signed(source.getrandbits(64)) for _ in range(2))
        found = streams([seed], [offset]).uniforms(5)
        assert [uniform_at(position, seed, offset) for position in range(5)] == found.accept[0].tolist()
        assert bits_at(seed, offset) == int(found.emit)


def test_a_position_of_numpy_is_a_position() -> None:
    rng = streams([1, 2], [3, 4])
    for kind in (np.uint64, np.int8):
        assert torch.equal(rng.draft_bits(kind(3)), rng.draft_bits(3))


def test_philox_broadcasts_seeds() -> None:
    """A grid of counters with one seed a row: catches seeds spread along the wrong axis."""
    position = torch.arange(3)[None, :].expand(2, 3)
    grid = philox(counters(position, Purpose.ACCEPT, torch.zeros(2, 1, dtype=torch.int64)), torch.tensor([[5], [-7]]))
    for row, seed in enumerate((5, -7)):
        for column in range(3):
            assert grid[:, row, column].tolist() == plain_words(seed, 0, 0, column)


@pytest.mark.parametrize("offset", [0, 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**62 + 12345, 2**63 - 1])
@pytest.mark.parametrize("seed", [0, 1, -1, 2**40 + 3, -(2**40) - 3, 2**63 - 1, -(2**63)])
def test_stream_layout(seed: int, offset: int) -> None:
    """Every number of a step from (seed, offset, purpose, position): catches a truncated seed or offset."""
    uniforms = streams([seed], [offset]).uniforms(3)
    assert uniforms.accept.dtype == torch.float64
    assert uniforms.emit.dtype == torch.int64
    assert tuple(uniforms.accept.shape) == (1, 3)
    assert tuple(uniforms.emit.shape) == (1,)
    for position in range(3):
        w0, w1, *_ = plain_words(seed, offset, Purpose.ACCEPT, position)
        assert uniforms.accept[0, position].item() == ((w0 << 32 | w1) >> 11) / 2**53
    w0, w1, *_ = plain_words(seed, offset, Purpose.EMIT, 0)
    assert uniforms.emit[0].item() == signed(w0 << 32 | w1)
    w0, w1, *_ = plain_words(seed, offset, Purpose.DRAFT, 2)
    assert streams([seed], [offset]).draft_bits(2).tolist() == [signed(w0 << 32 | w1)]


def test_streams_depend_on_seed_and_offset_only() -> None:
    """A stream alone equals it in any batch, order and K: catches keying by batch row, by K, or by seeds[0]."""
    source = random.Random(1)  # noqa: S311
    seeds = [source.getrandbits(63) for _ in range(7)]
    offsets = [source.getrandbits(40) for _ in range(7)]
    together = streams(seeds, offsets).uniforms(5)
    backwards = streams(seeds[::-1], offsets[::-1]).uniforms(5)
    assert torch.equal(backwards.accept.flip(0), together.accept)
    assert torch.equal(backwards.emit.flip(0), together.emit)
    for row, (seed, offset) in enumerate(zip(seeds, offsets, strict=True)):
        for most in (0, 1, 5, 9):
            alone = streams([seed], [offset]).uniforms(most)
            common = min(most, 5)
            assert torch.equal(alone.accept[0, :common], together.accept[row, :common])
            assert torch.equal(alone.emit[0], together.emit[row])


def test_no_two_numbers_are_shared() -> None:
    """Seeds, steps, positions and purposes give distinct bits: catches noise shared between accept and draw.

    Distinct 64-bit words among 3,780 collide by chance with probability below 1e-12.
    """
    grid = torch.arange(6)
    seen: list[int] = []
    for seed, offset, purpose in itertools.product((0, 1, -1, 2**32, 2**33), (*range(5), 2**32, 2**33), Purpose):
        offsets = torch.full_like(grid, offset)
        seen += join(philox(counters(grid, purpose, offsets), torch.full_like(grid, seed))).tolist()
    assert len(seen) == 5 * 7 * len(Purpose) * 6
    assert max(Counter(seen).values()) == 1


def test_purposes_of_one_step_are_disjoint() -> None:
    """Accept, emit and draft bits and derived seeds differ, at 0 too: catches a purpose left out of the counter."""
    rng = streams([42], [7])
    uniforms = rng.uniforms(4)
    accept = [int(value * 2**53) for value in uniforms.accept[0].tolist()]
    emit = [value % 2**64 >> 11 for value in uniforms.emit.tolist()]
    draft = [int(rng.draft_bits(position)) % 2**64 >> 11 for position in range(4)]
    derived = [value % 2**64 >> 11 for value in Root(42, 7).streams(4, torch.device("cpu")).seeds.tolist()]
    assert len({*accept, *emit, *draft, *derived}) == 13
    assert len({int(purpose) for purpose in Purpose}) == len(Purpose)


def test_uniforms_stay_below_one() -> None:
    """The largest and smallest words give 1 - 2^-53 and 0: catches a coin rounded up to 1.0, which rejects h = 1."""
    ones, zeros = torch.full((4, 1), MASK), torch.zeros(4, 1, dtype=torch.int64)
    assert to_uniform(ones).item() == 1 - 2**-53
    assert to_uniform(zeros).item() == 0.0
    last_bit = torch.tensor([[0], [1 << 11], [0], [0]])
    assert to_uniform(last_bit).item() == 2**-53
    assert join(ones).item() == -1


def test_uniforms_have_53_bits() -> None:
    """Multiples of 2^-53 whose every bit is used evenly: catches 24-bit or 32-bit uniforms, and u stuck at 0."""
    numbers = 20_000
    uniforms = streams(list(range(numbers)), [3] * numbers).uniforms(1).accept[:, 0]
    assert uniforms.min().item() >= 0
    assert uniforms.max().item() < 1
    scaled = uniforms * 2.0**53
    assert torch.equal(scaled, scaled.floor())
    for bit in range(53):
        ones = (scaled.to(torch.int64) >> bit & 1).sum().item()
        assert chi_square(torch.tensor([ones, numbers - ones])) < chi_square_threshold(1), f"bit {bit}"


def test_emit_uses_64_bits() -> None:
    """Every bit of the draw's word is used evenly: catches a draw from 32 bits, which cannot reach rare tokens."""
    numbers = 20_000
    emit = streams(list(range(numbers)), [3] * numbers).uniforms(0).emit
    for bit in range(64):
        ones = (emit >> bit & 1).sum().item()
        assert chi_square(torch.tensor([ones, numbers - ones])) < chi_square_threshold(1), f"bit {bit}"


@pytest.mark.parametrize("along", ["seeds", "offsets", "positions"])
def test_uniforms_are_uniform(along: str) -> None:
    """Chi-square of 200 bins, 1e5 numbers, along each axis of the key; a false alarm has probability 1e-9."""
    numbers, bins = 100_000, 200
    if along == "seeds":
        uniforms = streams(list(range(numbers)), [0] * numbers).uniforms(1).accept
    elif along == "offsets":
        uniforms = streams([123] * numbers, list(range(numbers))).uniforms(1).accept
    else:
        uniforms = streams([123], [0]).uniforms(numbers).accept
    counts = torch.histc(uniforms.flatten(), bins=bins, min=0, max=1)
    assert counts.sum().item() == numbers
    assert chi_square(counts) < chi_square_threshold(bins - 1)


def test_accept_and_emit_are_independent() -> None:
    """Joint chi-square over 10 x 10 bins of u and the draw: catches accept bits reused for the draw."""
    numbers = 100_000
    uniforms = streams(list(range(numbers)), [0] * numbers).uniforms(2)
    bits = ((uniforms.emit >> 11) & (2**53 - 1)).double() * 2.0**-53
    first, second = uniforms.accept.unbind(1)
    for left, right in ((first, bits), (second, bits), (first, second)):
        cells = (left * 10).long() * 10 + (right * 10).long()
        assert chi_square(torch.bincount(cells, minlength=100)) < chi_square_threshold(99)


def test_consecutive_steps_are_independent() -> None:
    """Joint chi-square of a position in two steps: catches uniforms reused by the next step."""
    numbers = 100_000
    seeds = list(range(numbers))
    now, after = (streams(seeds, [step] * numbers).uniforms(2).accept for step in (0, 1))
    for left, right in ((now[:, 0], after[:, 0]), (now[:, 1], after[:, 0])):
        cells = (left * 10).long() * 10 + (right * 10).long()
        assert chi_square(torch.bincount(cells, minlength=100)) < chi_square_threshold(99)


def test_chi_square_threshold_is_calibrated() -> None:
    """The tail above the threshold is 1e-9 within a factor of two, by exact formulas: keeps the alarm honest."""
    assert 0.99e-9 < math.erfc(math.sqrt(chi_square_threshold(1) / 2)) < 1.01e-9
    # With 2m degrees the tail is the Poisson sum exp(-t/2) sum_{k<m} (t/2)^k / k!.
    for half in (50, 100):
        threshold = chi_square_threshold(2 * half) / 2
        logs = [k * math.log(threshold) - math.lgamma(k + 1) - threshold for k in range(half)]
        assert 0.5e-9 < sum(map(math.exp, logs)) < 2e-9


def test_uniforms_advance_nothing() -> None:
    """`uniforms` and `draft_bits` only look: catches a look-up that consumes a step."""
    rng = streams([1, 2], [3, 4])
    first, again = rng.uniforms(2), rng.uniforms(2)
    rng.draft_bits(0)
    assert torch.equal(first.accept, again.accept)
    assert torch.equal(first.emit, again.emit)
    assert rng.offsets.tolist() == [3, 4]
    assert rng.seeds.tolist() == [1, 2]


@pytest.mark.parametrize("numbers", [lambda rng: rng.draft_bits(0), lambda rng: rng.uniforms(2)], ids=["draft", "step"])
def test_no_interrupt_is_lost(numbers: Callable[[Rng], object]) -> None:
    """Ctrl-C at any call ends a draw: catches numbers whose class has code of its own, from which numpy drops it."""
    rng = streams([1, 2], [3, 4])
    numbers(rng)  # constants are made once
    for at in itertools.count():
        calls = itertools.count()

        def interrupt(_frame: object, event: str, _arg: object, calls: Iterator[int] = calls, at: int = at) -> None:
            if event == "call" and next(calls) == at:
                raise KeyboardInterrupt

        ended = False
        sys.setprofile(interrupt)
        try:
            numbers(rng)
        except KeyboardInterrupt:
            ended = True
        finally:
            sys.setprofile(None)
        if next(calls) <= at:  # there is no such call
            break
        assert ended, at
    assert at > 3


def test_empty_batch() -> None:
    """No requests give empty numbers of the right shapes."""
    uniforms = streams([], []).uniforms(3)
    assert tuple(uniforms.accept.shape) == (0, 3)
    assert tuple(uniforms.emit.shape) == (0,)


@pytest.mark.parametrize("value", [0, 1, -1, 2**63, -(2**70), 2**200 + 5])
def test_int_gives_equal_streams(value: int) -> None:
    """Equal ints give equal streams, rows differ, offsets start at 0: catches one seed for the whole batch."""
    device = torch.device("cpu")
    first, again = Rng.of(value, 16, device), Rng.of(value, 16, device)
    assert torch.equal(first.seeds, again.seeds)
    assert first.offsets.tolist() == [0] * 16
    assert len(set(first.seeds.tolist())) == 16
    assert torch.equal(Rng.of(value, 4, device).seeds, first.seeds[:4])
    root = resolve(value, 16, device)
    assert isinstance(root, Root)
    assert torch.equal(root.streams(16, device).seeds, first.seeds)


def test_a_device_may_be_named() -> None:
    rng = Rng.of(3, 4, "cpu")
    assert Rng.of(rng, 4, "cpu") is rng


def test_streams_may_be_of_another_device_than_their_source() -> None:
    """And of one whose tensors have no addresses."""
    for source in (torch.Generator().manual_seed(0), 5):
        rng = Rng.of(source, 3, "meta")
        assert rng.seeds.device == rng.offsets.device == torch.device("meta")


def test_numbers_are_drawn_where_their_generator_is() -> None:
    """A device takes no generator of another one, and has nothing to draw where it holds no values."""
    generator = torch.Generator().manual_seed(0)
    before = generator.get_state()
    Rng.of(generator, 3, "meta")
    assert not torch.equal(generator.get_state(), before)


def test_ints_give_different_streams() -> None:
    """Different ints share no seed: catches `value + row`, where neighbours overlap."""
    device = torch.device("cpu")
    seeds = [seed for value in range(20) for seed in Rng.of(value, 20, device).seeds.tolist()]
    assert len(set(seeds)) == len(seeds)


def test_every_bit_of_an_int_matters() -> None:
    seeds = {tuple(Rng.of(1 ^ 1 << bit, 2, "cpu").seeds.tolist()) for bit in range(64)}
    assert len(seeds | {tuple(Rng.of(1, 2, "cpu").seeds.tolist())}) == 65


def test_generator_draws_fresh_seeds() -> None:
    """A generator's state advances, and equal states give equal streams: catches a generator read but not moved."""
    device = torch.device("cpu")
    generator, twin = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)
    first, second = Rng.of(generator, 8, device), Rng.of(generator, 8, device)
    for expected in (first, second):
        again = Rng.of(twin, 8, device)
        assert torch.equal(expected.seeds, again.seeds)
        assert torch.equal(expected.offsets, again.offsets)
    assert len({*first.seeds.tolist(), *second.seeds.tolist()}) == 16


def test_a_generator_draws_every_bit() -> None:
    """The sign too; the offsets as well, whose steps are added to them, and which are not the seeds."""
    rng = Rng.of(torch.Generator().manual_seed(5), 64, "cpu")
    assert not {*rng.seeds.tolist()} & {*rng.offsets.tolist()}
    for numbers in (rng.seeds, rng.offsets):
        for bit in range(64):
            assert {*(numbers >> bit & 1).tolist()} == {0, 1}


def test_none_is_the_default_generator() -> None:
    """None follows torch.manual_seed and moves on with every call."""
    device = torch.device("cpu")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(9)
        first, second = Rng.of(None, 4, device), Rng.of(None, 4, device)
        torch.manual_seed(9)
        assert torch.equal(Rng.of(None, 4, device).seeds, first.seeds)
    assert not set(first.seeds.tolist()) & set(second.seeds.tolist())


def test_rng_is_returned_as_it_is() -> None:
    """An `Rng` is not copied: catches offsets advanced in a copy, which repeats every step."""
    rng = streams([1, 2, 3], [0, 0, 0])
    assert Rng.of(rng, 3, torch.device("cpu")) is rng


LONG = torch.zeros(3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("seeds", "offsets"),
    [
        pytest.param([0, 0, 0], LONG, id="seeds-list"),
        pytest.param(LONG.int(), LONG, id="seeds-int32"),
        pytest.param(LONG, LONG.int(), id="offsets-int32"),
        pytest.param(LONG.double(), LONG, id="seeds-float64"),
        pytest.param(LONG[None], LONG[None].clone(), id="two-dimensions"),
        pytest.param(LONG[0], LONG[0].clone(), id="no-dimension"),
        pytest.param(LONG, LONG, id="one-for-both"),  # seeds would advance
        pytest.param(LONG, LONG[:2], id="lengths-differ"),
        pytest.param(LONG, LONG.to("meta"), id="devices-differ"),
    ],
)
def test_rng_rejects(seeds: torch.Tensor, offsets: torch.Tensor) -> None:
    """Wrong shapes, dtypes and devices are errors at construction, from the library's own tree."""
    with pytest.raises(InputError, match="Rng"):
        Rng(seeds=seeds, offsets=offsets)
    assert issubclass(InputError, AcceptlibError)


def test_seeds_and_offsets_of_two_lengths_are_refused() -> None:
    with pytest.raises(InputError, match=r"of one length on one device, got \[3\] on cpu and \[2\] on cpu"):
        Rng(seeds=LONG, offsets=LONG[:2].clone())


def test_a_column_of_a_matrix_is_refused() -> None:
    """Kernels read neighbouring numbers, and a contiguous copy would not advance."""
    column = LONG[:, None].repeat(1, 2)[:, 1]
    for tensors in ({"seeds": column, "offsets": LONG}, {"seeds": LONG, "offsets": column}):
        with pytest.raises(InputError, match=r"expected \[B\] int64, contiguous, got .* of strides \[2\]"):
            Rng(**tensors)


def test_of_rejects() -> None:
    """A stream count that is not B, and a source of another type, name what was expected and given."""
    with pytest.raises(InputError, match=r"expected seeds \[4\] on cpu, got \[3\]"):
        Rng.of(Rng(seeds=LONG, offsets=LONG.clone()), 4, torch.device("cpu"))
    with pytest.raises(InputError, match="got str"):
        Rng.of("7", 3, torch.device("cpu"))  # type: ignore[arg-type]
    for source in (Rng.of, resolve):
        with pytest.raises(InputError, match="got bool"):
            source(True, 3, torch.device("cpu"))  # noqa: FBT003
    with pytest.raises(InputError, match="advances: expected True or False, got 'no'"):
        Rng(seeds=LONG, offsets=LONG.clone(), advances="no")  # type: ignore[arg-type]


def test_streams_of_another_device_than_the_call_are_refused() -> None:
    rng = Rng(seeds=LONG.to("meta"), offsets=LONG.to("meta"))
    assert Rng.of(rng, 3, "meta") is rng
    with pytest.raises(InputError, match=r"expected seeds \[3\] on cpu, got \[3\] on meta"):
        Rng.of(rng, 3, "cpu")


def test_a_device_without_a_number_is_any_of_its_kind() -> None:
    with FakeTensorMode():  # of a device that there need not be
        numbers = torch.zeros(3, dtype=torch.int64, device="cuda:1")
        rng = Rng(seeds=numbers, offsets=numbers.clone())
        for device in ("cuda", "cuda:1"):
            assert Rng.of(rng, 3, device) is rng
        with pytest.raises(InputError, match=r"expected seeds \[3\] on cuda:0, got \[3\] on cuda:1"):
            Rng.of(rng, 3, "cuda:0")


@pytest.mark.parametrize("position", [-1, 2**32, 1.5, True])
def test_no_bits_beyond_a_stream(position: float) -> None:
    with pytest.raises(InputError, match=r"position: expected an int in \[0, 2\^32\)"):
        Rng(seeds=LONG, offsets=LONG.clone()).draft_bits(position)  # type: ignore[arg-type]


def test_no_numbers_of_fewer_than_no_tokens() -> None:
    with pytest.raises(InputError, match="max_num_draft_tokens: expected an int >= 0, got -1"):
        Rng(seeds=LONG, offsets=LONG.clone()).uniforms(-1)


def test_a_stream_has_bits_at_every_position_of_32_bits() -> None:
    for position in (0, 2**32 - 1):
        w0, w1, *_ = plain_words(7, 8, Purpose.DRAFT, position)
        assert streams([7], [8]).draft_bits(position).tolist() == [signed(w0 << 32 | w1)]


def test_a_generator_on_a_gpu_is_no_int(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeded alike, their streams differ, and the next call's do too."""
    device, offset = torch.device("cuda", 0), [0]
    generator = mock.Mock(spec=torch.Generator, device=device)
    generator.initial_seed.return_value = 5
    generator.get_offset.side_effect = lambda: offset[0]
    generator.set_offset.side_effect = lambda value: offset.__setitem__(0, value)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    roots = [resolve(5, 3, device), *(resolve(generator, 3, device) for _ in range(2))]
    seeds = [tuple(root.streams(3, torch.device("cpu")).seeds.tolist()) for root in roots]
    assert len({*itertools.chain(*seeds)}) == 9


def test_a_generator_on_a_gpu_may_have_any_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels take it as an int64."""
    device = torch.device("cuda", 0)
    generator = mock.Mock(spec=torch.Generator, device=device)
    generator.initial_seed.return_value, generator.get_offset.return_value = 2**64 - 5, 8
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert resolve(generator, 3, device) == Root(-5, 8 - 2**63)


def test_seeds_and_offsets_that_share_memory_are_refused() -> None:
    """Advancing the one would change the other; where nothing is advanced it may be."""
    numbers = torch.arange(6)
    for offsets in (numbers[:4], numbers[1:5]):
        with pytest.raises(InputError, match="expected seeds and offsets that share no memory"):
            Rng(seeds=numbers[:4], offsets=offsets)
        Rng(seeds=numbers[:4], offsets=offsets, advances=False)
    Rng(seeds=numbers[:3], offsets=numbers[3:])


def test_one_tensor_without_an_address_for_both_is_refused() -> None:
    """As in a compiled function, where nobody can ask where its memory is."""
    numbers = LONG.to("meta")
    with pytest.raises(InputError, match="expected seeds and offsets that share no memory"):
        Rng(seeds=numbers, offsets=numbers)


def test_streams_may_be_made_in_a_transformed_function() -> None:
    """Where nobody can ask for addresses either."""
    made = torch.func.vmap(lambda seeds: Rng(seeds=seeds, offsets=torch.zeros_like(seeds)).seeds)
    numbers = torch.arange(6).view(2, 3)
    assert torch.equal(made(numbers), numbers)


def test_what_cannot_run_draws_no_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller that goes on with another backend has the tokens of that backend alone."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()
    with pytest.raises(AcceptlibError, match="backend='triton' cannot run on cpu"):
        create("rejection", backend="triton").verify(
            torch.zeros(1, 2, dtype=torch.int64), target_probs=torch.full((1, 3, 4), 0.25), rng=generator
        )
    assert torch.equal(generator.get_state(), before)


def test_a_compiled_function_draws_the_same_bits(recwarn: pytest.WarningsRecorder) -> None:
    rng = Rng(seeds=LONG, offsets=LONG.clone())
    for numbers in (lambda rng: rng.draft_bits(3), lambda rng: rng.uniforms(2).accept):
        compiled = torch.compile(numbers, fullgraph=True, backend="eager")
        assert torch.equal(compiled(rng), numbers(rng))
    assert not [warning for warning in recwarn if "lru_cache" in str(warning.message)]
