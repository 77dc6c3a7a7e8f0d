"""The reference: every built-in rule in plain loops, one request at a time, in float64.

Written from the papers' formulas; it shares no code with the engine. Symbols are the papers': x the drafted tokens,
p the target's rows, q the draft's rows, u the uniforms, h the probability of acceptance, tau the number accepted.
Rows are counted from 0, so x[i] is tested against p[i] and q[i], and p[n] is the bonus row.

The draw is part of the specification, to the bit: weights are float32, and an inverse CDF in integers picks the token.
"""

# ruff: noqa: ARG001, N806 - one signature for every rule, and the symbols of the papers

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence


@dataclass(frozen=True)
class Chain:
    """One request under one rule, with everything but the random numbers.

    Attributes:
        h: The probability that each drafted token is accepted, n of them.
        stop: From n acceptances to tau, the number of drafted tokens that stand.
        recovered: From tau < n to the float32 weights [V] of the draw there.
        bonus: The float32 weights [V] of the draw after n accepted tokens.
    """

    h: list[float]
    stop: Callable[[Sequence[bool]], int]
    recovered: Callable[[int], torch.Tensor]
    bonus: torch.Tensor


def verify(
    name: str,
    x: Sequence[int],
    p: torch.Tensor,
    q: torch.Tensor | None,
    u: Sequence[float],
    bits: int,
    **options: Any,
) -> tuple[list[int], int]:
    """Verify one request.

    Args:
        name: The rule's name.
        x: The n drafted tokens.
        p: [n+1, V] float32, the target's rows.
        q: [n, V'] float32, the draft's rows; None if each draft is one-hot at its token.
        u: n uniforms in [0, 1), one a drafted token.
        bits: 64 random bits for the draw; a negative int stands for its two's complement.
        **options: The rule's options.

    Returns:
        The emitted tokens and the number of accepted ones.
    """
    chain = build(name, x, p, q, **options)
    tau = chain.stop([u_i < h_i for u_i, h_i in zip(u, chain.h, strict=True)])
    weights = chain.bonus if tau == len(x) else chain.recovered(tau)
    return [*x[:tau], draw(weights, p[tau], bits)], tau


def expected_tokens(name: str, x: Sequence[int], p: torch.Tensor, q: torch.Tensor | None, **options: Any) -> float:
    """Return the expected number of emitted tokens over u, given the drafted tokens."""
    chain = build(name, x, p, q, **options)
    expected = 0.0
    for accepted in itertools.product((True, False), repeat=len(x)):
        probability = math.prod(h_i if a_i else 1 - h_i for a_i, h_i in zip(accepted, chain.h, strict=True))
        expected += probability * (chain.stop(accepted) + 1)
    return expected


def build(name: str, x: Sequence[int], p: torch.Tensor, q: torch.Tensor | None, **options: Any) -> Chain:
    """Return the chain of one request; arguments as for `verify`."""
    return RULES[name](x, p, draft_rows(x, p, q), **options)


def draft_rows(x: Sequence[int], p: torch.Tensor, q: torch.Tensor | None) -> torch.Tensor:
    """Return [n, V] rows: one-hot where there are none, NaN as 0, padded with zeros or cut to V."""
    rows = torch.zeros(len(x), p.shape[1], dtype=torch.float32)
    for i, x_i in enumerate(x):
        if q is None:
            rows[i, x_i] = 1.0
        else:
            rows[i, : q.shape[1]] = q[i, : p.shape[1]].nan_to_num(nan=0.0)
    return rows


# The target's law


