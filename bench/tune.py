"""Sizes of the kernels beside each other on a GPU, in one process.

    python bench/tune.py large.reduce_registers=96 "large.emit_block=1024 large.emit_registers=64" --shapes 64x5

Each argument is a variant of `acceptlib.engine.triton.tunings`: fields of its tunings, or of `sizes`, and what to try
in their place, as JSON. The present sizes are timed first and last, which shows how much times differ by themselves.
Before that, parallel processes compile for all variants. Tokens must be those of the first: no size changes a bit of a
result.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, Final
from unittest import mock

import gpu
import torch
from tabulate import tabulate

from acceptlib import checks
from acceptlib.benchmarks import measure, timing, workloads
from acceptlib.benchmarks.workloads import Workload
from acceptlib.engine.triton import engine, tunings
from acceptlib.errors import InputError

AS_IT_IS: Final = ""
"""The variant that changes nothing."""

COPIES: Final = 5
"""Most float32 copies of a workload's rows that are held at a time while rows are made."""

Variant = Mapping[str, Mapping[str, Any]]
"""By name of a tuning, or `sizes`, what to replace."""


def parse(text: str) -> Variant:
    """Return the variant that an argument describes.

    Raises:
        InputError: It names no field of a tuning, or its value is no JSON.
    """
    found: dict[str, dict[str, Any]] = {}
    for setting in text.split():
        place, _, value = setting.partition("=")
        name, _, field = place.partition(".")
        known = getattr(tunings.SIZES if name == "sizes" else getattr(tunings.TUNINGS, name, None), "_fields", ())
        if field not in known:
            msg = f"{setting}: expected TUNING.FIELD=VALUE, of a tuning of acceptlib.engine.triton.tunings or of sizes"
            raise InputError(msg)
        try:
            parsed = json.loads(value)
        except ValueError as error:
            msg = f"{setting}: expected a value in JSON without blanks, got {value!r}"
            raise InputError(msg) from error
        found.setdefault(name, {})[field] = tuple(parsed) if isinstance(parsed, list) else parsed
    return found


@contextlib.contextmanager
def tuned(variant: Variant) -> Iterator[None]:
    """Run calls as a variant says."""
    changed = {name: getattr(tunings.TUNINGS, name)._replace(**variant[name]) for name in variant if name != "sizes"}
    sizes = tunings.SIZES._replace(**variant.get("sizes", {}))
    with (
        mock.patch.object(tunings, "TUNINGS", tunings.TUNINGS._replace(**changed)),
        mock.patch.object(tunings, "SIZES", sizes),
    ):
        engine.schedule.cache_clear()
        checks._CHECKED.clear()  # noqa: SLF001 - what it remembers of calls is how they were run
        yield


def compile_for(path: str, workload: Workload, text: str) -> None:
    """Compile what a variant launches, so that the next process finds it."""
    batch = workloads.make(workload, torch.device("cuda"))
    with tuned(parse(text)):
        measure.step(gpu.PATHS[path].strategy(), batch)()
        torch.cuda.synchronize()
    del batch
    torch.cuda.empty_cache()


def most_processes(todo: Sequence[tuple[str, Workload]]) -> int:
    """Return how many processes have room for a workload each."""
    entries = max(work.num_requests * (2 * work.num_draft_tokens + 1) * work.vocab_size for _, work in todo)
    free, _ = torch.cuda.mem_get_info()
    return max(1, min(os.cpu_count() or 1, free // (4 * COPIES * entries)))


def times(path: str, workload: Workload, texts: list[str], device: torch.device) -> list[float]:
    """Return the microseconds of a call by each variant, over the same batches.

    Raises:
        RuntimeError: A variant gives other tokens than the first.
    """
    batches = measure.batches_of(workload, device)
    found, expected = [], None
    for text in texts:
        with tuned(parse(text)):
            strategy = gpu.PATHS[path].strategy()
            calls = [measure.step(strategy, batch) for batch in batches]
            batches[0].rng.offsets.zero_()
            calls[0]()
            tokens = batches[0].out.output_token_ids.clone()
            if expected is not None and not torch.equal(tokens, expected):
                msg = f"{path}, {workload}: {text!r} gives other tokens than {texts[0]!r}"
                raise RuntimeError(msg)
            expected = tokens
            found.append(timing.replayed(calls, device).median)
    return found


def main() -> None:
    """Compile, measure and print one line a workload."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("variants", nargs="+")
    gpu.add_workloads(parser)
    given = parser.parse_args()
    texts = [AS_IT_IS, *given.variants, AS_IT_IS]
    todo = [(path, workload) for path in given.paths.split(";") for workload in gpu.workloads_of(path, given)]
    for text in given.variants:
        parse(text)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(most_processes(todo), mp_context=context) as pool:
        jobs = [pool.submit(compile_for, path, workload, text) for path, workload in todo for text in texts[:-1]]
        for job in jobs:
            job.result()
    lines = [
        [path, workload.num_requests, workload.num_draft_tokens, *times(path, workload, texts, torch.device("cuda"))]
        for path, workload in todo
    ]
    for number, text in enumerate(given.variants, 1):
        print(f"{number}: {text}")
    header = ["path", "B", "K", "as it is", *range(1, len(given.variants) + 1), "as it is"]
    print(tabulate(lines, header, floatfmt=".2f"))


if __name__ == "__main__":
    main()
