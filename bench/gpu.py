"""The step on a GPU beside the read floor, vLLM and FlashInfer, in one process: `python bench/gpu.py RECORD.json`.

Every result is checked against the oracle before it is timed. vLLM's step is imported from where vLLM has
it, FlashInfer from its package; a library that cannot be imported is named and left out. Drop-ins are timed beside the
engine that they call. `--shapes 1x3,8x3` and `--paths` measure less.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from tabulate import tabulate

import acceptlib
from acceptlib import AcceptanceStrategy, Traits, ops, rule
from acceptlib.benchmarks import measure
from acceptlib.benchmarks.measure import Row
from acceptlib.benchmarks.peers import PEERS, Peer, vllm
from acceptlib.benchmarks.timing import How
from acceptlib.benchmarks.workloads import Batch, Workload
from acceptlib.cli.files import write_whole
from acceptlib.compat import flashinfer, vllm_v0, vllm_v1
from acceptlib.ops import Value

SHAPES: Final = ((1, 3), (8, 3), (32, 3), (64, 5), (128, 7), (256, 7))
FILTERS: Final[dict[str, Any]] = {"temperature": 0.7, "top_k": 50, "top_p": 0.9}


class Stranger(AcceptanceStrategy):
    """Rejection sampling as a third party would write it, through the public interface: what a plugin costs."""

    name = "stranger"
    traits = Traits(guarantee="lossless")

    @rule
    def accept(target_prob: Value, draft_prob: Value) -> Value:
        """Return h."""
        return ops.minimum(ops.ratio(target_prob, draft_prob), 1.0)

    @rule
    def residual(p: Value, q: Value) -> Value:
        """Return the weight of each entry."""
        return p - q


@dataclass(frozen=True)
class Case:
    """One row of the table: what is timed, beside which peer, and how many times faster it should be.

    Attributes:
        strategy: Makes it.
        workload: Fields of the workload that are not the default.
        peer: The library to compare with, or None.
        goals: How many times the peer's speed it should have, for each of `SHAPES`.
        beside: Another path, whose time this one's is compared with.
        most: How many times that path's time it should take, at most.
        how: How both are timed.
    """

    strategy: Callable[[], AcceptanceStrategy]
    workload: Mapping[str, Any]
    peer: Peer | None = None
    goals: tuple[float, ...] = ()
    beside: str = ""
    most: float = 0.0
    how: How = "graph"


def named(name: str) -> Callable[[], AcceptanceStrategy]:
    """Return what makes a strategy of the registry."""
    return functools.partial(acceptlib.create, name, backend="triton")


def like_vllm(**options: Any) -> Peer:
    """Return vLLM with other options of its step."""
    return dataclasses.replace(PEERS["vllm"], bind=functools.partial(vllm, **options))


def through(call: Callable[[Batch], Callable[[], torch.Tensor]], label: str = "through the drop-in") -> Peer:
    """Return a drop-in, or another way to call the engine, as a peer of the engine."""
    return Peer(
        label=dict.fromkeys(("probs", "logits", "one-hot"), label),
        module="acceptlib.compat",
        bind=lambda batch: (call(batch), lambda tokens: (tokens, (tokens >= 0).sum(1) - 1)),
        devices=("cuda",),
    )


def flashinfer_dropin(batch: Batch, *, seeded: bool) -> Callable[[], torch.Tensor]:
    """Return a call of FlashInfer's function, with the caller's seeds and offsets or with torch's default generator."""
    assert batch.draft is not None
    rows = batch.draft, batch.draft_token_ids, batch.target
    seeds = {"seed": batch.rng.seeds, "offset": batch.rng.offsets} if seeded else {}
    return lambda: flashinfer.chain_speculative_sampling(*rows, **seeds)[0]


