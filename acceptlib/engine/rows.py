"""Where rows are: the ragged and padded layouts, and rows of processed probabilities in the torch engine."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import numpy as np
import torch
from torch.nn import functional

from acceptlib import ops
from acceptlib.arrays import Array, all_so_far, arange, as_array, as_tensor, cached, device_of, library, maybe_any
from acceptlib.engine.logits import constrain, take
from acceptlib.engine.process import in_range, max_and_log_sum_exp, process
from acceptlib.engine.scratch import scratch
from acceptlib.inputs import Rows
from acceptlib.result import INVALID_COUNT, INVALID_PARAMETER, OK

if TYPE_CHECKING:
    from acceptlib.inputs import Inputs

ModelName: TypeAlias = Literal["target", "draft"]

KEPT_BYTES: Final = 8 << 20
"""Size of float32 rows up to which all of a model's processed rows are kept for the call. Of more rows, as many bytes
are held at a time."""

SHARED_ROW: Final = 1 << 15
"""Length from which on `index_select` copies one row with several threads."""

LONG_ROW: Final = 1 << 13
"""Length from which on an argmax takes so long that rows go one by one, to leave out those that do not matter."""


class Layout:
    """Positions of a batch: as a grid [B, K], and flat, [N], without the holes of the ragged layout.

    Attributes:
        shape: (B, K).
        request, position: Numbers from 0, [B] and [K] int64.
        start: [B] int64, where each request's drafted tokens begin among T; None in the padded layout.
        num_tokens: T, in the ragged layout alone.
        valid: [B, K] bool, positions before each request's end.
        ids: [B, K] int64 drafted tokens, clamped to the vocabulary; arbitrary beyond a request's end.
        outside: [B, K] bool, whether the drafted token is V or more, before it was clamped.
        num_draft_tokens: [B] int64, n_b after placeholders ended chains.
        reached_end: [B] bool, whether no placeholder ended a chain before its count; True in the padded layout.
        has_bonus_rows: Whether the target's rows include bonus rows.
        faults: [B] int64, a `Status` that holds for the whole request; None where nothing was given that could be bad.
        flat_request, flat_position, flat_ids: [N] int64. N is T, or B * K in the padded layout, which goes position by
            position: evenly spaced rows need no copy.
    """

    def __init__(self, inputs: Inputs, *, reads_draft: bool) -> None:
        """Lay out the positions of one call, whose strategy reads the draft's rows or not."""
        num_requests, most = inputs.num_requests, inputs.max_num_draft_tokens
        self.shape = (num_requests, most)
        self.has_bonus_rows = inputs.has_bonus_rows
        drafted = as_array(inputs.draft_token_ids.to(torch.int64))
        self.request, self.position = arange(num_requests, drafted), arange(most, drafted)
        self.faults: Array | None = None
        for rows in (inputs.target, inputs.draft if reads_draft else None):
            if rows is not None and not rows.is_plain:
                faults = self.request * OK if self.faults is None else self.faults
                self.faults = ops.where(in_range(rows, inputs.vocab_size), faults, INVALID_PARAMETER)
        if inputs.cu_num_draft_tokens is None:
            self.start = None
            ids = drafted
            valid = ids >= 0
            self.flat_request, self.flat_position = _grid(num_requests, most, drafted)
        else:
            self.num_tokens = len(drafted)
            given = inputs.cu_num_draft_tokens.to(torch.int64)
            given = functional.pad(given, (num_requests + 1 - len(given), 0))
            # Bounds that decrease or leave the tensor are faults; made monotone, they give no index out of range.
            largest = given.cummax(0).values
            bounds = largest.clamp(0, self.num_tokens)
            count = bounds.diff()
            sound = (given == largest) & (given <= self.num_tokens)
            sane = sound[:-1] & sound[1:] & (count <= most) & (given[0] == 0)
            flat = torch.arange(self.num_tokens if most else 0, device=inputs.device)
            request = torch.searchsorted(bounds[1:].contiguous(), flat, right=True).clamp(max=num_requests - 1)
            position = (flat - bounds[request]).clamp(0, max(most - 1, 0))
            self.start, self.flat_request, self.flat_position = map(as_array, (bounds[:-1], request, position))
            insane, count = as_array(~sane), as_array(count)
            count_faults = insane * INVALID_COUNT
            self.faults = count_faults if self.faults is None else ops.where(insane, count_faults, self.faults)
            ids = self.to_grid(drafted)
            valid = (ids >= 0) & (self.position < (count * ~insane)[:, None])
        self.valid = all_so_far(valid)
        self.num_draft_tokens = self.valid.sum(1)
        self.reached_end = self.num_draft_tokens == (self.num_draft_tokens if self.start is None else count)
        self.outside = ids >= inputs.vocab_size
        if maybe_any(self.outside | ~self.valid):
            ids = ops.minimum(ops.maximum(ids, 0), inputs.vocab_size - 1)
        self.ids = ids
        self.flat_ids = ids.T.reshape(-1) if self.start is None else ids[self.flat_request, self.flat_position]

    def to_grid(self, flat: Array) -> Array:
        """Return [N] values as [B, K]; beyond a request's end they are those of some other position."""
        if self.start is None:
            return flat.reshape(self.shape[::-1]).T
        if not self.num_tokens or not self.shape[1]:
            return as_array(as_tensor(flat).new_zeros(self.shape))
        return flat[ops.minimum(self.start[:, None] + self.position, self.num_tokens - 1)]

    def index(self, model: ModelName, request: Array, position: Array) -> tuple[Array, ...]:
        """Return the index of rows in the caller's tensor, in bounds even where a bonus position has no row."""
        if self.start is None:
            return request, position if self._has_bonus(model) else ops.minimum(position, self.shape[1] - 1)
        row = self.start[request] + position
        return (row + request,) if self._has_bonus(model) else (ops.minimum(row, self.num_tokens - 1),)

    def request_of_rows(self, model: ModelName) -> torch.Tensor:
        """Return the request of every row of the caller's tensor, in the shape of its leading dimensions."""
        request = as_tensor(self.request)
        if self.start is None:
            return request[:, None].expand(-1, self.shape[1] + self._has_bonus(model))
        bonus = self._has_bonus(model)
        row = torch.arange(self.num_tokens + bonus * self.shape[0], device=request.device)
        return (torch.searchsorted(as_tensor(self.start) + bonus * request, row, right=True) - 1).clamp(min=0)

    def _has_bonus(self, model: ModelName) -> bool:
        return model == "target" and self.has_bonus_rows


