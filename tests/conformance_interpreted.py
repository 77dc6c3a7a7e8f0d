"""The conformance suite on interpreted Triton: what `test_conformance.py` runs in a process of its own.

TRITON_INTERPRET=1 python conformance_interpreted.py [NAME ...]

All checks of a strategy take a minute or more, so tests leave most of them out.
"""

from __future__ import annotations

import json
import sys

import quick_interpreter
import torch
from conformance_mutants import MUTANTS

import acceptlib
from acceptlib.engine.triton import engine, tunings
from acceptlib.testing import check_strategy

# Small blocks are interpreted sooner, and small vocabularies have several.
engine.BLOCK = 64
tunings.TUNINGS = tunings.Tunings(*(tuning._replace(emit_block=64) for tuning in tunings.TUNINGS))

KERNEL = [
    "decisions_follow_rules",
    "strides",
    "out_is_overwritten",
    "uniforms_of_stream",
    "offsets_advance",
    "backends_agree",
]
"""What a kernel can get wrong by itself, beyond what the tests of the engine compare."""


def main() -> None:
    """Print status and reason by strategy and check."""
    torch.set_num_threads(1)
    quick_interpreter.install()
    found = {}
    named = sys.argv[1:]
    strategies = {name: acceptlib.create(name) for name in named or acceptlib.available()}
    if not named:
        strategies["other-numbers-on-torch"] = MUTANTS["other-numbers-on-torch"].make()
    for name, strategy in strategies.items():
        only = None if named else KERNEL if name == "rejection" else ["backends_agree"]
        results = check_strategy(strategy, only=only, raises=False)
        found[name] = {
            result.name: result.status + (f": {result.message}" if result.message else "") for result in results
        }
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
