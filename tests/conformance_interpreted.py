"""The conformance suite on interpreted Triton: what `test_conformance.py` runs in a process of its own.

TRITON_INTERPRET=1 python conformance_interpreted.py
"""

from __future__ import annotations

import json
import sys

import torch
from conformance_mutants import MUTANTS

import acceptlib
from acceptlib.engine.triton import engine
from acceptlib.testing import check_strategy

engine.BLOCK = 16  # small blocks are interpreted sooner, and small vocabularies have several

KERNEL = [
    "decisions_follow_rules",
    "invalid_row_marks_request",
    "larger_target_vocabulary",
    "nan_in_draft_is_zero",
    "given_bonus_token",
    "placeholder_ends_chain",
    "ragged_equals_padded",
    "strides",
    "out_is_overwritten",
    "uniforms_of_stream",
    "offsets_advance",
    "backends_agree",
]
"""What a kernel can get wrong by itself. The others take a minute and pass as well; a request takes some 30 ms."""


def main() -> None:
    """Print status and reason by strategy and check."""
    torch.set_num_threads(1)
    found = {}
    strategies = {name: acceptlib.create(name) for name in acceptlib.available()}
    strategies["other-numbers-on-torch"] = MUTANTS["other-numbers-on-torch"].make()
    for name, strategy in strategies.items():
        only = KERNEL if name == "rejection" else ["backends_agree"]
        results = check_strategy(strategy, only=only, raises=False)
        found[name] = {
            result.name: result.status + (f": {result.message}" if result.message else "") for result in results
        }
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
