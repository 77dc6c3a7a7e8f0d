"""Requests and settings that several test files about `verify` share."""

from __future__ import annotations

import support
from support import Request

READ_NO_DRAFT = {"greedy", "synthetic", "typical", "typical-sample"}


def mixed(count: int, vocab: int = 11, seed: int = 0) -> list[Request]:
    """Return requests of 0 to 4 drafted tokens, most of them contested."""
    return [support.ordinary((3 * index) % 5, vocab, seed + index) for index in range(count)]
