"""The operations a rule may use, in Triton: the names of `acceptlib.ops`, with the same results.

Three things differ from calling `triton.language` directly:

- Triton rounds a number to float32 before it meets a float64 tensor in `minimum` and `where` (not in operators), so
  numbers are first given the other operand's precision.
- Numbers alone (options, literals) are folded as Python floats, which is what torch does with them.
- Division and square root are IEEE in float32 as well. Triton's own `/` is PTX's `div.full.f32`, off by up to 2 ulp.

Minimum and maximum of a NaN are NaN. `exp` and `log` are the device's and may differ from torch in the last digits.
"""

# No `from __future__ import annotations`: Triton reads annotations.

import math

import triton
import triton.language as tl

_exp = triton.constexpr_function(lambda a: math.exp(a))