def from_a_generator(batch: Batch) -> Callable[[], torch.Tensor]:
    """Return a call of the engine whose numbers come from torch's default generator."""
    strategy = named("rejection")()
    arguments = batch.arguments(strategy)
    return lambda: strategy.verify(batch.draft_token_ids, **arguments, out=batch.out).output_token_ids


def vllm_v0_dropin(batch: Batch, sampler: Callable[[], torch.nn.Module]) -> Callable[[], torch.Tensor]:
    """Return a call of a sampler of vLLM V0, which is given bonus tokens, and counts."""
    bonus = torch.zeros(len(batch.draft_token_ids), 1, dtype=torch.int64, device=batch.device)
    return functools.partial(sampler(), batch.target, bonus, batch.draft, batch.draft_token_ids)


def vllm_dropin(batch: Batch, *, greedy: bool) -> Callable[[], torch.Tensor]:
    """Return a call of the sampler of vLLM V1, whose bonus tokens are sampled before."""
    size, device, heat = len(batch.draft_token_ids), batch.device, batch.workload.temperature
    metadata = vllm_v1.SpecDecodeMetadata.make_dummy(batch.draft_token_ids.tolist(), device)
    temperature = None if greedy else torch.full((size,), heat, device=device)
    sampling = vllm_v1.SamplingMetadata(temperature=temperature, all_greedy=greedy, all_random=not greedy)
    logits, bonus = batch.target[:, :-1].flatten(0, 1), torch.zeros(size, 1, dtype=torch.int32, device=device)
    return lambda: vllm_v1.RejectionSampler()(metadata, None, logits, bonus, sampling)


