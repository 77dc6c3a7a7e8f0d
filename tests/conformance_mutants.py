"""Wrong engines whose single results look right: their streams, execution and statistics; and all mutants in a table.

`python tests/conformance_mutants.py` prints the table of docs/conformance.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import parameter_mutants  # noqa: F401 - its mutants join the list
import state_mutants  # noqa: F401 - as above
import torch
from engine_mutants import Call, engine, with_rows
from rule_mutants import MUTANTS, take_uniforms

from acceptlib import Rng, VerifyResult
from acceptlib.strategies.block import Block
from acceptlib.strategies.greedy import Greedy
from acceptlib.strategies.rejection import Rejection
from acceptlib.testing import check_strategy

# Streams


def _other_streams(
    arguments: dict[str, Any], change: Callable[[Rng], tuple[torch.Tensor, torch.Tensor]]
) -> tuple[dict[str, Any], Rng | None]:
    """Return the arguments with other streams, and the caller's, which are then to be advanced."""
    rng = arguments.get("rng")
    if not isinstance(rng, Rng):
        return arguments, None
    seeds, offsets = change(rng)
    return {**arguments, "rng": Rng(seeds=seeds, offsets=offsets.clone())}, rng


def _advance(result: VerifyResult, rng: Rng | None) -> VerifyResult:
    if rng is not None and rng.advances:
        rng.offsets.add_(1)
    return result


@engine("uniforms_of_stream")
def other_numbers(verify: Call, ids: torch.Tensor, arguments: dict[str, Any]) -> VerifyResult:
    """The numbers are not those that `Rng.uniforms` shows."""
    arguments, rng = _other_streams(arguments, lambda rng: (rng.seeds ^ 3, rng.offsets))
    return _advance(verify(ids, **arguments), rng)


@engine("own_seed")
def seed_of_row_zero(verify: Call, ids: torch.Tensor, arguments: dict[str, Any]) -> VerifyResult:
    """The first request's seed is everybody's."""
    arguments, rng = _other_streams(arguments, lambda rng: (rng.seeds[:1].expand_as(rng.seeds).clone(), rng.offsets))
    return _advance(verify(ids, **arguments), rng)


@engine("every_bit_of_stream")
def seed_of_32_bits(verify: Call, ids: torch.Tensor, arguments: dict[str, Any]) -> VerifyResult:
    """The seed's high word is dropped."""
    arguments, rng = _other_streams(arguments, lambda rng: (rng.seeds & 0xFFFFFFFF, rng.offsets))
    return _advance(verify(ids, **arguments), rng)


@engine("every_bit_of_stream")
def seed_plus_offset(verify: Call, ids: torch.Tensor, arguments: dict[str, Any]) -> VerifyResult:
    """Seed and offset are added."""
    arguments, rng = _other_streams(arguments, lambda rng: (rng.seeds + rng.offsets, 0 * rng.offsets))
    return _advance(verify(ids, **arguments), rng)


@engine("offsets_advance")
def advances_by_drafts(verify: Call, ids: torch.Tensor, arguments: dict[str, Any]) -> VerifyResult:
    """Offsets advance by the tokens emitted."""
    arguments, rng = _other_streams(arguments, lambda rng: (rng.seeds, rng.offsets))
    result = verify(ids, **arguments)
    if rng is not None:
        rng.offsets.add_(result.num_emitted)
    return result


@engine("offsets_advance")
def advances_what_stays(verify: Call, ids: torch.Tensor, arguments: dict[str, Any]) -> VerifyResult:
    """Offsets advance whether they are to or not."""
    result = verify(ids, **arguments)
    rng = arguments.get("rng")
    if rng is not None and not rng.advances:
        rng.offsets.add_(1)
    return result


@engine("offsets_advance")
def advances_what_stays_if_ragged(verify: Call, ids: torch.Tensor, arguments: dict[str, Any]) -> VerifyResult:
    """Offsets advance in the ragged layout, whether they are to or not."""
    result = verify(ids, **arguments)
    rng = arguments.get("rng")
    if isinstance(rng, Rng) and not rng.advances and arguments.get("cu_num_draft_tokens") is not None:
        rng.offsets.add_(1)
    return result


@engine("steps_differ")
def generator_is_a_seed(verify: Call, ids: torch.Tensor, arguments: dict[str, Any]) -> VerifyResult:
    """A generator is asked for its seed alone."""
    rng = arguments.get("rng")
    return verify(ids, **{**arguments, **({"rng": rng.initial_seed()} if isinstance(rng, torch.Generator) else {})})


@engine("steps_differ")
def one_seed_without_any(verify: Call, ids: torch.Tensor, arguments: dict[str, Any]) -> VerifyResult:
    """A call without random numbers has those of seed 7."""
    if arguments.get("rng") is None and arguments.get("uniforms") is None:
        arguments = {**arguments, "rng": 7}
    return verify(ids, **arguments)


@engine("steps_differ")
def offset_not_read(verify: Call, ids: torch.Tensor, arguments: dict[str, Any]) -> VerifyResult:
    """Offsets are advanced and not read."""
    arguments, rng = _other_streams(arguments, lambda rng: (rng.seeds, 0 * rng.offsets))
    return _advance(verify(ids, **arguments), rng)


# Execution


