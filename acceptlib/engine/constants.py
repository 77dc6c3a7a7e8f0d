"""Numbers of the specification, which both engines share: with others, other tokens would be drawn or refused."""

from __future__ import annotations

from typing import Final

SUM_SCALE: Final = 2.0**44
"""Fixed-point scale of row sums, and of exponentials: magnitudes below 2^19 in steps of 2^-44."""

WEIGHT_SCALE: Final = 2.0**60
"""Fixed-point scale of weights in a draw."""

MASS_SCALE: Final = 2.0**42
"""Fixed-point scale of the masses that top-p and min-p leave, where the row's largest entry has 1."""

ROW_TOLERANCE: Final = 1 / 64
"""How far a row of probabilities may sum from 1: bfloat16 rounds each entry by up to 2^-9 of it."""

MASS_LIMIT: Final = 4.0
"""Weights that sum to more would overflow the draw's integers."""