PATHS: Final = {
    "probabilities": Case(named("rejection"), {"kind": "probs"}, PEERS["flashinfer"], (10, 9, 5, 3.4, 2.2, 2.15)),
    "logits, T = 0.7": Case(named("rejection"), {"temperature": 0.7}, PEERS["vllm"], (2.3, 2.4, 3, 4, 5, 5.5)),
    "logits": Case(named("rejection"), {}, PEERS["vllm"], (1.8, 1.5, 1.4, 1.6, 1.9, 2)),
    "logits, block": Case(named("block"), {}, like_vllm(use_block_verification=True), (1.8, 1.8, 1.7, 1.7, 1.7, 1.8)),
    "logits, greedy": Case(named("greedy"), {"temperature": 0.0}, PEERS["vllm"], (1.5, 1.4, 1.2, 1.2, 1.5, 1.6)),
    "logits, one-hot draft": Case(named("rejection"), {"kind": "one-hot"}, PEERS["vllm"], (1.5, 1.5, 1.5, 1.7, 2, 2.2)),
    "logits, typical": Case(named("typical"), {}, beside="logits", most=1.1),
    "logits, a third party's rule": Case(functools.partial(Stranger, backend="triton"), {}, beside="logits", most=1.03),
    "logits, fly": Case(named("fly"), {}),
    "logits, synthetic": Case(named("synthetic"), {}),
    "logits, target-only": Case(named("target-only"), {}),
    "logits, tv-budget": Case(named("tv-budget"), {}),
    "probabilities, block": Case(named("block"), {"kind": "probs"}),
    "probabilities, greedy": Case(named("greedy"), {"kind": "probs"}),
    "probabilities, fly": Case(named("fly"), {"kind": "probs"}),
    "probabilities, typical": Case(named("typical"), {"kind": "probs"}),
    "probabilities, target-only": Case(named("target-only"), {"kind": "probs"}),
    "probabilities, tv-budget": Case(named("tv-budget"), {"kind": "probs"}),
    "logits, bfloat16": Case(named("rejection"), {"dtype": "bfloat16"}, beside="logits", most=0.6),
    "logits, bitmask": Case(named("rejection"), {"masked": True}, beside="logits", most=1.15),
    "logits, T = 0.7, top-k 50, top-p 0.9": Case(
        named("rejection"), FILTERS, PEERS["vllm"], (5,) * 6, beside="logits, T = 0.7", most=3
    ),
    # vLLM drafts under the temperature alone, and its step is given such drafts.
    "logits, T = 0.7, top-k 50, top-p 0.9, drafts unfiltered": Case(
        named("rejection"),
        {**FILTERS, "filters_draft": False},
        PEERS["vllm"],
        (5,) * 6,
        beside="logits, T = 0.7",
        most=3,
    ),
    "logits, T = 0.7, top-p 0.9": Case(
        named("rejection"), {"temperature": 0.7, "top_p": 0.9}, beside="logits, T = 0.7", most=2.5
    ),
    "logits, T = 0.7, min-p 0.05": Case(
        named("rejection"), {"temperature": 0.7, "min_p": 0.05}, beside="logits, T = 0.7", most=1.1
    ),
    "logits, T = 0.7, top-p 0.9, drafts unfiltered": Case(
        named("rejection"),
        {"temperature": 0.7, "top_p": 0.9, "filters_draft": False},
        beside="logits, T = 0.7",
        most=2.5,
    ),
    "logits, T = 0.7, min-p 0.05, drafts unfiltered": Case(
        named("rejection"),
        {"temperature": 0.7, "min_p": 0.05, "filters_draft": False},
        beside="logits, T = 0.7",
        most=1.1,
    ),
    "probabilities, FlashInfer's function, seeds given": Case(
        named("rejection"), {"kind": "probs"}, through(functools.partial(flashinfer_dropin, seeded=True))
    ),
    # In a captured graph a generator draws streams on the device, for the engine as for a drop-in. Eager calls derive
    # them from its state.
    "probabilities, streams from a generator": Case(
        named("rejection"), {"kind": "probs"}, through(from_a_generator, "from a generator")
    ),
    "probabilities, counting, streams from a generator": Case(
        named("rejection"), {"kind": "probs", "counts": True}, through(from_a_generator, "from a generator")
    ),
    "logits, one-hot draft, T = 0.7, streams from a generator": Case(
        named("rejection"), {"kind": "one-hot", "temperature": 0.7}, through(from_a_generator, "from a generator")
    ),
    "probabilities, FlashInfer's function": Case(
        named("rejection"), {"kind": "probs"}, through(functools.partial(flashinfer_dropin, seeded=False))
    ),
    "probabilities, FlashInfer's function, eager calls": Case(
        named("rejection"),
        {"kind": "probs"},
        through(functools.partial(flashinfer_dropin, seeded=False)),
        how="queue",
    ),
    "probabilities, vLLM V0's rejection sampler": Case(
        named("rejection"),
        {"kind": "probs", "counts": True},
        through(functools.partial(vllm_v0_dropin, sampler=vllm_v0.RejectionSampler)),
    ),
    "probabilities, vLLM V0's rejection sampler, eager calls": Case(
        named("rejection"),
        {"kind": "probs", "counts": True},
        through(functools.partial(vllm_v0_dropin, sampler=vllm_v0.RejectionSampler)),
        how="queue",
    ),
    # Its rule differs from the strategy's in a guard of the logarithm. It counts tokens, so it reads all rows.
    "probabilities, vLLM V0's typical sampler": Case(
        named("typical"),
        {"kind": "probs", "counts": True},
        through(functools.partial(vllm_v0_dropin, sampler=vllm_v0.TypicalAcceptanceSampler)),
    ),
    # The sampler is always given a temperature, so the engine is too.
    "logits, one-hot draft, T = 0.7, vLLM V1's sampler": Case(
        named("rejection"),
        {"kind": "one-hot", "temperature": 0.7},
        through(functools.partial(vllm_dropin, greedy=False)),
    ),
    "logits, one-hot draft, T = 0.7, vLLM V1's sampler, eager calls": Case(
        named("rejection"),
        {"kind": "one-hot", "temperature": 0.7},
        through(functools.partial(vllm_dropin, greedy=False)),
        how="queue",
    ),
    "logits, greedy, vLLM V1's sampler": Case(
        named("greedy"), {"temperature": 0.0}, through(functools.partial(vllm_dropin, greedy=True))
    ),
}
"""A drop-in should take at most a tenth longer than the engine from 32 requests on."""


