"""A small draft and target pair to try speculative decoding with, without a download.

Both models were trained from scratch by `acceptlib.demo.train` on the Python standard library's sources and are
complete Hugging Face model folders. The weights are stored as float16: load them with `dtype=torch.float32` on a CPU.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

__all__ = ["DRAFT", "TARGET", "prompts"]

_HERE: Final = Path(__file__).resolve().parent

TARGET: Final = _HERE / "target"
"""Folder of the target model."""

DRAFT: Final = _HERE / "draft"
"""Folder of the draft model, about a tenth of the target's size, with the same tokenizer."""


def prompts() -> list[str]:
    """Return the prompts, all from files that neither model nor the tokenizer was trained on."""
    items = json.loads((_HERE / "prompts.json").read_text(encoding="utf-8"))
    return [str(item["text"]) for item in items]
