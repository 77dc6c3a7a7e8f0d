"""Numbers of the specification, which both engines share: with others, other tokens would be drawn or refused."""

from __future__ import annotations

from typing import Final

SUM_SCALE: Final = 2.0**44
"""Fixed-point scale of row sums, and of exponentials: magnitudes below 2^19 in steps of 2^-44.

Both are added up in fours of neighbours first, (a + b) + (c + d), as float32.
"""

ROW_SUM_LIMIT: Final = 2.0**18
"""Magnitudes of a row's terms sum to less than this, or their sum is NaN: integers would overflow at twice as much."""

MAGNITUDE_SCALE: Final = 4.0
"""Fixed-point scale of magnitudes, which are added up in fours of neighbours, (a + b) + (c + d), and rounded.

Those of a block fit 32 bits, and of up to 2^23 entries rounding hides less than the limit in total.
"""

MAGNITUDE_LIMIT: Final = int(ROW_SUM_LIMIT * MAGNITUDE_SCALE)
"""`ROW_SUM_LIMIT` in these steps."""

WEIGHT_SCALE: Final = 2.0**60
"""Fixed-point scale of weights in a draw."""

MASS_SCALE: Final = 2.0**42
"""Fixed-point scale of masses of logits, in which a row's largest entry has 1."""

ROW_TOLERANCE: Final = 1 / 64
"""How far a row of probabilities may sum from 1: bfloat16 rounds each entry by up to 2^-9 of it."""

MASS_LIMIT: Final = 4.0
"""Weights that sum to more would overflow the draw's integers."""