@engine("backends_agree")
def other_numbers_on_torch(verify: Call, ids: torch.Tensor, arguments: dict[str, Any]) -> VerifyResult:
    """The torch engine draws other numbers than the Triton engine."""
    if verify.__self__.backend == "torch":  # type: ignore[attr-defined]
        arguments, rng = _other_streams(arguments, lambda rng: (rng.seeds ^ 3, rng.offsets))
        return _advance(verify(ids, **arguments), rng)
    return verify(ids, **arguments)


@engine("no_host_synchronisation")
def asks_for_the_status(verify: Call, ids: torch.Tensor, arguments: dict[str, Any]) -> VerifyResult:
    """The status is looked at in every call."""
    result = verify(ids, **arguments)
    return replace(result) if bool(result.status.any()) and arguments.get("out") is None else result


@engine("no_host_synchronisation")
def reads_the_status(verify: Call, ids: torch.Tensor, arguments: dict[str, Any]) -> VerifyResult:
    """The status is read as a list in every call."""
    result = verify(ids, **arguments)
    return replace(result) if any(result.status.tolist()) and arguments.get("out") is None else result


@engine("graph_capture")
def copies_inputs(verify: Call, ids: torch.Tensor, arguments: dict[str, Any]) -> VerifyResult:
    """Rows are fetched through the host when a call of new shapes is seen."""
    return verify(ids, **with_rows(arguments, "target", lambda rows: rows.cpu().to(rows.device)))


# Statistics


@engine("emitted_law")
def draw_reuses_accept_noise(verify: Call, ids: torch.Tensor, arguments: dict[str, Any]) -> VerifyResult:
    """The draw's bits are those of the first acceptance."""
    rng = arguments.get("rng")
    first = None if rng is None else rng.uniforms(1).accept[:, 0]
    uniforms = take_uniforms(ids, arguments)
    if first is None and uniforms.accept.ndim == 2 and uniforms.accept.shape[1]:
        first = uniforms.accept[:, 0]
    if first is not None:
        uniforms = replace(uniforms, emit=((first - 0.5) * 2.0**64).long())
    return verify(ids, **arguments, uniforms=uniforms)


@engine("lossless_over_two_steps", traits=Rejection.traits)
def draw_shares_draft_noise(verify: Call, ids: torch.Tensor, arguments: dict[str, Any]) -> VerifyResult:
    """The draw's bits are those that drafted the first token."""
    rng = arguments["rng"] if arguments.get("uniforms") is None else None
    bits = None if rng is None else rng.draft_bits(0)
    uniforms = take_uniforms(ids, arguments)
    return verify(ids, **arguments, uniforms=uniforms if bits is None else replace(uniforms, emit=bits))


@engine("lossless_over_two_steps", traits=Rejection.traits)
def trusts_third_token(verify: Call, ids: torch.Tensor, arguments: dict[str, Any]) -> VerifyResult:
    """From the third position on, every possible token is accepted."""
    uniforms = take_uniforms(ids, arguments)
    accept = uniforms.accept.clone()
    if accept.ndim > 1:
        accept[:, 2:] = 0.0
    return verify(ids, **arguments, uniforms=replace(uniforms, accept=accept))


@engine("lossless_over_two_steps", traits=Rejection.traits)
def greedy_without_rows(verify: Call, ids: torch.Tensor, arguments: dict[str, Any]) -> VerifyResult:
    """Logits that come without draft rows are verified greedily."""
    if arguments.get("target_logits") is not None and arguments.get("draft_logits") is None:
        return Greedy().verify(ids, **arguments)
    return verify(ids, **arguments)


@engine("lossless_over_two_steps", traits=Rejection.traits)
def bonus_of_the_row_before(verify: Call, ids: torch.Tensor, arguments: dict[str, Any]) -> VerifyResult:
    """From four drafted tokens on, the bonus token is drawn from the row before its own."""
    if ids.ndim > 1 and ids.shape[1] >= 4:

        def repeated(rows: torch.Tensor) -> torch.Tensor:
            return torch.cat((rows[:, :-1], rows[:, -2:-1]), 1)

        arguments = with_rows(arguments, "target", repeated)
    return verify(ids, **arguments)


@engine("lossless_over_two_steps", inner=Block, traits=Block.traits)
def next_step_reuses_noise(verify: Call, ids: torch.Tensor, arguments: dict[str, Any]) -> VerifyResult:
    """Acceptance noise is keyed by seed and position, and so the same in every step."""
    rng = arguments["rng"] if arguments.get("uniforms") is None else None
    uniforms = take_uniforms(ids, arguments)
    if rng is not None:
        first = Rng(seeds=rng.seeds, offsets=0 * rng.offsets).uniforms(uniforms.accept.shape[-1])
        uniforms = replace(uniforms, accept=first.accept)
    return verify(ids, **arguments, uniforms=uniforms)


def failures(name: str, device: str = "cpu") -> list[str]:
    """Return the names of the checks that fail a mutant."""
    strategy = MUTANTS[name].make()
    results = check_strategy(strategy, device=device, raises=False)
    return [result.name for result in results if result.status == "failed"]


def table() -> str:
    """Return the documentation's table."""
    lines = ["| check | mutant | its bug | other checks that fail it |", "|---|---|---|---|"]
    for name, mutant in MUTANTS.items():
        others = ", ".join(f"`{other}`" for other in failures(name) if other != mutant.check)
        lines.append(f"| `{mutant.check}` | {name} | {mutant.bug} | {others} |")
    return "\n".join(lines)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout.write(table() + "\n")
