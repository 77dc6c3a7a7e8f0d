"""Streams: each request's own, every bit of it, each number once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from acceptlib.rng import Rng
from acceptlib.testing.batches import mixed, ordinary, same
from acceptlib.testing.subject import Skipped, Subject, require

VOCABULARY: Final = 61


def _drawn(subject: Subject, pairs: Sequence[tuple[int, int]]) -> list[int]:
    """Return the token that each (seed, offset) draws from a flat row."""
    seeds, offsets = torch.tensor(pairs, dtype=torch.int64).unbind(1)
    return _drawn_from(subject, subject.place(Rng(seeds=seeds.clone(), offsets=offsets.clone())), len(pairs))


def _drawn_from(subject: Subject, rng: Rng | torch.Generator | None, count: int) -> list[int]:
    """Return what each request draws from a flat row: its bonus token, since nothing is drafted."""
    if subject.traits.bonus != "sample":
        msg = "the bonus token is an argmax: nothing is drawn"
        raise Skipped(msg)
    ids = torch.empty(count, 0, dtype=torch.int64)
    flat = torch.full((count, 1, VOCABULARY), 1 / VOCABULARY)
    found: list[int] = (
        subject.call(range(count), draft_token_ids=ids, target_probs=flat, rng=rng).output_token_ids[:, 0].tolist()
    )
    return found


def check_uniforms_of_stream(subject: Subject) -> None:
    """Two steps use the numbers that `Rng.uniforms` shows for them, and passing them in changes nothing.

    Catches a u that is stuck (vllm-ascend#13766), numbers of another purpose, such as the draft's own, and the
    uniforms of one step used again in the next, as block verification did.
    """
    subject.require_rules()  # a strategy without rules may draw other numbers than these
    requests = mixed(12)
    keys = [request.key for request in requests]
    for layout in ("padded", "ragged"):
        seeds = torch.tensor(keys) * 977
        rng = subject.place(Rng(seeds=seeds, offsets=torch.tensor(keys) + 2**33))
        for step in range(2):
            uniforms = rng.uniforms(4)
            one, other = subject.verify(requests, layout, rng=rng), subject.verify(requests, layout, uniforms=uniforms)
            same(one, other, what=f"{layout}, step {step}, the stream and its uniforms")


def check_own_seed(subject: Subject) -> None:
    """Requests that differ in their seeds alone draw different tokens.

    Catches a kernel that reads seed[0] for every request (flashinfer#4861).
    """
    found = _drawn(subject, [(seed, 0) for seed in range(16)])
    # 16 draws among 61 tokens: fewer than 6 different ones happen once in 10^10 runs.
    require(len(set(found)) > 5, f"16 seeds drew {found} from a flat row of {VOCABULARY}")  # noqa: PLR2004


def check_every_bit_of_stream(subject: Subject) -> None:
    """Streams whose seeds or offsets differ in any bit, or balance each other, are different streams.

    Catches a seed cut to 32 bits, and one that is added to the offset, so that a request's second step is its
    neighbour's first one.
    """
    bits = (0, 1, 30, 31, 32, 33, 62, 63)
    names = ["itself", "seed + 1, offset - 1", "seed - 1, offset + 1", "seed and offset exchanged"]
    names += [f"seed bit {bit}" for bit in bits] + [f"offset bit {bit}" for bit in bits[:-1]]
    draws = []
    for seed, offset in ((5, 8), (1234, 16), (2**40 + 6, 2**35), (-9, 2**50)):
        pairs = [(seed, offset), (seed + 1, offset - 1), (seed - 1, offset + 1), (offset, seed)]
        pairs += [(_flip(seed, bit), offset) for bit in bits] + [(seed, _flip(offset, bit)) for bit in bits[:-1]]
        draws.append(_drawn(subject, pairs))
    # Four tokens per variant: by chance, a pair among the 171 agrees in all of them once in 80,000 runs.
    words: dict[tuple[int, ...], str] = {}
    for name, word in zip(names, zip(*draws, strict=True), strict=True):
        other = words.setdefault(word, name)
        require(other == name, f"the streams `{other}` and `{name}` draw the same tokens, {word}")


def _flip(value: int, bit: int) -> int:
    """Return a signed 64-bit integer with one bit flipped."""
    flipped = (value ^ (1 << bit)) % 2**64
    return flipped - 2**64 if flipped >= 2**63 else flipped


def check_offsets_advance(subject: Subject) -> None:
    """Every call adds 1 to every request's offset in place: with nothing drafted, stopped early or marked as well.

    Streams that say that they do not advance stay as they are.

    Catches offsets that are never advanced, so that every step draws the same numbers, and those that advance with the
    number of drafted tokens (vllm-ascend#13608: zero-draft requests).
    """
    requests = [ordinary(n, 11, n) for n in (3, 0, 4, 1)]
    requests[3].p[:] = torch.nan
    start = [0, 10, 2**40, -1]
    rng = subject.place(Rng(seeds=torch.tensor([5, 6, 7, 8]), offsets=torch.tensor(start)))
    for step in range(1, 4):
        subject.verify(requests, "padded" if step % 2 else "ragged", rng=rng)
        found, wanted = rng.offsets.tolist(), [offset + step for offset in start]
        require(found == wanted, f"after {step} calls: expected offsets {wanted}, got {found}")
        require(rng.seeds.tolist() == [5, 6, 7, 8], f"the seeds were changed to {rng.seeds.tolist()}")
    rng = Rng(seeds=rng.seeds, offsets=subject.place(torch.tensor(start)), advances=False)
    for layout in ("padded", "ragged"):
        subject.verify(requests, layout, rng=rng)
        found = rng.offsets.tolist()
        require(found == start, f"{layout}, offsets that do not advance: expected {start}, got {found}")


def check_steps_differ(subject: Subject) -> None:
    """Consecutive steps of a stream draw different tokens, and the same step draws the same ones.

    So do consecutive calls with a generator, or without any stream. Catches an offset that is advanced but not read,
    numbers that come from elsewhere than the stream, and a generator taken for its seed.
    """
    pairs = [(seed, 3) for seed in range(8)]
    first, second = _drawn(subject, pairs), _drawn(subject, [(seed, 4) for seed in range(8)])
    require(first != second, f"offsets 3 and 4 drew the same tokens: {first}")
    rng = subject.place(Rng(seeds=torch.arange(8), offsets=torch.full((8,), 3)))
    again = [_drawn_from(subject, rng, 8) for _ in range(2)]
    require(again == [first, second], f"two steps of a stream drew {again}, its offsets 3 and 4 {[first, second]}")
    with torch.random.fork_rng([subject.device] if subject.device.type == "cuda" else []):
        for source in (torch.Generator(subject.device).manual_seed(3), None):
            first, second = (_drawn_from(subject, source, 8) for _ in range(2))
            what = "no rng" if source is None else "one generator"
            require(first != second, f"two calls with {what} drew the same tokens: {first}")
