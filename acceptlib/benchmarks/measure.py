"""Strategies and peers measured on the same batches: a benchmark as data, and the record that keeps it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, TypeAlias

import torch

from acceptlib.benchmarks import gate, timing, workloads
from acceptlib.benchmarks.environment import environment
from acceptlib.benchmarks.peers import Peer
from acceptlib.benchmarks.timing import How, Reads
from acceptlib.benchmarks.workloads import Batch, Workload
from acceptlib.checks import Arguments
from acceptlib.engine import backends
from acceptlib.errors import one_line
from acceptlib.inputs import prepare
from acceptlib.strategy import AcceptanceStrategy

COUNTED_REQUESTS: Final = 64
"""Requests, at least, behind a mean number of emitted tokens."""


@dataclass(slots=True, kw_only=True)
class Row:
    """One strategy or peer on one workload. Figures that do not exist are None.

    Attributes:
        path: What is verified from what; rows of one path share a table.
        name: Strategy or peer.
        peer: Whether it is another library.
        B: Requests.
        K: Drafted tokens of each.
        vocab_size: Entries of a row.
        dtype: Dtype of the rows.
        acceptance: Level of the workload.
        source: Where the rows come from.
        backend: Engine that ran it.
        how: How its calls were timed on a GPU: `turns` counts the host's time too, which `read_floor` does not.
        microseconds: Median time of a call.
        spread: Distance between its quartiles.
        host_microseconds: Time that an eager call keeps the host of a GPU busy.
        rows_read: Rows that the step has to read of each request.
        bytes_read: Bytes of those rows, of all requests.
        read_floor: Median microseconds of summing those rows.
        mean_emitted: Tau, over calls that were not timed.
        match: Whether the result was that of the oracle; None where there is nothing to compare with.
        error: Why there are no figures.
    """

    path: str
    name: str
    B: int
    K: int
    vocab_size: int
    dtype: str
    acceptance: str
    source: str
    peer: bool = False
    backend: str = ""
    how: How | None = None
    microseconds: float | None = None
    spread: float | None = None
    host_microseconds: float | None = None
    rows_read: int | None = None
    bytes_read: int | None = None
    read_floor: float | None = None
    mean_emitted: float | None = None
    match: bool | None = None
    error: str | None = None

    @classmethod
    def of(cls, workload: Workload, name: str, *, peer: bool = False) -> Row:
        """Return a row without figures."""
        return cls(
            path=workload.path,
            name=name,
            peer=peer,
            B=workload.num_requests,
            K=workload.num_draft_tokens,
            vocab_size=workload.vocab_size,
            dtype=workload.dtype,
            acceptance=workload.acceptance,
            source=workload.source,
        )

    @property
    def share_of_floor(self) -> float | None:
        """The read floor over the time: 1 where nothing but reading takes time."""
        return self.read_floor / self.microseconds if self.read_floor and self.microseconds else None

    def record(self) -> dict[str, Any]:
        """Return the row as a mapping."""
        return asdict(self)


Make: TypeAlias = Callable[[], AcceptanceStrategy]


def run(
    workload: Workload,
    strategies: Mapping[str, Make],
    peers: Sequence[Peer],
    device: torch.device,
    how: How = "graph",
) -> Iterator[Row]:
    """Yield a row for each strategy and each peer that runs the workload.

    A strategy that raises gets a row that says so: it must not cost the others theirs.

    Args:
        workload: What to verify.
        strategies: What makes each strategy, by name; it may fail, as third parties' code may.
        peers: Other libraries.
        device: Where.
        how: How calls on a GPU are timed if they never wait for it; other calls are timed in turns.
    """
    batches = batches_of(workload, device)
    for name, make in strategies.items():
        row = Row.of(workload, name)
        try:
            strategy = make()
            calls, floor = examine(row, strategy, batches)
            # The engine in torch may wait for the device.
            fill_times(row, calls, floor, device, how if row.backend == "triton" else "turns")
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a third party's rule may raise anything; the row reports it
            row.error = one_line(error)
        yield row
    for peer in peers:
        if peer.unsupported(workload, device) is None:
            row = Row.of(workload, peer.label[workload.kind], peer=True)
            try:
                calls = examine_peer(row, peer, batches)
                fill_times(row, calls, [], device, how if peer.replays else "turns")
            except (Exception, SystemExit) as error:  # noqa: BLE001 - as above
                row.error = one_line(error)
            yield row


def batches_of(workload: Workload, device: torch.device) -> list[Batch]:
    """Return as many batches as a measurement goes through."""
    first = workloads.make(workload, device)
    return [first, *(workloads.make(workload, device, seed) for seed in range(1, timing.num_sets(first)))]


def step(strategy: AcceptanceStrategy, batch: Batch) -> timing.Call:
    """Return a call that verifies a batch in place, in memory of its own, as engines call it."""
    arguments, workload = batch.arguments(strategy), batch.workload
    shape = (workload.num_requests, workload.num_draft_tokens, workload.vocab_size)
    workspace = strategy.workspace(*shape, batch.device)
    return lambda: strategy.verify(
        batch.draft_token_ids, **arguments, rng=batch.rng, out=batch.out, workspace=workspace
    )


def backend_of(strategy: AcceptanceStrategy, batch: Batch) -> str:
    """Return the name of the engine that runs a strategy on a batch; empty for one that overrides `verify`."""
    if strategy.plan is None:
        return ""
    arguments = batch.arguments(strategy)
    inputs = prepare(Arguments(batch.draft_token_ids, rng=batch.rng, **arguments), strategy.plan.traits.state)
    return backends.resolve(strategy.backend, inputs).name


def record(rows: Sequence[Row], device: torch.device) -> dict[str, Any]:
    """Return rows with what a reader needs to judge and repeat them."""
    return {**environment(device), "rows": [row.record() for row in rows]}


def examine(
    row: Row, strategy: AcceptanceStrategy, batches: Sequence[Batch]
) -> tuple[list[timing.Call], list[timing.Call]]:
    """Check a strategy's result and fill in everything but its times.

    Args:
        row: What to fill in.
        strategy: What to examine.
        batches: Of one workload.

    Returns:
        For each batch the call to time, and a call that only reads the rows it has to read.

    Raises:
        MismatchError: The result is wrong.
    """
    first = batches[0]
    row.backend = backend_of(strategy, first)
    row.match = gate.check(strategy, first)
    reads = Reads.of(strategy, first)
    row.rows_read, row.bytes_read = reads.target + reads.draft, reads.bytes(first)
    calls, emitted = [step(strategy, batch) for batch in batches], []
    for call, batch in zip(calls, batches, strict=True):
        for _ in range(_repetitions(batches)):
            call()
            emitted.append(batch.out.num_emitted.clone())
    row.mean_emitted = float(torch.cat(emitted).float().mean())
    return calls, [reads.floor(batch) for batch in batches]


def examine_peer(row: Row, peer: Peer, batches: Sequence[Batch]) -> list[timing.Call]:
    """Check the form of a peer's results, fill in what they say, and return its calls.

    Raises:
        MismatchError: A result has another form than a verified step.
    """
    row.backend = peer.module.partition(".")[0]
    calls, emitted = [], []
    for batch in batches:
        call, read = peer.bind(batch)
        for _ in range(_repetitions(batches)):
            tokens, accepted = read(call())
            gate.form(batch, tokens, accepted)
            emitted.append(accepted + 1)
        calls.append(call)
    row.mean_emitted = float(torch.cat(emitted).float().mean())
    return calls


def fill_times(
    row: Row, calls: Sequence[timing.Call], floor: Sequence[timing.Call], device: torch.device, how: How
) -> None:
    """Time calls beside their read floor; arguments as for `timing.beside`."""
    time, least = timing.beside(calls, floor, device, how)
    row.how = how if device.type == "cuda" else None
    row.microseconds, row.spread = time.median, time.spread
    row.read_floor = None if least is None else least.median
    row.host_microseconds = timing.host(calls[0], device)


def _repetitions(batches: Sequence[Batch]) -> int:
    """Return how often each batch is verified so that the number of emitted tokens is a mean of many requests."""
    return -(-COUNTED_REQUESTS // (len(batches) * batches[0].workload.num_requests))
