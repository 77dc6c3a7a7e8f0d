"""What rules read beside rows: per-request state, which the caller carries, and the drafted token's id."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from acceptlib_relaxed import Relaxed
from support import fixed, lay_out, layouts, ordinary

import acceptlib
from acceptlib import AcceptanceStrategy, Traits, VerifyResult, exact, ops, rule
from acceptlib.demo.pair import load_pair
from acceptlib.errors import InputError, StrategyDefinitionError
from acceptlib.exact.enumeration import as_state
from acceptlib.integrations.transformers import SpeculativeDecoder

VOCABULARY = 11


class Rated(AcceptanceStrategy):
    """Accept at a rate of the request's own, and not at all where it is shut; recover from a blend of its own."""

    name = "rated"
    traits = Traits(guarantee="lossy", bound="none", state=("rate", "shut"))

    @rule
    def accept(rate: Any, shut: Any) -> Any:
        return ops.where(shut, 0.0, rate)

    @rule
    def residual(p: Any, q: Any, rate: Any, shut: Any) -> Any:
        return ops.where(shut, p, (1.0 - rate) * q)


class Counted(AcceptanceStrategy):
    """Count emitted tokens; nothing else depends on them."""

    name = "counted"
    traits = Traits(guarantee="lossy", bound="none", state=("emitted",))

    def initial_state(self, num_requests: int, device: torch.device | str) -> dict[str, torch.Tensor]:
        return {"emitted": torch.zeros(num_requests, dtype=torch.int64, device=device)}

    def update_state(self, state: Mapping[str, torch.Tensor], result: VerifyResult) -> None:
        state["emitted"] += result.num_emitted

    @rule
    def accept(emitted: Any) -> Any:
        return ops.where(emitted >= 0, 0.5, 0.0)


class Even(AcceptanceStrategy):
    """Accept tokens of even id."""

    name = "even"
    traits = Traits(guarantee="lossy", bound="none")

    @rule
    def accept(draft_token_id: Any) -> Any:
        half = draft_token_id / 2
        return ops.where((half == 0) | (half == 1) | (half == 2) | (half == 3) | (half == 4) | (half == 5), 1.0, 0.0)


def state(**changes: Any) -> dict[str, Any]:
    return {"rate": torch.tensor([0.25, 0.5, 0.75]), "shut": torch.tensor([False, True, False]), **changes}


REQUESTS = [ordinary(n, VOCABULARY, n) for n in (3, 1, 2)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "state: expected rate, shut, as the strategy's Traits.state says, got none. Pass .*initial_state"),
        ({"rate": torch.ones(3)}, "expected rate, shut, .* got rate$"),
        (state(phase=torch.ones(3)), "expected rate, shut, .* got phase, rate, shut"),
        (state(rate=torch.ones(2)), r"state\['rate'\]: expected shape \[3\], got \[2\]"),
        (state(rate=torch.ones(3, 1)), r"state\['rate'\]: expected shape \[3\], got \[3, 1\]"),
        (
            state(rate=torch.ones(3, dtype=torch.float16)),
            r"state\['rate'\]: expected dtype bool or .*, got float16.*float32",
        ),
        (state(rate=torch.ones(3, dtype=torch.int16)), r"got int16; pass `\.to\(torch\.int32\)`"),
        (state(rate=0.5), r"state\['rate'\]: expected a torch.Tensor, got float"),
        (state(rate=torch.ones(3, device="meta")), r"state\['rate'\]: expected device cpu"),
        (torch.ones(3), "state: expected Mapping, got <Tensor"),
    ],
)
def test_state_that_does_not_fit(given: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Rated().verify(**lay_out(REQUESTS), state=given)


def test_strategy_without_state_takes_none() -> None:
    with pytest.raises(InputError, match=r"state: expected none, .* got rate, shut"):
        acceptlib.create("rejection").verify(**lay_out(REQUESTS), state=state())
    acceptlib.create("rejection").verify(**lay_out(REQUESTS), state={})


@layouts
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_position_reads_its_requests_state(layout: str, dtype: torch.dtype) -> None:
    """u just below and just above the rate; a shut request accepts nothing."""
    rate = torch.tensor([0.1, 0.9, 0.3], dtype=dtype)
    for nudge, stands in ((-1e-12, True), (0.0, False)):
        uniforms = fixed(3, 3)
        uniforms.accept[:] = (rate.double() + nudge)[:, None]
        result = Rated().verify(**lay_out(REQUESTS, layout), state=state(rate=rate), uniforms=uniforms)
        assert result.num_accepted.tolist() == ([3, 0, 2] if stands else [0, 0, 0])


@layouts
def test_residual_reads_state_per_entry(layout: str) -> None:
    """The recovered token comes from the target's row where shut, else from the draft's."""
    for request in REQUESTS:
        request.p[0], request.q[0] = torch.eye(VOCABULARY)[[2, 7]]
    result = Rated().verify(**lay_out(REQUESTS, layout), state=state(), uniforms=fixed(3, 3, 0.99))
    assert result.output_token_ids[:, 0].tolist() == [7, 2, 7]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.float32, torch.float64])
