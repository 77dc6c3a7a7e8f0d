"""Batches on a GPU, and calls of them in memory of their own, that two test files share."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import triton_calls
import triton_engine_cases  # noqa: F401 - schedules are not remembered: tests change what they depend on

from acceptlib import AcceptanceStrategy, Rng, SamplingParams, VerifyResult

K, V = 3, 9000  # three blocks
LONG = 140_000
FULL = 128_256  # of whose parts the threads of a program that waits have one or two each
FORMS = ("probs", "logits", "ragged-logits", "one-hot")
STRATEGIES = ("rejection", "block", "fly", "typical", "greedy", "relaxed")
"""Between them they launch every stage."""

on_a_gpu = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("remembered"),
]

every_strategy = pytest.mark.parametrize("name", STRATEGIES)
every_form = pytest.mark.parametrize("form", FORMS)


def create(name: str) -> AcceptanceStrategy:
    """Return a strategy that runs in the fused kernels or raises."""
    strategy = triton_calls.strategies()[name]
    strategy.backend = "triton"
    return strategy


def batch(count: int, form: str, most: int = K, vocab_size: int = V, seed: int = 0) -> dict[str, Any]:
    """Return a call of B requests; those of a ragged batch have 0 to K drafted tokens, by the seed."""
    generator = torch.Generator("cuda").manual_seed(seed)
    target = 3 * torch.randn(count, most + 1, vocab_size, generator=generator, device="cuda")
    draft = target[:, :most] + torch.randn(count, most, vocab_size, generator=generator, device="cuda")
    ids = torch.multinomial(draft.softmax(-1).view(-1, vocab_size), 1, generator=generator).view(count, most)
    temperature = torch.linspace(0, 1.5, count, device="cuda")
    if form == "probs":
        return {"draft_token_ids": ids, "target_probs": target.softmax(-1), "draft_probs": draft.softmax(-1)}
    if form == "one-hot":
        return {"draft_token_ids": ids, "target_logits": target, "sampling": SamplingParams(temperature=temperature)}
    if form == "logits":
        sampling = SamplingParams(temperature=temperature)
        return {"draft_token_ids": ids, "target_logits": target, "draft_logits": draft, "sampling": sampling}
    lengths = torch.randint(most + 1, (count,), generator=generator, device="cuda")
    drafted = torch.arange(most, device="cuda") < lengths[:, None]
    return {
        "draft_token_ids": ids[drafted],
        "target_logits": target[torch.arange(most + 1, device="cuda") <= lengths[:, None]],
        "draft_logits": draft[drafted],
        "sampling": SamplingParams(temperature=temperature),
        "cu_num_draft_tokens": torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32),
        "max_num_draft_tokens": most,
    }


def streams(count: int) -> Rng:
    seeds = torch.arange(count, device="cuda") * 31 - 7
    return Rng(seeds=seeds, offsets=torch.zeros(count, dtype=torch.int64, device="cuda"))


class Step:
    """A call that writes into one result, in memory of its own if it `lends` any."""

    def __init__(
        self, name: str, count: int, form: str, seed: int = 0, *, lends: bool = True, vocab_size: int = V
    ) -> None:
        self.strategy = create(name)
        self.rng = streams(count)
        self.out = VerifyResult.empty(count, K, torch.device("cuda"))
        self.arguments = batch(count, form, vocab_size=vocab_size, seed=seed)
        self.arguments["state"] = self.strategy.initial_state(count, "cuda")
        self.arguments["workspace"] = self.strategy.workspace(count, K, vocab_size, "cuda") if lends else None

    def __call__(self) -> torch.Tensor:
        """Take a step and return its tokens."""
        self.strategy.verify(**self.arguments, rng=self.rng, out=self.out)
        return self.out.output_token_ids

    def from_the_start(self, times: int) -> list[torch.Tensor]:
        """Return the tokens of the first steps, and be where it began."""
        tokens = [self().clone() for _ in range(times)]
        self.rng.offsets.zero_()
        return tokens

    def capture(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self()
        return graph


def same(one: VerifyResult, other: VerifyResult, rows: Any = slice(None)) -> bool:
    """Return whether a result equals some rows of another, bit for bit."""
    return all(
        torch.equal(getattr(one, field.name).nan_to_num(9.0), getattr(other, field.name)[rows].nan_to_num(9.0))
        for field in dataclasses.fields(VerifyResult)
        if getattr(one, field.name) is not None
    )
