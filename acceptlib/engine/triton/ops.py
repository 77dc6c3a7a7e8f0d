"""The operations a rule may use, in Triton: the names of `acceptlib.ops`, with the same results.

Three things differ from `triton.language`:

- A number first takes the other operand's precision, beside a flag float64. Triton 3.6 rounds it to float32 on its way
  into `minimum` and `maximum`, even beside float64, and any Triton does beside a flag.
- Division and square root are IEEE in float32 too, where Triton's own are approximations.
- The minimum and maximum of a NaN are NaN.

`exp`, `log` and `log2` are the device's, and may differ from torch in the last digits. For float32, `log2` is NVIDIA's
instruction, which is off by up to 2^-22 from 1/2 to 2, and by up to that share of the result elsewhere.
"""

# ruff: noqa: RET505 - jit functions; their branches are on what is known when compiling

import triton
import triton.language as tl

TINY = tl.constexpr(2.0**-126)
"""The smallest normal float32."""

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def minimum(a, b):
    """Return the elementwise smaller of `a` and `b`."""
    return tl.minimum(like(a, b), like(b, a), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def maximum(a, b):
    """Return the elementwise larger of `a` and `b`."""
    return tl.maximum(like(a, b), like(b, a), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def where(condition, a, b):
    """Return `a` where `condition` holds, `b` elsewhere."""
    if isinstance(condition, tl.tensor):
        return tl.where(condition, like(a, b), like(b, a))
    elif condition:
        return a
    else:
        return b


@triton.jit
def exp(a):
    """Return e to the power of `a`."""
    return tl.exp(like(a, a))


@triton.jit
def log(a):
    """Return the natural logarithm of `a`."""
    return tl.log(like(a, a))


@triton.jit
def log2(a, guard=0.0, least=0.0):
    """Return the logarithm of `a + guard` to base 2, or of `least` where that is larger."""
    guarded = like(a, a)
    if isinstance(guard, tl.tensor) or guard != 0:
        guarded += like(guard, a)
    if isinstance(least, tl.tensor) or least != 0:
        guarded = maximum(guarded, least)
    if INTERPRETED or guarded.dtype != tl.float32:
        return tl.log2(guarded)
    elif not isinstance(least, tl.tensor) and least >= TINY:
        return _fast_log2(guarded, normal=True)
    else:
        return _fast_log2(guarded, not isinstance(guard, tl.tensor) and guard >= TINY)


@tl.core.extern
def _fast_log2(a, normal, _semantic=None):
    """Return the logarithm of float32 to base 2 in one instruction of NVIDIA's, where a compiler's takes some twenty.

    Three more take care of subnormal numbers, unless all are known to be 0 or `normal`.
    """
    if _semantic.builder.options.backend_name != "cuda":
        return tl.log2(a, _semantic=_semantic)
    code = f"lg2.approx{'.ftz' if normal else ''}.f32 $0, $1;"
    return tl.inline_asm_elementwise(code, "=f,f", [a], tl.float32, is_pure=True, pack=1, _semantic=_semantic)


@triton.jit
def sqrt(a):
    """Return the square root of `a`, correctly rounded."""
    if like(a, a).dtype == tl.float32:
        return tl.sqrt_rn(a)
    else:
        return tl.sqrt(like(a, a))


@triton.jit
def abs(a):  # noqa: A001 - the name that torch and triton.language use
    """Return the absolute value of `a`."""
    return tl.abs(like(a, a))


@triton.jit
def divide(a, b):
    """Return `a / b`, correctly rounded: what `/` means in a rule. PTX's `div.full.f32` would be off by up to 2 ulp."""
    if (like(a, b) + like(b, a)).dtype == tl.float32:
        return tl.div_rn(like(a, b).to(tl.float32), like(b, a).to(tl.float32))  # either may be a flag
    else:
        return like(a, b) / like(b, a)


@triton.jit
def add(a, b):
    """Return `a + b`; of two flags, whether any is set, as in torch and NumPy."""
    if like(a, b).dtype == tl.int1 and like(b, a).dtype == tl.int1:
        return a | b
    else:
        return like(a, b) + like(b, a)


@triton.jit
def subtract(a, b):
    """Return `a - b`."""
    return like(a, b) - like(b, a)


@triton.jit
def multiply(a, b):
    """Return `a * b`."""
    return like(a, b) * like(b, a)


@triton.jit
def ratio(a, b):
    """Return `a / b` for a, b >= 0, where x / 0 is infinite and 0 / 0 is 0."""
    divisor = like(b, a)
    positive = divisor > 0
    quotient = divide(a, where(positive, divisor, 1.0))
    return where(positive, quotient, where(a > b, float("inf"), like(0.0, quotient)))


@triton.jit
def like(x, other):
    """Return `x` as a tensor: a number takes the precision of `other`, or float64 beside another number."""
    if isinstance(x, tl.tensor):
        return x
    elif isinstance(other, tl.tensor):
        return tl.full((), x, other.dtype if other.dtype.is_floating() else tl.float64)
    else:
        return tl.full((), x, tl.float64)
