"""The same step in other libraries, where they are installed: each as a call on our rows.

A peer draws random numbers of its own, so its tokens cannot be compared with the oracle's. Its result is checked for
form, and its mean number of emitted tokens is shown beside ours.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch.nn import functional

from acceptlib.benchmarks.workloads import Batch, Kind, Workload

Emitted: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""[B, K+1] tokens and [B] accepted drafted tokens."""

Bound: TypeAlias = tuple[Callable[[], Any], Callable[[Any], Emitted]]
"""A call, which is timed, and what reads its result, which is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One library's step.

    Attributes:
        label: What tables call it, by kind of input; kinds that it does not take are absent.
        module: What it needs to import.
        bind: From a batch to a call and the reading of its result.
        devices: Types of device it runs on.
        max_requests: Largest B; None for any.
        parameters: Sampling parameters that it takes.
        replays: Whether a CUDA graph can hold it.
    """

    label: Mapping[Kind, str]
    module: str
    bind: Callable[[Batch], Bound]
    devices: tuple[str, ...]
    max_requests: int | None = None
    parameters: tuple[str, ...] = ("temperature",)
    replays: bool = True

    def missing(self) -> str | None:
        """Return why the library cannot be used at all, or None."""
        try:
            importlib.import_module(self.module)
        except Exception as error:  # noqa: BLE001 - a package built for another machine may raise anything
            return f"{self.module} cannot be imported ({' '.join(str(error).split())})"
        return None

    def unsupported(self, workload: Workload, device: torch.device) -> str | None:
        """Return why it cannot run a workload on a device, or None."""
        if workload.kind not in self.label:
            return f"takes {' or '.join(self.label)}, not {workload.kind}"
        if device.type not in self.devices:
            return f"runs on {' or '.join(self.devices)}"
        if self.max_requests is not None and workload.num_requests > self.max_requests:
            return f"takes at most {self.max_requests} request"
        refused = sorted({*workload.parameters, *["bitmask"] * workload.masked} - {*self.parameters})
        return f"takes no {', '.join(refused)}" if refused else None


def _transformers(batch: Batch) -> Bound:
    from transformers.generation.utils import _speculative_sampling  # noqa: PLC0415 - what generate calls

    length, temperature = batch.workload.num_draft_tokens, batch.workload.temperature
    sequence = torch.cat((batch.draft_token_ids[:, :1], batch.draft_token_ids), 1)
    assert batch.draft is not None  # noqa: S101 - its label has no one-hot drafts
    target, draft = batch.target, batch.draft

    # Earlier versions want to be told that the sequence goes on.
    goes_on = (False,) if "is_done_candidate" in inspect.signature(_speculative_sampling).parameters else ()

    def call() -> Emitted:
        rows = (draft, target) if temperature == 1 else (draft / temperature, target / temperature)
        return _speculative_sampling(sequence, rows[0], length, rows[1], *goes_on)  # type: ignore[no-any-return]

    def read(result: Emitted) -> Emitted:
        tokens, accepted = result
        return functional.pad(tokens, (0, length + 1 - tokens.shape[1]), value=-1), accepted.reshape(1)

    return call, read


