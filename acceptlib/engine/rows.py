"""Where rows are: the ragged and padded layouts, and rows of processed probabilities in the torch engine."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch.nn import functional

from acceptlib.engine.scratch import scratch
from acceptlib.inputs import Status

if TYPE_CHECKING:
    from acceptlib.inputs import Inputs, Rows

Model: TypeAlias = Literal["target", "draft"]

AT_ONCE_BYTES = 8 << 20
"""Size of float32 rows up to which all of a model's rows are processed and kept for the call."""


class Layout:
    """Positions of a batch: as a grid [B, K], and flat, [N], without the holes of the ragged layout.

    Attributes:
        valid: [B, K] bool, positions before each request's end.
        ids: [B, K] int64 drafted tokens, clamped to the vocabulary; whatever there is beyond a request's end.
        outside: [B, K] bool, whether the drafted token was above the vocabulary.
        num_draft_tokens: [B] int64, n_b after placeholders ended chains.
        reached_end: [B] bool, whether no placeholder ended a chain before its count; True in the padded layout.
        has_bonus_rows: Whether the target's rows include bonus rows.
        faults: [B] int64, a `Status` that holds for the whole request.
        flat_ids, flat_request, flat_position: [N] int64; N is T, or B * K in the padded layout.
    """

    def __init__(self, inputs: Inputs) -> None:
        """Lay out the positions of one call."""
        num_requests, most = inputs.num_requests, inputs.max_num_draft_tokens
        position, request, flat_request, flat_position = _grid(num_requests, most, inputs.device)
        self.shape = (num_requests, most)
        self.has_bonus_rows = inputs.has_bonus_rows
        self.faults = _parameter_faults(inputs, request)
        drafted = inputs.draft_token_ids.to(torch.int64)
        if inputs.cu_num_draft_tokens is None:
            self.start = None
            ids = drafted
            valid = ids >= 0
            self.flat_request, self.flat_position = flat_request, flat_position
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
        before_end = valid.cumprod(1)
        self.valid = before_end.bool()
        self.num_draft_tokens = before_end.sum(1)
        self.reached_end = self.num_draft_tokens == (self.num_draft_tokens if self.start is None else count)
        self.outside = ids >= inputs.vocab_size
        self.ids = ids.clamp(0, inputs.vocab_size - 1)
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
        """Return the index of rows in the caller's tensor; in bounds, also where a bonus position has none."""
        if self.start is None:
            return request, position if self._has_bonus(model) else position.clamp(max=self.shape[1] - 1)
        row = self.start[request] + position
        return (row + request,) if self._has_bonus(model) else (row.clamp(max=self.num_tokens - 1),)

    def request_of_rows(self, model: Model) -> torch.Tensor:
        """Return the request of every row of the caller's tensor, in the shape of its leading dimensions."""
        request = torch.arange(self.shape[0], device=self.ids.device)
        if self.start is None:
            return request[:, None].expand(-1, self.shape[1] + self._has_bonus(model))
        if not self._has_bonus(model):
            return self.flat_request
        row = torch.arange(self.num_tokens + self.shape[0], device=self.ids.device)
        return torch.searchsorted(self.start + request, row, right=True) - 1

    def _has_bonus(self, model: Model) -> bool:
        return model == "target" and self.has_bonus_rows


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
        if 4 * self.raw.numel() > AT_ONCE_BYTES:
            return None
        temperature = self.temperature
        if temperature is not None:
            temperature = temperature[self.layout.request_of_rows(self.model)]
        return process(self.raw, temperature, f"{self.model}-processed")

    def rows(self, request: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Return rows [n, V] float32 in scratch memory, which the next call overwrites."""
        index = self.layout.index(self.model, request, position)
        if self.processed is not None:
            rows = _select(self.processed, index, self.model).to(torch.float32)
        else:
            temperature = None if self.temperature is None else self.temperature[request]
            rows = process(_select(self.raw, index, f"{self.model}-raw"), temperature, self.model)
        missing = self.vocab_size - rows.shape[1]
        return functional.pad(rows, (0, missing)) if missing else rows

    def probs_at_flat_ids(self) -> torch.Tensor:
        """Return the probabilities [N] float64 of the drafted tokens; 0 beyond a narrower vocabulary."""
        layout = self.layout
        width = self.raw.shape[-1]
        ids = layout.flat_ids.clamp(max=width - 1)
        index = layout.index(self.model, layout.flat_request, layout.flat_position)
        if self.processed is not None:
            found = self.processed[(*index, ids)]
        elif self.raw.is_contiguous():
            found = self._probs_of_rows(_row_number(self.raw, index), ids)
        else:
            chunks = [slice(start, start + self.chunk) for start in range(0, len(ids), self.chunk)]
            parts = [  # each taken before the next overwrites its rows
                self.rows(layout.flat_request[chunk], layout.flat_position[chunk]).gather(1, ids[chunk, None])[:, 0]
                for chunk in chunks
            ]
            found = torch.cat(parts)
        found = found.to(torch.float64)
        return found if width >= self.vocab_size else found.masked_fill(layout.flat_ids >= width, 0)

    def _probs_of_rows(self, row: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return the probabilities of `ids` in rows, both [N], going through all rows where they lie."""
        flat = self.raw.view(-1, self.raw.shape[-1])
        token = ids.new_zeros(len(flat)).index_copy_(0, row, ids)[:, None]
        temperature = self.temperature
        if temperature is not None:
            temperature = temperature[self.layout.request_of_rows(self.model)].reshape(-1)
        parts = []
        for start in range(0, len(flat), self.chunk):
            some = slice(start, start + self.chunk)
            probs = process(flat[some], None if temperature is None else temperature[some], self.model)
            parts.append(probs.gather(1, token[some])[:, 0])
        return torch.cat(parts)[row]

    @functools.cached_property
    def best(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Argmax and largest value of every row, in the shape of the leading dimensions."""
        token = self.raw.argmax(-1)
        return token, self.raw.gather(-1, token[..., None])[..., 0]

    def argmax(
        self, request: torch.Tensor, position: torch.Tensor, *, every_row: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the argmax [n] of rows, lowest id among ties, and whether [n] the row has a law.

        Taken from the caller's own values: rounding to probabilities could tie what was not. `every_row` finds it
        for all rows at once, and keeps it.
        """
        index = self.layout.index(self.model, request, position)
        if every_row:
            token, best = (found[index] for found in self.best)
        else:
            rows = _select(self.raw, index, f"{self.model}-raw")
            token = rows.argmax(-1)
            best = rows.gather(-1, token[:, None])[:, 0]
        return token, best.isfinite() if self.is_logits else best.isfinite() & (best > 0)


def process(logits: torch.Tensor, temperature: torch.Tensor | None, name: str = "") -> torch.Tensor:
    """Return the law that rows of logits are sampled from.

    Args:
        logits: [..., V].
        temperature: [...] float32, 0 for a one-hot row, or None for 1.
        name: Of the scratch memory that the result is in; a new tensor without one.

    Returns:
        [..., V] float32 probabilities; NaN throughout a row that has no law.
    """
    if name:
        probs = scratch(name, logits.shape, torch.float32, logits.device)
    else:
        probs = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    if temperature is None:
        return torch.softmax(logits, -1, dtype=torch.float32, out=probs)
    greedy = (temperature == 0)[..., None]
    scaled = scratch("logits", logits.shape, torch.float32, logits.device).copy_(logits)
    # Less the maximum first: a quotient by a low temperature would lose digits, or overflow.
    scaled.sub_(scaled.amax(-1, keepdim=True)).div_(temperature[..., None].masked_fill(greedy, 1))
    torch.softmax(scaled, -1, out=probs)
    probs.mul_(~greedy)  # NaN times 0 stays NaN, so that a greedy row without a law is still found
    return probs.scatter_add_(-1, logits.argmax(-1, keepdim=True), greedy.to(torch.float32))


def _select(data: torch.Tensor, index: tuple[torch.Tensor, ...], name: str) -> torch.Tensor:
    """Return rows [n, V] of `data` in scratch memory."""
    if len(index) > 1 and not data.is_contiguous():
        return data[index]
    # Several times quicker than indexing, but for one dimension only.
    row = _row_number(data, index)
    flat = data.view(-1, data.shape[-1]) if len(index) > 1 else data
    rows = scratch(name, (len(row), data.shape[-1]), data.dtype, data.device)
    return torch.index_select(flat, 0, row, out=rows)


def _row_number(data: torch.Tensor, index: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return the number of rows in contiguous `data`."""
    return index[0] if len(index) == 1 else index[0] * data.shape[1] + index[1]


@functools.lru_cache(maxsize=64)
def _grid(num_requests: int, most: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return the positions [K], the requests [B], and request and position of each entry of a [B, K] grid, [B * K]."""
    position, request = torch.arange(most, device=device), torch.arange(num_requests, device=device)
    return position, request, request.repeat_interleave(most), position.repeat(num_requests)


def _parameter_faults(inputs: Inputs, request: torch.Tensor) -> torch.Tensor:
    faults = torch.full_like(request, Status.OK)
    for rows in (inputs.target, inputs.draft):
        if rows is not None and rows.temperature is not None:
            sane = (rows.temperature >= 0) & (rows.temperature < torch.inf)
            faults.masked_fill_(~sane, Status.INVALID_PARAMETER)
    return faults
