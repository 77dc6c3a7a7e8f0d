"""Exact analysis in float64: the law of a strategy by enumeration, its figures, and an independent oracle.

`law`, `tv`, `kl` and `expected_tokens` take a strategy or its name, the target's rows and the draft's, or functions
from the tokens so far to a row, and enumerate every drafted sequence, every pattern of acceptances and every drawn
token. If there is too much to enumerate, they raise `EnumerationError`.
"""

from acceptlib.exact.enumeration import Model, State, complete, law
from acceptlib.exact.figures import StepFigures, expected_tokens, kl, step_figures, tv
from acceptlib.exact.oracle import processed

__all__ = [
    "Model",
    "State",
    "StepFigures",
    "complete",
    "expected_tokens",
    "kl",
    "law",
    "processed",
    "step_figures",
    "tv",
]