def vllm(batch: Batch, **options: Any) -> Bound:
    """Return vLLM's step: the passes that its sampler makes over the logits, then its verification.

    Args:
        batch: The rows.
        options: Of its `rejection_sample`, such as `use_block_verification`.
    """
    sampler = importlib.import_module("vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils")
    gumbel = importlib.import_module("vllm.v1.worker.gpu.sample.gumbel")
    size, length = batch.draft_token_ids.shape
    device, rows, workload = batch.device, size * (length + 1), batch.workload
    requests = torch.arange(size, dtype=torch.int32, device=device)
    position = torch.arange(length + 1, device=device).repeat(size)
    of_request = requests.repeat_interleave(length + 1)
    heat = workload.temperature
    arguments: dict[str, Any] = {
        # A request's first entry is its last committed token; the entry after each drafted row holds the row's token.
        "draft_sampled": functional.pad(batch.draft_token_ids, (1, 0)).flatten(),
        "cu_num_logits": torch.arange(0, rows + 1, length + 1, dtype=torch.int32, device=device),
        "pos": position,
        "idx_mapping": requests,
        "expanded_idx_mapping": of_request,
        "expanded_local_pos": position.int(),
        "temperature": torch.full((size,), float(heat > 0), device=device),
        "seed": batch.rng.seeds,
        "num_speculative_steps": length,
        **options,
    }
    target, draft = batch.target.view(rows, -1), batch.draft
    temperature = torch.full((size,), heat, device=device) if heat not in {0.0, 1.0} else None
    if draft is not None and temperature is not None:
        draft = draft / heat  # as its draft model leaves them
    top_k = torch.full((rows,), workload.top_k, dtype=torch.int32, device=device) if workload.top_k else None
    top_p = torch.full((rows,), workload.top_p, device=device) if workload.top_p < 1 else None

    def call() -> Emitted:
        logits = target
        if workload.parameters and heat != 0:
            # Its sampler copies the logits to float32, and changes the copy in place.
            logits = target.to(torch.float32, copy=True)
            if temperature is not None:
                gumbel.apply_temperature(logits, of_request, temperature)
            if top_k is not None or top_p is not None:
                filters = importlib.import_module("vllm.v1.sample.ops.topk_topp_triton")
                logits = filters.apply_top_k_top_p_triton(logits, top_k, top_p)
        return sampler.rejection_sample(logits, draft, **arguments)  # type: ignore[no-any-return]

    return call, lambda result: (result[0], result[1] - 1)


class _Seeds:
    """What FlashInfer asks of a generator. Torch's own refuses to be read while a CUDA graph is captured."""

    def __init__(self) -> None:
        self._state = torch.zeros(2, dtype=torch.int64).view(torch.uint8)

    def get_state(self) -> torch.Tensor:
        """Return seed and offset as bytes."""
        return self._state

    def set_state(self, state: torch.Tensor) -> None:
        """Take the next offset."""
        self._state = state


def _flashinfer(batch: Batch) -> Bound:
    sampling = importlib.import_module("flashinfer.sampling")
    assert batch.draft is not None  # noqa: S101 - its label has no one-hot drafts
    target, draft, temperature = batch.target, batch.draft, batch.workload.temperature
    ids = batch.draft_token_ids.int()
    counts = torch.zeros(2, len(ids), dtype=torch.int32, device=batch.device)  # it adds to them; allocated once
    seeds = _Seeds()

    def softmax(logits: torch.Tensor) -> torch.Tensor:
        probs: torch.Tensor = sampling.softmax(logits.flatten(0, 1), temperature=temperature)
        return probs.view_as(logits)

    def call() -> torch.Tensor:
        p, q = (target, draft) if batch.workload.kind == "probs" else (softmax(target), softmax(draft))
        tokens: torch.Tensor = sampling.chain_speculative_sampling(q, ids, p, *counts, generator=seeds)[0]
        return tokens

    return call, lambda tokens: (tokens, (tokens >= 0).sum(1) - 1)


PEERS: Final[Mapping[str, Peer]] = {
    "flashinfer": Peer(
        label={"probs": "FlashInfer chain", "logits": "FlashInfer softmax and chain"},
        module="flashinfer.sampling",
        bind=_flashinfer,
        devices=("cuda",),
    ),
    "transformers": Peer(
        label={"logits": "transformers"},
        module="transformers.generation.utils",
        bind=_transformers,
        devices=("cpu", "cuda"),
        max_requests=1,
        replays=False,  # it waits for the device in mid-step
    ),
    "vllm": Peer(
        label={"logits": "vLLM", "one-hot": "vLLM"},
        module="vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils",
        bind=vllm,
        devices=("cuda",),
        parameters=("temperature", "top_k", "top_p"),
    ),
}