def add_workloads(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what is measured."""
    parser.add_argument("--shapes", default=",".join(f"{B}x{K}" for B, K in SHAPES))
    parser.add_argument("--paths", help="separated by semicolons", default=";".join(PATHS))
    parser.add_argument("--vocab-size", type=int, default=128256)


def workloads_of(name: str, given: argparse.Namespace) -> Iterator[Workload]:
    """Yield the workloads of a path."""
    for shape in given.shapes.split(","):
        num_requests, length = map(int, shape.split("x"))
        yield Workload(
            num_requests=num_requests,
            num_draft_tokens=length,
            vocab_size=given.vocab_size,
            **PATHS[name].workload,
        )


def measured(name: str, workload: Workload, device: torch.device) -> Iterator[Row]:
    """Yield the rows of one workload of a path: ours, and that of the library to compare with."""
    path = PATHS[name]
    peers = [path.peer] if path.peer is not None and path.peer.missing() is None else []
    return measure.run(workload, {path.strategy().name: path.strategy}, peers, device, path.how)


def main() -> None:
    """Measure, print the ratios and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("record", type=Path)
    add_workloads(parser)
    given = parser.parse_args()
    device = torch.device("cuda")
    absent = {peer.missing() for path in PATHS.values() if (peer := path.peer)} - {None}
    rows: list[Row] = []
    extra: dict[int, dict[str, Any]] = {}
    names = given.paths.split(";")
    for name in names:
        path = PATHS[name]
        for workload in workloads_of(name, given):
            shape = (workload.num_requests, workload.num_draft_tokens)
            for row in measured(name, workload, device):
                row.path = name
                print(
                    f"{name}, B = {row.B}, K = {row.K}, {row.name}: {row.microseconds}",
                    row.error or "",
                    file=sys.stderr,
                )
                if not row.peer:
                    extra[len(rows)] = {}
                    if shape in SHAPES and path.goals:
                        extra[len(rows)]["goal"] = path.goals[SHAPES.index(shape)]
                    if path.beside:
                        extra[len(rows)] |= {"beside": path.beside, "most": path.most}
                rows.append(row)
            torch.cuda.empty_cache()
        # After each path: a kernel that fails takes the process with it.
        record = measure.record(rows, device)
        for number, values in extra.items():
            record["rows"][number] |= values
        write_whole(given.record, json.dumps(record, indent=1) + "\n")
    print(table(record["rows"]))
    for reason in sorted(filter(None, absent)):
        print(f"not measured: {reason}")


def table(rows: list[dict[str, Any]]) -> str:
    """Return one line a path and shape: our time, its share of the floor, and the peer's time over it."""
    places = {(row["path"], row["B"], row["K"], row["peer"]): row["microseconds"] for row in rows}
    lines = []
    for row in rows:
        if not row["peer"]:
            us, shape = row["microseconds"], (row["B"], row["K"])
            peer = places.get((row["path"], *shape, True))
            beside = places.get((row.get("beside"), *shape, False))
            lines.append(
                [
                    row["path"],
                    *shape,
                    us,
                    us / row["read_floor"] if us and row["read_floor"] else None,
                    row["host_microseconds"],
                    row["mean_emitted"],
                    peer,
                    peer / us if peer and us else None,
                    row.get("goal"),
                    us / beside if beside and us else None,
                    row.get("most"),
                    row["error"],
                ]
            )
    header = ["path", "B", "K", "us", "times floor", "host us", "tau", "peer us", "times ours", "goal"]
    return tabulate(lines, [*header, "beside", "at most", ""], floatfmt=".2f")


if __name__ == "__main__":
    main()