def processed(  # noqa: PLR0913 - one argument a parameter
    logits: Sequence[float] | torch.Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    allowed: Collection[int] | None = None,
    bias: Mapping[int, float] | None = None,
) -> torch.Tensor:
    """Return the law [V] float64 that a row of logits is sampled from.

    The parameters act in this order: bias; mask (`allowed` lists what it leaves); temperature, 0 for the argmax; top-k,
    which keeps all that equal the k-th; top-p, which keeps the fewest largest entries with that share of the mass left,
    among equal ones the highest ids; min-p, which keeps entries with that share of the largest probability.
    """
    L = torch.as_tensor(logits, dtype=torch.float64).clone()
    for token, value in (bias or {}).items():
        if 0 <= token < len(L):
            L[token] += value
    if allowed is not None:
        forbidden = torch.ones(len(L), dtype=torch.bool)
        forbidden[list(allowed)] = False
        L[forbidden] = -math.inf
    if temperature == 0:
        return one_hot(L)
    w = ((L - L.max()) / temperature).exp()
    kept = len(L) - 1 - L.flip(0).argsort(descending=True, stable=True)
    if 0 < top_k < len(L):
        kept = kept[L[kept] >= L[kept[top_k - 1]]]
    if top_p < 1:
        mass = w[kept].cumsum(0)
        kept = kept[: 1 + int((mass < top_p * mass[-1]).sum())]
    kept = kept[w[kept] >= min_p]
    p = torch.zeros_like(L)
    p[kept] = w[kept] / w[kept].sum()
    return p


# The draw


def integers(weights: torch.Tensor) -> list[int]:
    """Return float32 weights in steps of 2^-60, truncated; the product is exact."""
    return [int(w * 2**60) for w in weights.tolist()]


def draw(weights: torch.Tensor, p: torch.Tensor, bits: int) -> int:
    """Return the token at which the running sum of the weights passes r; from p if every weight is zero."""
    counts = integers(weights)
    if sum(counts) == 0:
        counts = integers(p)
    r = (bits % 2**64) * sum(counts) >> 64
    running = 0
    for token, count in enumerate(counts):
        running += count
        if running > r:
            return token
    msg = "expected a row with some weight, got none"
    raise ValueError(msg)


# Parts of rules


def ratio(a: float, b: float) -> float:
    """Return a / b, where a / 0 is infinite for a > 0 and 0 / 0 is 0."""
    if b > 0:
        return a / b
    return math.inf if a > 0 else 0.0


def argmax(row: torch.Tensor) -> int:
    """Return the id of the largest entry, the lowest one among ties."""
    values = row.tolist()
    return values.index(max(values))


def one_hot(row: torch.Tensor) -> torch.Tensor:
    """Return weights that always draw the argmax."""
    weights = torch.zeros_like(row)
    weights[argmax(row)] = 1.0
    return weights


def residual(p: torch.Tensor, q: torch.Tensor, a: float = 1.0, b: float = 1.0) -> torch.Tensor:
    """Return (a p - b q)+ of one row, rounded to float32 after each operation."""
    a_p = torch.tensor(a, dtype=torch.float32) * p
    b_q = torch.tensor(b, dtype=torch.float32) * q
    return (a_p - b_q).clamp(min=0)


def entropy(row: Sequence[float]) -> float:
    """Return the entropy of the normalised row, in nats."""
    total = math.fsum(row)
    return -math.fsum(v / total * math.log(v / total) for v in row if v > 0)


def first_rejection(accepted: Sequence[bool]) -> int:
    """Return how many tokens are accepted before the first that is not."""
    for i, a_i in enumerate(accepted):
        if not a_i:
            return i
    return len(accepted)


def last_acceptance(accepted: Sequence[bool]) -> int:
    """Return the largest i such that the i-th token is accepted, counted from 1; 0 if none is."""
    tau = 0
    for i, a_i in enumerate(accepted, start=1):
        if a_i:
            tau = i
    return tau


# Rules


def rejection(x: Sequence[int], p: torch.Tensor, q: torch.Tensor) -> Chain:
    """h_i = min(1, p_i(x_i) / q_i(x_i)); recovered from (p - q)+. arXiv 2211.17192, algorithm 1."""
    h = [min(1.0, ratio(p[i, x_i].item(), q[i, x_i].item())) for i, x_i in enumerate(x)]
    return Chain(h, first_rejection, lambda tau: residual(p[tau], q[tau]), p[len(x)])


