"""Exact analysis in float64: the law of a strategy by enumeration, its figures, and an independent oracle."""

from acceptlib.exact.enumeration import Model, complete, law
from acceptlib.exact.figures import StepFigures, expected_tokens, kl, step_figures, tv
from acceptlib.exact.oracle import processed

__all__ = ["Model", "StepFigures", "complete", "expected_tokens", "kl", "law", "processed", "step_figures", "tv"]
