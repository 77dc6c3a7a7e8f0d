"""Every strategy, plugins included, and every peer on every workload: groups by workload, rows by strategy.

Run with `make bench`. On a GPU the same suite times the calls there: pytest-benchmark's clock waits for the device, and
`extra_info` has the time of a replayed CUDA graph as well.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final

import pytest
import torch

import acceptlib
from acceptlib.benchmarks import measure, timing
from acceptlib.benchmarks.measure import Row
from acceptlib.benchmarks.peers import PEERS
from acceptlib.benchmarks.workloads import Batch, Level, Workload

DEVICE: Final = torch.device("cuda" if torch.cuda.is_available() else "cpu")

LEVELS: tuple[Level, ...] = ("low", "medium", "high")

WORKLOADS: Final = (
    Workload(kind="logits"),
    Workload(kind="logits", vocab_size=151936, dtype="bfloat16"),
    Workload(kind="one-hot"),
    Workload(kind="logits", num_requests=4, num_draft_tokens=4, source="pair"),
    *(Workload(kind="probs", acceptance=level) for level in LEVELS),
    *(
        Workload(kind="probs", acceptance=level, num_requests=16, num_draft_tokens=4, vocab_size=3072, source="pair")
        for level in LEVELS
    ),
)

pytestmark = pytest.mark.benchmark(timer=timing.clock(DEVICE))


@functools.lru_cache(maxsize=1)
def batches_of(workload: Workload) -> list[Batch]:
    """Return the batches of a workload, made once for all strategies."""
    return measure.batches_of(workload, DEVICE)


def report(
    benchmark: Any,
    workload: Workload,
    row: Row,
    calls: Sequence[timing.Call],
    floor: Sequence[timing.Call],
    how: timing.How,
) -> None:
    """Time the first call with pytest-benchmark, and say what all of them achieved."""
    benchmark.group = str(workload)
    measure.fill_times(row, calls, floor, DEVICE, how)
    benchmark.extra_info |= {
        "tau": row.mean_emitted,
        "gpu_microseconds": row.microseconds if DEVICE.type == "cuda" else None,
        "bytes_read": row.bytes_read,
        "share_of_read_floor": row.share_of_floor,
        "backend": row.backend,
        "match": row.match,
    }
    benchmark(calls[0])


@pytest.mark.parametrize("name", acceptlib.available())
@pytest.mark.parametrize("workload", WORKLOADS, ids=str)
def test_strategy(benchmark: Any, workload: Workload, name: str) -> None:
    """Every strategy; a wrong result fails before it is timed."""
    row = Row.of(workload, name)
    calls, floor = measure.examine(row, acceptlib.create(name), batches_of(workload))
    report(benchmark, workload, row, calls, floor, "graph" if row.backend == "triton" else "turns")


@pytest.mark.parametrize(
    ("workload", "name"),
    [
        pytest.param(workload, name, id=f"{workload}-{name}")
        for workload in WORKLOADS
        for name, peer in PEERS.items()
        if peer.missing() is None and peer.unsupported(workload, DEVICE) is None
    ],
)
def test_peer(benchmark: Any, workload: Workload, name: str) -> None:
    """Every library that is installed and takes the workload."""
    peer, row = PEERS[name], Row.of(workload, name, peer=True)
    calls = measure.examine_peer(row, peer, batches_of(workload))
    report(benchmark, workload, row, calls, [], "graph" if peer.replays else "turns")
