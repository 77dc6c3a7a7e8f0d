"""Every strategy, plugins included, and every peer on every workload: groups by workload, rows by strategy.

Run with `make bench`. On a GPU the same suite times the calls there: pytest-benchmark's clock waits for the device, and
`extra_info` has the time of a replayed CUDA graph as well.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import acceptlib
from acceptlib.benchmarks import measure, timing
from acceptlib.benchmarks.measure import Row
from acceptlib.benchmarks.peers import PEERS
from acceptlib.benchmarks.workloads import Batch, Workload

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

WORKLOADS = (
    Workload(kind="logits"),
    Workload(kind="logits", vocab_size=151936, dtype="bfloat16"),
    Workload(kind="one-hot"),
    Workload(kind="probs", acceptance="low"),
    Workload(kind="probs"),
    Workload(kind="probs", acceptance="high"),
    Workload(kind="probs", num_requests=16, num_draft_tokens=4, vocab_size=3072, source="pair"),
    Workload(kind="logits", num_requests=4, num_draft_tokens=4, source="pair"),
)

pytestmark = pytest.mark.benchmark(timer=timing.clock(DEVICE))


@functools.lru_cache(maxsize=1)
def batches_of(workload: Workload) -> tuple[list[Batch], measure.Floors]:
    """Return the batches of a workload, and a place for its read floors."""
    return measure.batches_of(workload, DEVICE), {}


def report(benchmark: Any, row: Row, calls: Sequence[timing.Call], *, replays: bool) -> None:
    """Time the first call and say what it achieved."""
    benchmark(calls[0])
    seconds = benchmark.stats.stats.median if benchmark.stats else None  # none with --benchmark-disable
    row.microseconds = None if seconds is None else seconds * 1e6
    if DEVICE.type == "cuda":
        row.microseconds = timing.of_calls(calls, DEVICE, replays=replays).median
        benchmark.extra_info["gpu_microseconds"] = row.microseconds
    benchmark.extra_info |= {
        "tau": row.mean_emitted,
        "bytes_read": row.bytes_read,
        "share_of_read_floor": row.share_of_floor,
        "backend": row.backend,
        "match": row.match,
    }


@pytest.mark.parametrize("name", acceptlib.available())
@pytest.mark.parametrize("workload", WORKLOADS, ids=str)
def test_strategy(benchmark: Any, workload: Workload, name: str) -> None:
    """Every strategy; a wrong result fails before it is timed."""
    benchmark.group = str(workload)
    batches, floors = batches_of(workload)
    strategy, row = acceptlib.create(name), Row.of(workload, name)
    measure.examine(row, strategy, batches, floors)
    calls = [measure.step(strategy, batch) for batch in batches]
    report(benchmark, row, calls, replays=row.backend == "triton")


@pytest.mark.parametrize("name", [name for name, peer in PEERS.items() if peer.missing() is None])
@pytest.mark.parametrize("workload", WORKLOADS, ids=str)
def test_peer(benchmark: Any, workload: Workload, name: str) -> None:
    """Every library that is installed and takes the workload."""
    batches, _ = batches_of(workload)
    peer, row = PEERS[name], Row.of(workload, name, peer=True)
    if (reason := peer.unsupported(batches[0])) is not None:
        pytest.skip(f"{name} {reason}")
    benchmark.group = str(workload)
    report(benchmark, row, measure.examine_peer(row, peer, batches), replays=peer.replays)
