"""The read floor of a GPU: a plain sum over rows, block by block, which is as fast as memory is."""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl

BLOCK: Final = 4096


@triton.jit  # type: ignore[untyped-decorator]
def sum_blocks(  # type: ignore[no-untyped-def]
    rows_ptr,  # [B, n, V]
    sums_ptr,  # [B, n, num_blocks] float32
    request_stride,
    row_stride,
    vocab_size,
    BLOCK: tl.constexpr,  # noqa: N803 - a kernel's constant
):
    """Store the sum of one block of one row, whose entries are next to each other."""
    block, row, request = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    entry = block * BLOCK + tl.arange(0, BLOCK)
    here_ptr = rows_ptr + request * request_stride + row * row_stride + entry
    x = tl.load(here_ptr, mask=entry < vocab_size, other=0.0).to(tl.float32)
    tl.store(sums_ptr + (request * tl.num_programs(1) + row) * tl.num_programs(0) + block, tl.sum(x, 0))


def read(rows: torch.Tensor) -> Any:
    """Return a call that sums the blocks of rows [B, n, V] on a GPU."""
    num_requests, num_rows, vocab_size = rows.shape
    num_blocks = triton.cdiv(vocab_size, BLOCK)
    sums = torch.empty(num_requests, num_rows, num_blocks, dtype=torch.float32, device=rows.device)
    grid = (num_blocks, num_rows, num_requests)
    return lambda: sum_blocks[grid](rows, sums, *rows.stride()[:2], vocab_size, BLOCK=BLOCK, num_warps=8)
