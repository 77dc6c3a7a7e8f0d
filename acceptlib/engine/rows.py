"""Where rows are: the ragged and padded layouts, and rows of processed probabilities in the torch engine."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch.nn import functional

from acceptlib.inputs import Status

if TYPE_CHECKING:
    from acceptlib.inputs import Inputs, Rows

Model: TypeAlias = Literal["target", "draft"]


class Layout:
    """Positions of a batch: as a grid [B, K], and flat, [N], without the holes of the ragged layout.

    Attributes:
        valid: [B, K] bool, positions before each request's end.
        ids: [B, K] int64 drafted tokens; 0 where there is none or it is outside the vocabulary.
        outside: [B, K] bool, drafted tokens outside the vocabulary.
        num_draft_tokens: [B] int64, n_b after placeholders ended chains.
        faults: [B] int64, a `Status` that holds for the whole request.
        flat_ids, flat_request, flat_position: [N] int64; N is T, or B * K in the padded layout.
    """

    def __init__(self, inputs: Inputs) -> None:
        """Lay out the positions of one call."""
        num_requests, most = inputs.num_requests, inputs.max_num_draft_tokens
        position = torch.arange(most, device=inputs.device)
        request = torch.arange(num_requests, device=inputs.device)
        self.shape = (num_requests, most)
        self.faults = _parameter_faults(inputs, request)
        drafted = inputs.draft_token_ids.to(torch.int64)
        if inputs.cu_num_draft_tokens is None:
            self.start = None
            ids = drafted
            valid = ids >= 0
            self.flat_request = request.repeat_interleave(most)
            self.flat_position = position.repeat(num_requests)
        else:
            self.num_tokens = len(drafted)
            given = inputs.cu_num_draft_tokens.to(torch.int64)
            # Bounds that decrease or leave the tensor are faults; made monotone, they give no index out of range.
            bounds = given.cummax(0).values.clamp(0, self.num_tokens)
            self.start, count = bounds[:-1], bounds.diff()
            sane = (given == bounds)[:-1] & (given == bounds)[1:] & (count <= most) & (given[0] == 0)
            self.faults = self.faults.masked_fill(~sane, Status.INVALID_COUNT)
            flat = torch.arange(self.num_tokens if most else 0, device=inputs.device)
            ends = bounds[1:].contiguous()
            self.flat_request = torch.searchsorted(ends, flat, right=True).clamp(max=num_requests - 1)
            self.flat_position = (flat - self.start[self.flat_request]).clamp(0, max(most - 1, 0))
            ids = self.to_grid(drafted)
            valid = (ids >= 0) & (position < count.masked_fill(~sane, 0)[:, None])
        self.valid = valid.to(torch.int64).cumprod(1).bool()
        self.num_draft_tokens = self.valid.sum(1)
        self.outside = self.valid & (ids >= inputs.vocab_size)
        self.ids = ids.masked_fill(~self.valid | self.outside, 0)
        self.flat_ids = self.ids.reshape(-1) if self.start is None else self.ids[self.flat_request, self.flat_position]

    def to_grid(self, flat: torch.Tensor) -> torch.Tensor:
        """Return [N] values as [B, K]; beyond a request's end they are some other position's."""
        if self.start is None:
            return flat.view(self.shape)
        if not self.num_tokens or not self.shape[1]:
            return flat.new_zeros(self.shape)
        position = torch.arange(self.shape[1], device=flat.device)
        return flat[(self.start[:, None] + position).clamp(max=self.num_tokens - 1)]

    def index(self, model: Model, request: torch.Tensor, position: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the index of rows in the caller's tensor; in bounds, also for the draft's row at a bonus position."""
        if self.start is None:
            return request, position if model == "target" else position.clamp(max=self.shape[1] - 1)
        row = self.start[request] + position
        return (row + request,) if model == "target" else (row.clamp(max=self.num_tokens - 1),)

    def request_of_rows(self, model: Model) -> torch.Tensor:
        """Return the request of every row of the caller's tensor, in the shape of its leading dimensions."""
        request = torch.arange(self.shape[0], device=self.ids.device)
        if self.start is None:
            return request[:, None].expand(-1, self.shape[1] + (model == "target"))
        if model == "draft":
            return self.flat_request
        row = torch.arange(self.num_tokens + self.shape[0], device=self.ids.device)
        return torch.searchsorted(self.start + request, row, right=True) - 1