class RowReader:
    """Rows of one model as probabilities, processed when they are asked for, and kept if there are few."""

    def __init__(self, rows: Rows, layout: Layout, vocab_size: int, chunk: int, model: ModelName) -> None:
        """Wrap the caller's rows.

        Args:
            rows: The rows as given.
            layout: Where they are.
            vocab_size: V; a draft's rows are padded with zeros or cut to it.
            chunk: Number of rows that may be processed at a time.
            model: Whose rows they are.
        """
        self.given = rows
        self.raw = rows.data
        self.is_logits = rows.is_logits
        self.layout = layout
        self.vocab_size = vocab_size
        self.chunk = chunk
        self.model = model
        self.num_processed = 0
        self._held: tuple[torch.Tensor, Array] | None = None

    @functools.cached_property
    def _kept(self) -> torch.Tensor | None:
        """Memory [R, V] for all rows as probabilities, leading dimensions flattened; None if they are too many."""
        if 4 * self.raw.numel() > KEPT_BYTES:
            return None
        shape = (self.raw.shape[:-1].numel(), self.raw.shape[-1])
        return scratch(f"{self.model}-processed", shape, torch.float32, self.raw.device)

    def _processed(self, row: Array) -> torch.Tensor | None:
        """Return `_kept`, with the rows of logits processed at least up to the last of those given."""
        if self._kept is None:
            return None
        end = int(row.max()) + 1 if isinstance(row, np.ndarray) else len(self._kept)
        if end > self.num_processed:
            process(self._span(slice(self.num_processed, end)), self._kept[self.num_processed : end])
            self.num_processed = end
        return self._kept

    def hold(self, request: Array, position: Array) -> None:
        """Process some rows of logits, for `rows` and `probs` to find until others are held."""
        if not self.is_logits or self._kept is not None:
            return
        index = self.layout.index(self.model, request, position)
        held = scratch(f"{self.model}-held", (len(request), self.raw.shape[-1]), torch.float32, self.raw.device)
        for start in range(0, len(request), self.chunk):
            some = slice(start, start + self.chunk)
            process(self._rows_at(request[some], tuple(part[some] for part in index)), held[some])
        place = np.full(self.raw.shape[:-1].numel(), -1)
        place[row_number(self.raw, index)] = np.arange(len(request))
        self._held = held, place

    def _span(self, some: slice) -> Rows:
        """Return some of the caller's rows, leading dimensions flattened, as `process` takes them."""
        data, bitmask = _count_through(self.raw, some), self.given.bitmask
        if self.given.is_plain:
            return Rows(data, self.is_logits)
        return take(
            self.given, self._request[some], data, bitmask if bitmask is None else _count_through(bitmask, some)
        )

    def _rows_at(self, request: Array, index: tuple[Array, ...]) -> Rows:
        """Return rows of some requests as `process` takes them."""
        data, bitmask = _select(self.raw, index, f"{self.model}-raw"), self.given.bitmask
        if self.given.is_plain:
            return Rows(data, self.is_logits)
        mask = None if bitmask is None else bitmask[tuple(map(as_tensor, index))]
        return take(self.given, as_tensor(request), data, mask)

    @functools.cached_property
    def _request(self) -> torch.Tensor:
        return self.layout.request_of_rows(self.model).reshape(-1)

    def _spans(self) -> Iterator[Rows]:
        """Yield all of the caller's rows, a chunk at a time; an empty one where there are none."""
        for start in range(0, max(self.raw.shape[:-1].numel(), 1), self.chunk):
            yield self._span(slice(start, start + self.chunk))

    def rows(self, request: Array, position: Array) -> torch.Tensor:
        """Return rows [n, V] float32, never to be written; the next call may overwrite them."""
        rows = self._whole(request, position)
        missing = self.vocab_size - rows.shape[1]
        return functional.pad(rows, (0, missing)) if missing else rows

    def largest(self, request: Array, position: Array, rows: torch.Tensor) -> torch.Tensor:
        """Return the largest entry [n] of each row, at least 0, including entries that `rows` cut off."""
        if self.raw.shape[-1] > self.vocab_size:
            rows = self._whole(request, position).nan_to_num(nan=0.0, posinf=torch.inf).clamp(min=0)
        return rows.amax(1)

    def _whole(self, request: Array, position: Array) -> torch.Tensor:
        """Return rows as `rows` does, as wide as they were given."""
        index = self.layout.index(self.model, request, position)
        if not self.is_logits:
            return _select(self.raw, index, self.model).to(torch.float32)
        if (probs := self._processed(row := row_number(self.raw, index))) is not None:
            return _select(probs, (row,), self.model)
        if self._held is not None:
            held, place = self._held
            if (place[row] >= 0).all():
                return _select(held, (place[row],), self.model)
        given = self._rows_at(request, index)
        return process(given, scratch(self.model, given.data.shape, torch.float32, given.data.device))

    def probs(self, request: Array, position: Array, ids: Array) -> Array:
        """Return the probabilities [n] float64 of one token a row; 0 beyond a narrower vocabulary."""
        width = self.raw.shape[-1]
        column = ops.minimum(ids, width - 1)
        row = row_number(self.raw, self.layout.index(self.model, request, position))
        probs = self._processed(row) if self.is_logits else self.raw
        if probs is not None:
            # One flat index per entry is several times quicker than one per dimension.
            found = probs.take(as_tensor(row * width + column))
        else:
            chunks = [slice(start, start + self.chunk) for start in range(0, len(ids), self.chunk)]
            parts = [  # each taken before the next overwrites its rows
                self.rows(request[some], position[some]).gather(1, as_tensor(column[some, None]))[:, 0]
                for some in chunks
            ]
            found = torch.cat(parts)
        found = as_array(found.to(torch.float64))
        return found if width >= self.vocab_size else ops.where(ids < width, found, 0.0)

    def raw_logprobs(self, last: Array, token_ids: torch.Tensor) -> torch.Tensor:
        """Return log-probabilities [B, K+1] float64 under the softmax of the caller's logits, before any parameter.

        Args:
            last: [B], the last position wanted; positions beyond it repeat its row.
            token_ids: [B, K+1]; negative ones count as 0.
        """
        position = as_tensor(ops.minimum(arange(token_ids.shape[1], last), last[:, None]))
        request = as_tensor(self.layout.request)[:, None].expand_as(position)
        index = self.layout.index(self.model, as_array(request), as_array(position))
        row = as_tensor(row_number(self.raw, index))
        totals = torch.cat([max_and_log_sum_exp(rows.data) for rows in self._spans()], 1)[:, row]
        found = self.raw[(*map(as_tensor, index), token_ids.to(torch.int64).clamp(min=0))]
        return found.to(torch.float64) - totals[0] - totals[1]

    @property
    def _as_given(self) -> bool:
        """Whether argmaxes may be taken from the caller's memory."""
        same = not self.given.is_constrained and (self.raw.dtype == torch.float32 or not self.raw.is_cpu)
        return same and self.raw.is_contiguous()

    @functools.cached_property
    def best(self) -> tuple[Array, Array]:
        """Argmax of every row, leading dimensions flattened, and whether the row has a law: both [R]."""
        if self._as_given:
            return self._best(self.raw.view(-1, self.raw.shape[-1]))
        parts = [self._best(constrain(rows)) for rows in self._spans()]
        if len(parts) == 1:
            return parts[0]
        token, has_law = (library(part[0]).concatenate(part) for part in zip(*parts, strict=True))
        return token, has_law

    def _best(self, rows: torch.Tensor) -> tuple[Array, Array]:
        """Return the argmax of rows [n, V], the lowest id among ties, and whether they have a law: both [n]."""
        # NumPy is ten times quicker than torch, but does not take half precision.
        found = as_array(rows.to(torch.float32)) if rows.is_cpu else rows
        token = found.argmax(1)
        return token, self._have_law(found[arange(len(found), found), token])

    def _have_law(self, largest: Array) -> Array:
        """Return whether rows have a law, given the largest entry [n] of each."""
        finite = library(largest).isfinite(largest)
        return finite if self.is_logits else finite & (largest > 0)

    def argmax(
        self, request: Array, position: Array, *, every_row: bool, rows: torch.Tensor | None = None
    ) -> tuple[Array, Array]:
        """Return the argmax [n] of rows, lowest id among ties, and whether [n] the row has a law.

        Taken from the caller's own values, after bias and mask: rounding to probabilities could create ties.
        `every_row` finds it for all rows at once, and keeps it. `rows` is what the method `rows` returned, if at hand.
        """
        index = self.layout.index(self.model, request, position)
        if every_row:
            row = row_number(self.raw, index)
            token, has_law = self.best
            return token[row], has_law[row]
        if rows is not None and not self.is_logits:
            return self._best(rows)
        if self._as_given and self.raw.is_cpu and self.raw.shape[-1] >= LONG_ROW:
            found, row = self.raw.view(-1, self.raw.shape[-1]).numpy(), row_number(self.raw, index)
            token = np.array([found[i].argmax() for i in row])  # of views: a copy would be read twice
            return token, self._have_law(found[row, token])
        return self._best(constrain(self._rows_at(request, index)))