def test_dtypes_mean_the_same(dtype: torch.dtype) -> None:
    given = {"emitted": torch.ones(3).to(dtype)}
    result = Counted().verify(**lay_out(REQUESTS), state=given, uniforms=fixed(3, 3, 0.4))
    assert result.num_accepted.tolist() == [3, 1, 2]
    assert given["emitted"].dtype == dtype


def test_numbers_whose_negation_is_a_flag_are_what_they_say() -> None:
    """In a batch, whose state and uniforms are read as they lie in memory."""
    rate, uniforms = torch.tensor([0.1, 0.9, 0.5]), fixed(3, 3, 0.4)
    wanted = Rated().verify(**lay_out(REQUESTS, "padded"), state=state(rate=rate), uniforms=uniforms)
    flagged = acceptlib.Uniforms(accept=torch._neg_view(-uniforms.accept), emit=uniforms.emit)
    found = Rated().verify(**lay_out(REQUESTS, "padded"), state=state(rate=torch._neg_view(-rate)), uniforms=flagged)
    assert wanted.num_accepted.tolist() == found.num_accepted.tolist() == [0, 0, 2]
    assert torch.equal(found.output_token_ids, wanted.output_token_ids)


def test_state_is_only_read_by_verify() -> None:
    given = state()
    before = {name: tensor.clone() for name, tensor in given.items()}
    Rated().verify(**lay_out(REQUESTS), state=given)
    assert all(torch.equal(given[name], tensor) for name, tensor in before.items())


@layouts
def test_draft_token_id(layout: str) -> None:
    ids = [[2, 4, 3], [5], [10, 0]]
    requests = [ordinary(len(some), VOCABULARY, 0).copy() for some in ids]
    for request, some in zip(requests, ids, strict=True):
        request.ids[:] = torch.tensor(some)
    assert Even().verify(**lay_out(requests, layout)).num_accepted.tolist() == [2, 0, 2]


# Definitions


@pytest.mark.parametrize("name", ["carry", "p", "floor"])
def test_state_may_not_take_a_name(name: str) -> None:
    class Options(acceptlib.Options):
        floor: float = 0.5

    with pytest.raises(
        StrategyDefinitionError, match=f"strategy 'made': rename what is named like .* each other: '{name}'$"
    ):
        type(
            "Made",
            (AcceptanceStrategy,),
            {
                "name": "made",
                "traits": Traits(guarantee="lossy", state=(name,)),
                "Options": Options,
                "accept": Even.accept,
            },
        )


@pytest.mark.parametrize("given", ["phase", ["phase"], (1,)])
def test_names_are_a_tuple_of_str(given: Any) -> None:
    with pytest.raises(StrategyDefinitionError, match=r"Traits\.state: expected a tuple of str"):
        Traits(guarantee="lossy", state=given)


def test_state_without_a_beginning_is_an_error() -> None:
    with pytest.raises(StrategyDefinitionError, match=r"'rated' reads state \(rate, shut\): override `initial_state`"):
        Rated().initial_state(1, "cpu")
    assert Even().initial_state(2, "cpu") == {}


# Exact laws

P = torch.tensor([[0.5, 0.3, 0.2]] * 3, dtype=torch.float64)
Q = torch.tensor([[0.2, 0.2, 0.6]] * 2, dtype=torch.float64)


def test_law_takes_state() -> None:
    """The shut request emits the target's row; the other accepts at its rate, in float64."""
    shut = exact.law(Rated(), P, Q, state={"rate": 0.1, "shut": True})
    assert shut == pytest.approx({(0,): 0.5, (1,): 0.3, (2,): 0.2}, abs=1e-15)
    law = exact.law(Rated(), P, Q, state={"rate": 0.1, "shut": torch.tensor([False])})
    assert sum(chance for emitted, chance in law.items() if len(emitted) == 1) == pytest.approx(0.9, abs=1e-15)
    assert exact.expected_tokens(Rated(), P, Q, state={"rate": 0.5, "shut": False}) == pytest.approx(1.75, abs=1e-15)