class RowReader:
    """Rows of one model as probabilities: all at once where they fit into one chunk, else as they are asked for."""

    def __init__(self, rows: Rows, layout: Layout, vocab_size: int, chunk: int, model: Model) -> None:
        """Wrap the caller's rows.

        Args:
            rows: The rows as given.
            layout: Where they are.
            vocab_size: V; a draft's rows are padded with zeros or cut to it.
            chunk: Number of rows that may be processed at a time.
            model: Whose rows they are.
        """
        self.raw = rows.data
        self.is_logits = rows.is_logits
        self.temperature = rows.temperature
        self.layout = layout
        self.vocab_size = vocab_size
        self.chunk = chunk
        self.model = model

    @functools.cached_property
    def processed(self) -> torch.Tensor | None:
        """Every row as probabilities, in the caller's layout; None for logits too large to process at once."""
        if not self.is_logits:
            return self.raw
        if self.raw.numel() > self.chunk * self.raw.shape[-1]:
            return None
        temperature = self.temperature
        return process(self.raw, None if temperature is None else temperature[self.layout.request_of_rows(self.model)])

    def rows(self, request: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Return rows [n, V] float32, as a new tensor."""
        index = self.layout.index(self.model, request, position)
        if self.processed is not None:
            rows = self.processed[index].to(torch.float32)
        else:
            rows = process(self.raw[index], None if self.temperature is None else self.temperature[request])
        missing = self.vocab_size - rows.shape[1]
        return functional.pad(rows, (0, missing)) if missing else rows

    def probs_at_flat_ids(self) -> torch.Tensor:
        """Return the probabilities [N] float64 of the drafted tokens, read one entry each; needs `processed`."""
        assert self.processed is not None  # noqa: S101 - the caller goes row by row otherwise
        layout = self.layout
        ids = layout.flat_ids
        index = layout.index(self.model, layout.flat_request, layout.flat_position)
        width = self.raw.shape[-1]
        if width >= self.vocab_size:
            return self.processed[(*index, ids)].to(torch.float64)
        return torch.where(ids < width, self.processed[(*index, ids.clamp(max=width - 1))].to(torch.float64), 0.0)

    def argmax(self, request: torch.Tensor, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the argmax [n] of rows, lowest id among ties, and whether [n] the row has a law.

        Taken from the caller's own values: rounding to probabilities could tie what was not.
        """
        rows = self.raw[self.layout.index(self.model, request, position)]
        token = rows.argmax(-1)
        best = rows.gather(-1, token[:, None])[:, 0]
        return token, best.isfinite() if self.is_logits else best.isfinite() & (best > 0)


def process(logits: torch.Tensor, temperature: torch.Tensor | None) -> torch.Tensor:
    """Return the law that rows of logits are sampled from.

    Args:
        logits: [..., V].
        temperature: [...] float32, 0 for a one-hot row, or None for 1.

    Returns:
        [..., V] float32 probabilities; NaN throughout a row that has no law.
    """
    if temperature is None:
        return torch.softmax(logits, -1, dtype=torch.float32)
    greedy = (temperature == 0)[..., None]
    logits = logits.to(torch.float32)
    # Less the maximum first: a quotient by a low temperature would lose digits, or overflow.
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature[..., None].masked_fill(greedy, 1)
    probs = torch.softmax(scaled, -1)
    probs.mul_(~greedy)  # NaN times 0 stays NaN, so that a greedy row without a law is still found
    return probs.scatter_add_(-1, logits.argmax(-1, keepdim=True), greedy.to(torch.float32))


def _parameter_faults(inputs: Inputs, request: torch.Tensor) -> torch.Tensor:
    faults = torch.full_like(request, Status.OK)
    for rows in (inputs.target, inputs.draft):
        if rows is not None and rows.temperature is not None:
            sane = (rows.temperature >= 0) & (rows.temperature < torch.inf)
            faults.masked_fill_(~sane, Status.INVALID_PARAMETER)
    return faults