def mass_of(rows: torch.Tensor, *, is_logits: bool) -> Array:
    """Return the sums [n] of rows. From logits they are 1, or NaN for a row without a law, and cost nothing to find."""
    return as_array(rows[:, 0]) * 0 + 1 if is_logits else as_array(rows.sum(1))


def cleaned(q: torch.Tensor, *, is_logits: bool) -> tuple[torch.Tensor, Array]:
    """Return a draft's rows [n, V] with 0 for entries below 0 or NaN, and their masses [n]; `q` is never written."""
    # Only on the CPU may the host look whether there is something below 0.
    if not is_logits and (not q.is_cpu or maybe_any(~(as_array(q.amin(1)) >= 0))):
        q = torch.clamp(q, min=0, out=scratch("clean", q.shape, q.dtype, q.device))
    found = mass_of(q, is_logits=is_logits)
    if maybe_any(~(found < torch.inf)):
        q = q.nan_to_num(nan=0.0, posinf=torch.inf)
        found = mass_of(q, is_logits=is_logits)
    return q, found


def _grid(num_requests: int, most: int, like: Array) -> tuple[Array, Array]:
    """Return request and position [B * K] of every position of a grid. They are shared: never write to them."""

    def make() -> tuple[Array, Array]:
        request, position = arange(num_requests, like), arange(most, like)[:, None]
        return (request + 0 * position).reshape(-1), (0 * request + position).reshape(-1)

    found: tuple[Array, Array] = cached(("grid", num_requests, most), device_of(like), make)
    return found