def greedy(x: Sequence[int], p: torch.Tensor, q: torch.Tensor) -> Chain:
    """h_i = 1 where x_i = argmax p_i, else 0; argmax recovered and as bonus; no q. arXiv 1811.03115, section 3."""
    h = [1.0 if x_i == argmax(p[i]) else 0.0 for i, x_i in enumerate(x)]
    return Chain(h, first_rejection, lambda tau: one_hot(p[tau]), one_hot(p[len(x)]))


def typical(
    x: Sequence[int],
    p: torch.Tensor,
    q: torch.Tensor,
    posterior_threshold: float = 0.09,
    posterior_alpha: float = 0.3,
    recovery: str = "argmax",
) -> Chain:
    """h_i = 1 where p_i(x_i) > min(posterior_threshold, posterior_alpha exp(-H_i)); no q. arXiv 2401.10774."""
    h = []
    for i, x_i in enumerate(x):
        H = -math.fsum(p_x * math.log(p_x) for p_x in p[i].tolist() if p_x > 0)
        threshold = min(posterior_threshold, posterior_alpha * math.exp(-H))
        h.append(1.0 if p[i, x_i].item() > threshold else 0.0)
    recovered = {"argmax": lambda tau: one_hot(p[tau]), "sample": lambda tau: p[tau]}[recovery]
    return Chain(h, first_rejection, recovered, p[len(x)])


def block(x: Sequence[int], p: torch.Tensor, q: torch.Tensor) -> Chain:
    """Decide on the block as a whole. arXiv 2403.10444 v3, algorithm 2.

    P_0 = 1; P_i = min(1, P_{i-1} p_i(x_i) / q_i(x_i)); Z_i = sum_x (P_i p_{i+1}(x) - q_{i+1}(x))+ of the NEXT row.
    h_i = Z_i / (Z_i + (1 - P_i)), 1 where that is 0 / 0; h_n = P_n. The last acceptance stops.
    """
    n = len(x)
    P = [1.0]
    for i, x_i in enumerate(x):
        P.append(min(1.0, P[i] * ratio(p[i, x_i].item(), q[i, x_i].item())) if P[i] > 0 else 0.0)
    h = []
    for i in range(1, n):
        Z = math.fsum(residual(p[i], q[i], a=P[i]).tolist())  # p[i] is the row after token i, counted from 1
        rest = 1 - P[i]  # by itself: 1 added to a small Z would round it
        h.append(Z / (Z + rest) if Z + rest > 0 else 1.0)
    if n > 0:
        h.append(P[n])
    return Chain(h, last_acceptance, lambda tau: residual(p[tau], q[tau], a=P[tau]), p[n])


def fly(
    x: Sequence[int],
    p: torch.Tensor,
    q: torch.Tensor,
    fly_entropy_threshold: float = 0.3,
    fly_entropy_top_k: int = 3,
    fly_window: int = 6,
) -> Chain:
    """`rejection`, but a rejected token may stand. arXiv 2511.22972.

    It stands if p_i(x_i) > 0, the renormalised top-k entries of the row have enough entropy, and the next
    W = min(fly_window, n - 1) tokens exist and are accepted by h. One token alone has no window.
    """
    n = len(x)
    W = min(fly_window, n - 1)

    def undecided(i: int) -> bool:
        top = sorted(p[i].tolist(), reverse=True)[:fly_entropy_top_k]
        return entropy(top) >= fly_entropy_threshold

    def stop(accepted: Sequence[bool]) -> int:
        for i, x_i in enumerate(x):
            window = accepted[i + 1 : i + 1 + W]
            confirmed = W > 0 and len(window) == W and all(window)
            stands = accepted[i] or (confirmed and p[i, x_i].item() > 0 and undecided(i))
            if not stands:
                return i
        return n

    native = rejection(x, p, q)
    return Chain(native.h, stop, native.recovered, native.bonus)


