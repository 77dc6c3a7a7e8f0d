"""The fused kernel on a GPU beside the read floor: `python bench/gpu.py RECORD.json`.

Every shape is first checked against the torch engine on the CPU, token for token. Times are of CUDA-graph replay over
input sets larger than the L2 cache together, median; ratios are within the run.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from tabulate import tabulate

import acceptlib
from acceptlib.engine.triton import engine

VOCAB_SIZE = 128256
SHAPES = ((1, 3), (8, 3), (32, 3), (64, 5), (128, 7), (256, 7))
FLOOR_BLOCK = 4096
SET_BYTES = 200_000_000  # of all sets together: an H200 caches 60 MB
STRATEGY = acceptlib.create("rejection", backend="triton")
REFERENCE = acceptlib.create("rejection", backend="torch")


class Batch(NamedTuple):
    """One set of inputs, with what a call writes."""

    ids: torch.Tensor
    target: torch.Tensor
    draft: torch.Tensor
    rng: acceptlib.Rng
    out: acceptlib.VerifyResult


def batch(num_requests: int, length: int, seed: int) -> Batch:
    """Return random rows on the GPU, and tokens drafted from them."""
    generator = torch.Generator("cuda").manual_seed(seed)
    logits = torch.randn(num_requests, length + 1, VOCAB_SIZE, device="cuda", generator=generator) * 3
    noise = torch.randn(num_requests, length, VOCAB_SIZE, device="cuda", generator=generator)
    draft = (logits[:, :length] + noise).softmax(-1)
    # An exponential race draws from each row; torch.multinomial is limited to smaller vocabularies a call.
    race = torch.empty_like(draft).exponential_(generator=generator)
    return Batch(
        (draft / race).argmax(-1),
        logits.softmax(-1),
        draft,
        streams(num_requests, "cuda"),
        acceptlib.VerifyResult.empty(num_requests, length, draft.device, logprobs=False),
    )


def streams(num_requests: int, device: str) -> acceptlib.Rng:
    """Return fresh streams."""
    seeds = torch.arange(num_requests, device=device)
    return acceptlib.Rng(seeds=seeds, offsets=torch.zeros_like(seeds))


def verify(inputs: Batch) -> None:
    """Run one step."""
    STRATEGY.verify(inputs.ids, target_probs=inputs.target, draft_probs=inputs.draft, rng=inputs.rng, out=inputs.out)


def check(inputs: Batch) -> None:
    """Compare a step with the torch engine's on the CPU."""
    verify(inputs)
    expected = REFERENCE.verify(
        inputs.ids.cpu(),
        target_probs=inputs.target.cpu(),
        draft_probs=inputs.draft.cpu(),
        rng=streams(len(inputs.ids), "cpu"),
    )
    assert torch.equal(inputs.out.output_token_ids.cpu(), expected.output_token_ids)
    inputs.out.raise_for_status()


@triton.jit
def floor_kernel(out_ptr, target_ptr, draft_ptr, target_stride, draft_stride, vocab_size, BLOCK: tl.constexpr):  # noqa: ANN001, ANN201, N803, PLR0913, PLR0917
    """Sum a block of the first row of target and draft: two rows a request, read once."""
    request = tl.program_id(1).to(tl.int64)
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    p = tl.load(target_ptr + request * target_stride + entry, mask=entry < vocab_size, other=0.0)
    q = tl.load(draft_ptr + request * draft_stride + entry, mask=entry < vocab_size, other=0.0)
    tl.store(out_ptr + request * tl.num_programs(0) + tl.program_id(0), tl.sum(p + q, 0))


def read(inputs: Batch) -> None:
    """Read as much as the step must."""
    blocks = triton.cdiv(VOCAB_SIZE, FLOOR_BLOCK)
    out = torch.empty(len(inputs.ids), blocks, device="cuda")
    strides = inputs.target.stride(0), inputs.draft.stride(0)
    floor_kernel[blocks, len(inputs.ids)](
        out, inputs.target, inputs.draft, *strides, VOCAB_SIZE, BLOCK=FLOOR_BLOCK, num_warps=8
    )


def microseconds(function: Callable[[Batch], None], sets: list[Batch], replays: int = 60) -> float:
    """Return the median time of one call in a captured graph that goes through all sets."""
    for inputs in sets:
        function(inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for inputs in sets:
            function(inputs)
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(sets))
    return statistics.median(times[replays // 10 :])


def host_microseconds(inputs: Batch, calls: int = 300) -> float:
    """Return the mean time that an eager call takes the host."""
    verify(inputs)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        verify(inputs)
    elapsed = time.perf_counter() - start
    torch.cuda.synchronize()
    return elapsed / calls * 1e6


def measure(num_requests: int, length: int) -> dict[str, Any]:
    """Check and time one shape."""
    check(batch(num_requests, length, seed=0))
    count = max(4, -(-SET_BYTES // (num_requests * (2 * length + 1) * VOCAB_SIZE * 4)))
    sets = [batch(num_requests, length, seed) for seed in range(count)]
    row = {
        "B": num_requests,
        "K": length,
        "microseconds": microseconds(verify, sets),
        "read_floor": microseconds(read, sets),
        "host_microseconds": host_microseconds(sets[0]),
        "mean_emitted": float(torch.cat([inputs.out.num_emitted for inputs in sets]).float().mean()),
        "match": True,
    }
    row["ratio"] = row["microseconds"] / row["read_floor"]
    return row


def main(path: str) -> None:
    """Measure all shapes; write the record and print its table."""
    rows = [measure(*shape) for shape in SHAPES]
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)  # noqa: S607
    record = {
        "machine": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": "unknown" if git.returncode else git.stdout.strip(),
        "strategy": STRATEGY.name,
        "input": "probabilities, float32",
        "vocab_size": VOCAB_SIZE,
        "block": engine.BLOCK,
        "rows": rows,
    }
    Path(path).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(tabulate(rows, headers="keys", floatfmt=".2f"))


if __name__ == "__main__":
    main(sys.argv[1])