def _count_through(data: torch.Tensor, some: slice) -> torch.Tensor:
    """Return some rows [n, V] of `data` [..., V], leading dimensions flattened; a view where possible."""
    if data.ndim > 2 and not data.is_contiguous():  # noqa: PLR2004
        number = torch.arange(data.shape[:-1].numel(), device=data.device)[some]
        return data[number // data.shape[1], number % data.shape[1]]
    return data.reshape(-1, data.shape[-1])[some] if data.ndim > 2 else data[some]  # noqa: PLR2004


def _select(data: torch.Tensor, index: tuple[Array, ...], name: str) -> torch.Tensor:
    """Return rows [n, V] of `data`, never to be written: a view if they are evenly spaced, else a copy."""
    if len(index) > 1 and not data.is_contiguous():
        return data[tuple(map(as_tensor, index))]
    # Several times quicker than indexing, but for one dimension only.
    row = row_number(data, index)
    flat = data.view(-1, data.shape[-1]) if len(index) > 1 else data
    if isinstance(row, np.ndarray):
        step = row[1] - row[0] if len(row) > 1 else 1
        if len(row) == 1 or (step > 0 and (row[1:] - row[:-1] == step).all()):
            return flat[row[0] : row[-1] + 1 : step]
    rows = scratch(name, (len(row), data.shape[-1]), data.dtype, data.device)
    if not data.is_cpu or data.shape[-1] < SHARED_ROW or torch.get_num_threads() == 1:
        return torch.index_select(flat, 0, as_tensor(row), out=rows)
    # More work, but each thread copies the rows that it will process, and finds them in its own core's cache.
    torch.ops.aten.index.Tensor_out(flat, [as_tensor(row)], out=rows)
    return rows


def row_number(data: torch.Tensor, index: tuple[Array, ...]) -> Array:
    """Return the numbers of rows in `data` with its leading dimensions flattened."""
    return index[0] if len(index) == 1 else index[0] * data.shape[1] + index[1]
