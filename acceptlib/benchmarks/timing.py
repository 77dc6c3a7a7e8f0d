"""Clocks that wait for the device, and the least that reading the rows takes."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import torch

from acceptlib.benchmarks.workloads import Batch
from acceptlib.engine.plan import OF_ROWS
from acceptlib.strategy import AcceptanceStrategy

Call = Callable[[], Any]
How: TypeAlias = Literal["graph", "queue", "turns"]
"""How calls on a GPU are timed: in a graph, eagerly while they wait in its queue, or each from the host."""

SECONDS: Final = 0.4
"""Time spent on one measurement, more or less."""

MIN_ROUNDS: Final = 5
MAX_ROUNDS: Final = 200
REPLAYS: Final = 60
SET_BYTES: Final = 200_000_000
"""Total size of the input sets that calls on a GPU go through: more than its L2 cache holds."""

MIN_SETS: Final = 4

GRAPH_CALLS: Final = 16
"""Calls in a graph, or in a queue, at least: starting one takes the device some microseconds."""

FIRST_GRAPHS: Final = 3
"""Graphs of a process that say little of later ones: on an H200 each of their kernels took 0.35 us less."""

_GRAPHS: Final = itertools.count()
"""Graphs timed so far, or more."""

HOST_ROUNDS: Final = 20
HOST_CALLS: Final = 10
"""Eager calls in a round that tells how long the host is busy: if its kernels filled the queue, the host would wait."""

CYCLES: Final = 2e9
"""Cycles of a GPU in a second, more or less."""

LONGEST: Final = 2.0
"""Seconds that a GPU is held while the host fills its queue, at most."""


@dataclass(frozen=True, slots=True)
class Time:
    """Microseconds of one call.

    Attributes:
        median: The median.
        spread: Distance between the quartiles.
    """

    median: float
    spread: float

    @classmethod
    def of(cls, microseconds: Sequence[float]) -> Time:
        """Summarise at least two rounds."""
        low, median, high = statistics.quantiles(microseconds, n=4, method="inclusive")
        return cls(median, high - low)


@dataclass(frozen=True, slots=True)
class Reads:
    """What a strategy has to read of a request at least.

    Attributes:
        target: Rows of the target.
        draft: Rows of the draft.
    """

    target: int
    draft: int

    @classmethod
    def of(cls, strategy: AcceptanceStrategy, batch: Batch) -> Reads:
        """Return what a strategy reads of each request of a batch.

        Logits have to be normalised, and sums and maxima taken, over every row that a decision depends on. Where it
        depends on none, or from probabilities on the drafted tokens' entries alone, only the rows at the stop are read.
        """
        plan, workload = strategy.plan, batch.workload
        reads_draft = batch.draft is not None and (plan is None or plan.reads_draft)
        everything = cls(workload.num_draft_tokens + 1, workload.num_draft_tokens * reads_draft)
        if plan is None or plan.used_row_sums:
            return everything
        over_rows = OF_ROWS | {"is_target_argmax", "next_residual_mass"}
        if workload.kind == "probs":
            over_rows -= {"target_prob", "draft_prob"}
        return cls(1, int(reads_draft)) if plan.reads.isdisjoint(over_rows) else everything

    def bytes(self, batch: Batch) -> int:
        """Return the bytes of these rows of every request."""
        rows = self.target + self.draft
        return rows * batch.workload.num_requests * batch.workload.vocab_size * batch.target.element_size()

    def floor(self, batch: Batch) -> Call:
        """Return a call that sums these rows and does nothing else: the read floor."""
        models = [batch.target[:, : self.target]]
        if batch.draft is not None and self.draft:
            models.append(batch.draft[:, : self.draft])
        if batch.device.type == "cuda":
            from acceptlib.benchmarks import floor  # noqa: PLC0415 - Triton is slow to import

            reads = [floor.read(rows) for rows in models]
            return lambda: [read() for read in reads]
        return lambda: [rows.sum(-1) for rows in models]


def clock(device: torch.device) -> Callable[[], float]:
    """Return a clock in seconds that waits for the device first: a timer for pytest-benchmark too."""
    if device.type == "cpu":
        return time.perf_counter

    def now() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return now


def in_turns(calls: Sequence[Call], device: torch.device) -> list[Time]:
    """Time calls eagerly, one after the other in every round, so that a slow moment hits all alike."""
    now = clock(device)
    for call in calls:
        call()
    columns: list[list[float]] = [[] for _ in calls]
    end = now() + SECONDS * len(calls)
    while len(columns[0]) < MIN_ROUNDS or (now() < end and len(columns[0]) < MAX_ROUNDS):
        for call, column in zip(calls, columns, strict=True):
            start = now()
            call()
            column.append((now() - start) * 1e6)
    return [Time.of(column) for column in columns]


def replayed(calls: Sequence[Call], device: torch.device) -> Time:
    """Time calls in a CUDA graph that goes through all of them, per call; in none of a process's `FIRST_GRAPHS`."""
    calls = _enough(calls)
    with torch.cuda.device(device):
        for call in calls:
            call()  # compiles
        while next(_GRAPHS) < FIRST_GRAPHS:
            _replays(calls)
        return Time.of(_replays(calls)[REPLAYS // 10 :])


def _replays(calls: Sequence[Call]) -> list[float]:
    """Return the microseconds per call of every replay of a graph."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    rounds = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        graph.replay()  # keeps the device busy while the host launches the next
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        rounds.append(start.elapsed_time(end) * 1e3 / len(calls))
    return rounds


def queued(calls: Sequence[Call], device: torch.device) -> Time:
    """Time eager calls that wait in a GPU's queue, so that it never waits for the host, per call.

    Raises:
        RuntimeError: A call waits for the device.
    """
    calls = _enough(calls)
    hold: Callable[[int], None] = torch.cuda._sleep  # noqa: SLF001 - what torch's own tests hold a device with
    rounds: list[float] = []
    with torch.cuda.device(device):
        for call in calls:
            call()  # compiles
        seconds = 1e-3
        while len(rounds) < REPLAYS:
            torch.cuda.synchronize()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            hold(int(seconds * CYCLES))
            start.record()
            for call in calls:
                call()
            end.record()
            began = start.query()  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
            if not began:
                rounds.append(start.elapsed_time(end) * 1e3 / len(calls))
            elif seconds < LONGEST:
                seconds *= 2
            else:
                msg = f"expected calls that the host can queue within {LONGEST} s, and one seems to wait for the device"
                raise RuntimeError(msg)
    return Time.of(rounds[REPLAYS // 10 :])


def _enough(calls: Sequence[Call]) -> list[Call]:
    """Return calls several times over, as many as are timed together."""
    return [*calls] * -(-GRAPH_CALLS // len(calls))


def beside(calls: Sequence[Call], others: Sequence[Call], device: torch.device, how: How) -> tuple[Time, Time | None]:
    """Time calls on different inputs, and others beside them.

    Args:
        calls: One per input.
        others: The same for something to compare with, or none.
        device: Where they run.
        how: How a GPU's `calls` are timed, with `turns` only the first; its `others` are always timed in a graph. On a
            CPU, the first of each are timed in turns.
    """
    if device.type == "cuda":
        other = replayed(others, device) if others else None
        if how == "turns":
            return in_turns(calls[:1], device)[0], other
        return replayed(calls, device) if how == "graph" else queued(calls, device), other
    times = in_turns([calls[0], *others[:1]], device)
    return times[0], times[1] if others else None


def host(call: Call, device: torch.device) -> float | None:
    """Return the median microseconds that a call keeps the host of a GPU busy; None on a CPU, which is its own host.

    The device is idle before each round, so that its queue never fills up, which would make the host wait.
    """
    if device.type != "cuda":
        return None
    call()
    rounds = []
    for _ in range(HOST_ROUNDS):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(HOST_CALLS):
            call()
        rounds.append((time.perf_counter() - start) * 1e6 / HOST_CALLS)
    torch.cuda.synchronize(device)
    return Time.of(rounds).median


def num_sets(batch: Batch) -> int:
    """Return how many input sets a measurement needs: more than a GPU's cache holds, one on a CPU."""
    if batch.device.type != "cuda":
        return 1
    size = sum(rows.numel() * rows.element_size() for rows in (batch.target, batch.draft) if rows is not None)
    return max(MIN_SETS, -(-SET_BYTES // size))