def lenience(x: Sequence[int], p: torch.Tensor, q: torch.Tensor, lenience: float = 0.8) -> Chain:
    """h_i = min(1, p_i(x_i) / (l q_i(x_i))); recovered from (p - l q)+. arXiv 2211.17192, appendix A.5."""
    h = [min(1.0, ratio(p[i, x_i].item(), lenience * q[i, x_i].item())) for i, x_i in enumerate(x)]
    return Chain(h, first_rejection, lambda tau: residual(p[tau], q[tau], b=lenience), p[len(x)])


def mixture(x: Sequence[int], p: torch.Tensor, q: torch.Tensor, weight: float = 0.8) -> Chain:
    """h_i = min(1, v / q) with v = w p + (1 - w) q, 0 where p = 0; recovered from (p - q)+. arXiv 2604.07622."""
    h = []
    for i, x_i in enumerate(x):
        p_x, q_x = p[i, x_i].item(), q[i, x_i].item()
        h.append(min(1.0, ratio(weight * p_x + (1 - weight) * q_x, q_x)) if p_x > 0 else 0.0)
    return Chain(h, first_rejection, lambda tau: residual(p[tau], q[tau]), p[len(x)])


def target_only(
    x: Sequence[int], p: torch.Tensor, q: torch.Tensor, threshold_single: float = 1.0, threshold_acc: float = 1.0
) -> Chain:
    """h_i = 1 where p_i(x_i) reaches threshold_single, else p / threshold_acc up to 1; recovered from p without x_i."""
    h = []
    for i, x_i in enumerate(x):
        p_x = p[i, x_i].item()
        h.append(1.0 if p_x >= threshold_single else min(1.0, p_x / threshold_acc))
    one_hot = torch.eye(p.shape[1], dtype=p.dtype)
    return Chain(h, first_rejection, lambda tau: residual(p[tau], one_hot[x[tau]]), p[len(x)])


def tv_budget(x: Sequence[int], p: torch.Tensor, q: torch.Tensor, epsilon: float = 0.05) -> Chain:
    """`mixture` whose 1 - w is min(1, epsilon / TV(p_i, q_i)), row by row."""
    h = []
    for i, x_i in enumerate(x):
        TV = math.fsum(residual(p[i], q[i]).tolist())
        w = 1 - min(1.0, ratio(epsilon, TV))
        h += mixture([x_i], p[i : i + 2], q[i : i + 1], weight=w).h
    return Chain(h, first_rejection, lambda tau: residual(p[tau], q[tau]), p[len(x)])


def synthetic(
    x: Sequence[int],
    p: torch.Tensor,
    q: torch.Tensor,
    synthetic_acceptance_rates: Sequence[float] | None = None,
    synthetic_acceptance_length: float | None = None,
) -> Chain:
    """h_i = rate_i / rate_{i-1} with rate_0 = 1; a mean length L stands for rate_i = min(max(L - i, 0), 1); no q."""
    L = 3.0 if synthetic_acceptance_length is None else synthetic_acceptance_length
    rate = [1.0]
    for i in range(1, len(x) + 1):
        if synthetic_acceptance_rates is None:
            rate.append(min(max(L - i, 0.0), 1.0))
        else:
            rate.append(synthetic_acceptance_rates[i - 1] if i <= len(synthetic_acceptance_rates) else 0.0)
    h = [ratio(rate[i], rate[i - 1]) for i in range(1, len(x) + 1)]
    return Chain(h, first_rejection, lambda tau: p[tau], p[len(x)])


RULES: dict[str, Callable[..., Chain]] = {
    "block": block,
    "fly": fly,
    "greedy": greedy,
    "lenience": lenience,
    "mixture": mixture,
    "rejection": rejection,
    "synthetic": synthetic,
    "target-only": target_only,
    "tv-budget": tv_budget,
    "typical": typical,
}