def test_law_of_a_new_request() -> None:
    assert exact.law(Relaxed(), P, Q) == exact.law(Relaxed(), P, Q, state={"thinking": True})
    assert exact.law(Relaxed(), P, Q, state={"thinking": False}) == exact.law(acceptlib.create("greedy"), P, Q)


def test_law_names_the_state() -> None:
    for given in ({}, {"rate": 0.5}, {"rate": 0.5, "shut": False, "open": True}):
        with pytest.raises(InputError, match="state: expected rate, shut, got"):
            exact.law(Rated(), P, Q, state=given)
    with pytest.raises(StrategyDefinitionError):
        exact.law(Rated(), P, Q)


def test_law_names_the_state_of_a_new_request() -> None:
    class Misnamed(Rated):
        name = "misnamed"

        def initial_state(self, num_requests: int, device: torch.device | str) -> dict[str, torch.Tensor]:
            return {"rates": torch.ones(num_requests, device=device)}

    with pytest.raises(InputError, match="state: expected rate, shut, got rates"):
        exact.law(Misnamed(), P, Q)


class Decaying(AcceptanceStrategy):
    """Accept less after each token, less still after an odd one; what it accepts depends on the way there."""

    name = "decaying"
    traits = Traits(guarantee="lossy", bound="none", state=("start",))

    @rule
    def carry(carry: Any, position: Any, start: Any, draft_token_id: Any) -> Any:
        before = ops.where(position > 0, carry, start)
        return before * ops.where(draft_token_id == 1, 0.5, 0.9)

    @rule
    def accept(carry: Any) -> Any:
        return carry

    @rule
    def residual(p: Any, q: Any, carry: Any) -> Any:
        return p - carry * q


def test_figures_of_a_rule_with_carry_and_ids() -> None:
    """Rows of a step: given the tokens accepted before, each has the law that enumeration gives."""
    strategy, drafts, given = Decaying(), (1, 0), {"start": 0.8}
    figures = exact.step_figures(strategy, torch.tensor(drafts), P, Q, 2, given)
    first = exact.complete(exact.law(strategy, P, Q, state=given), P, 1)
    second = torch.zeros(3, dtype=torch.float64)
    for token in range(3):
        law = exact.law(strategy, P, Q, draft_token_ids=(1, token), state=given)
        for emitted, chance in law.items():
            if len(emitted) > 1:
                second[emitted[1]] += Q[1, token] * chance
    distances = [float((law / law.sum() - row).abs().sum()) / 2 for law, row in ((first, P[0]), (second, P[1]))]
    assert figures.tv == pytest.approx(sum(distances) / 2, abs=1e-12)


class OddsWait(Even):
    """Look ahead, so that figures are of truncated rows, and read ids."""

    name = "odds-wait"
    traits = Traits(guarantee="lossy", bound="none", stop="last_acceptance")


def test_truncated_rows_keep_their_ids() -> None:
    """The four likeliest entries are tokens 6 to 9, of which 7 and 9 are never accepted."""
    p = torch.zeros(2, 10, dtype=torch.float64)
    p[:, 6:] = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    q = torch.zeros(1, 10, dtype=torch.float64)
    q[:, 6:] = 0.25
    figures = exact.step_figures(OddsWait(), torch.tensor([6]), p, q, 1)
    # Even tokens are emitted as drafted, a quarter each; half the time the token is the target's.
    out = torch.tensor([0.25, 0, 0.25, 0]) + 0.5 * p[0, 6:]
    assert figures.tv == pytest.approx(float((out - p[0, 6:]).abs().sum()) / 2, abs=1e-12)


# Whoever runs strategies by name carries their state


def test_decoder_carries_state() -> None:
    pair = load_pair()
    decoder = SpeculativeDecoder(target=pair.target, draft=pair.draft, strategy=Counted(), num_draft_tokens=3, rng=0)
    prompt = pair.tokenizer("def f(", return_tensors="pt")["input_ids"]
    steps = list(decoder.steps(prompt, 20))
    assert next(decoder.steps(prompt, 20)).state["emitted"].tolist() == [0]  # a new request
    assert len(steps) > 3
    emitted = 0
    for step in steps:
        assert step.state["emitted"].tolist() == [emitted]
        emitted += int(step.result.num_emitted)


def test_state_of_exact_laws_keeps_float64() -> None:
    tensors = as_state(Rated(), {"rate": 0.1, "shut": False})
    assert tensors["rate"].item() == 0.1
    assert tensors["shut"].dtype == torch.bool
