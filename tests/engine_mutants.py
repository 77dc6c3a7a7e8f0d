"""Wrong engines around right strategies: what they make of values, and where they break the contract of a call.

Imported for the list in `rule_mutants`, which they join.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from rule_mutants import UNBOUNDED, add, take_uniforms

from acceptlib import AcceptanceStrategy, Traits, VerifyResult, ops, rule
from acceptlib.ops import Value
from acceptlib.strategies.rejection import Rejection

Call = Callable[..., VerifyResult]
Bug = Callable[[Call, torch.Tensor, dict[str, Any]], VerifyResult]


class Wrapped(AcceptanceStrategy):
    """A right strategy with a bug around its `verify`. Its rules stay to be seen, as those of an engine's would."""

    name = "wrapped"
    traits = UNBOUNDED

    def __init__(self, bug: Bug, inner: AcceptanceStrategy, traits: Traits) -> None:
        super().__init__()
        self.bug, self.inner, self.declared = bug, inner, traits
        self.plan = inner.plan

    def resolve_traits(self) -> Traits:
        return self.declared

    def initial_state(self, num_requests: int, device: torch.device | str) -> dict[str, torch.Tensor]:
        return self.inner.initial_state(num_requests, device)

    def update_state(self, state: Mapping[str, torch.Tensor], result: VerifyResult) -> None:
        self.inner.update_state(state, result)

    def verify(self, draft_token_ids: torch.Tensor, **arguments: Any) -> VerifyResult:  # type: ignore[override]
        self.inner.backend = self.backend
        return self.bug(self.inner.verify, draft_token_ids, arguments)


def engine(check: str, inner: type[AcceptanceStrategy] = Rejection, traits: Traits = UNBOUNDED) -> Callable[[Bug], Bug]:
    """Register a bug around a right strategy."""

    def register(bug: Bug) -> Bug:
        name = bug.__name__.replace("_", "-")
        add(name, check, bug.__doc__, lambda: Wrapped(bug, inner(), traits))
        return bug

    return register


# Values


@engine("decisions_follow_rules")
def accepts_u_equal_h(verify: Call, ids: torch.Tensor, arguments: dict[str, Any]) -> VerifyResult:
    """`u <= h` instead of `u < h`."""
    uniforms = take_uniforms(ids, arguments)
    return verify(ids, **arguments, uniforms=replace(uniforms, accept=uniforms.accept - 2.0**-53))


@engine("decisions_follow_rules")
def uniforms_in_float32(verify: Call, ids: torch.Tensor, arguments: dict[str, Any]) -> VerifyResult:
    """u is rounded to float32, which makes the largest ones 1.0."""
    uniforms = take_uniforms(ids, arguments)
    return verify(ids, **arguments, uniforms=replace(uniforms, accept=uniforms.accept.float().double()))


@engine("decisions_follow_rules")
def u_stuck_at_zero(verify: Call, ids: torch.Tensor, arguments: dict[str, Any]) -> VerifyResult:
    """Every u is 0."""
    uniforms = take_uniforms(ids, arguments)
    return verify(ids, **arguments, uniforms=replace(uniforms, accept=torch.zeros_like(uniforms.accept)))


@engine("decisions_follow_rules")
def passes_what_stands(verify: Call, ids: torch.Tensor, arguments: dict[str, Any]) -> VerifyResult:
    """`num_passed` is what stands, and leaves out what passes behind a rejection."""
    result = verify(ids, **arguments)
    if result.num_passed is not None:
        result.num_passed.copy_(result.num_accepted)
    return result


@engine("invalid_row_marks_request")
def emits_of_bad_rows(verify: Call, ids: torch.Tensor, arguments: dict[str, Any]) -> VerifyResult:
    """A row without a law emits id 0, and nobody hears of it."""
    result = verify(ids, **arguments)
    bad = result.status != 0
    result.output_token_ids.scatter_add_(1, result.num_accepted[:, None].long(), bad[:, None].int())
    result.num_emitted.add_(bad.int())
    result.status.zero_()
    return result


@engine("token_outside_vocabulary")
def clamps_ids(verify: Call, ids: torch.Tensor, arguments: dict[str, Any]) -> VerifyResult:
    """Drafted ids beyond the vocabulary are taken for its last one."""
    rows = arguments.get("target_probs")
    rows = arguments["target_logits"] if rows is None else rows
    return verify(ids.clamp(max=rows.shape[-1] - 1), **arguments)


@engine("decreasing_counts")
def sorts_bounds(verify: Call, ids: torch.Tensor, arguments: dict[str, Any]) -> VerifyResult:
    """Bounds that decrease are put in order."""
    cu = arguments.get("cu_num_draft_tokens")
    if cu is not None:
        arguments = {**arguments, "cu_num_draft_tokens": cu.sort().values}
    return verify(ids, **arguments)


def with_rows(arguments: dict[str, Any], model: str, change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    """Return the arguments with one model's rows changed, where they are probabilities."""
    name = f"{model}_probs"
    return {**arguments, name: change(arguments[name])} if arguments.get(name) is not None else arguments


@engine("nan_in_draft_is_zero")
def nan_is_certain(verify: Call, ids: torch.Tensor, arguments: dict[str, Any]) -> VerifyResult:
    """NaN in the draft's rows counts as 1/2."""
    return verify(ids, **with_rows(arguments, "draft", lambda rows: rows.nan_to_num(nan=0.5)))


@engine("larger_target_vocabulary")
def cuts_target(verify: Call, ids: torch.Tensor, arguments: dict[str, Any]) -> VerifyResult:
    """The target's rows are cut to the draft's vocabulary."""
    draft = arguments.get("draft_probs")

    def cut(rows: torch.Tensor) -> torch.Tensor:
        narrow = rows if draft is None else rows[..., : draft.shape[-1]]
        return narrow / narrow.sum(-1, keepdim=True)

    return verify(ids, **with_rows(arguments, "target", cut))


# The contract


@engine("result_types")
def long_ids(verify: Call, ids: torch.Tensor, arguments: dict[str, Any]) -> VerifyResult:
    """Ids come back as int64."""
    result = verify(ids, **arguments)
    return result if arguments.get("out") else replace(result, output_token_ids=result.output_token_ids.long())


@engine("accepted_tokens_are_drafted")
def reversed_chain(verify: Call, ids: torch.Tensor, arguments: dict[str, Any]) -> VerifyResult:
    """Two accepted tokens come back in reverse."""
    result = verify(ids, **arguments)
    tokens = result.output_token_ids
    if tokens.shape[1] > 1:
        both = (result.num_accepted >= 2)[:, None]
        tokens[:, :2] = torch.where(both, tokens[:, :2].flip(1), tokens[:, :2])
    return result


@engine("counts")
def counts_the_bonus(verify: Call, ids: torch.Tensor, arguments: dict[str, Any]) -> VerifyResult:
    """`num_accepted` counts the bonus token as well."""
    result = verify(ids, **arguments)
    result.num_accepted.copy_(result.num_emitted)
    return result


@engine("padding")
def pads_with_zero(verify: Call, ids: torch.Tensor, arguments: dict[str, Any]) -> VerifyResult:
    """0 follows the emitted tokens, which is an id."""
    result = verify(ids, **arguments)
    result.output_token_ids.clamp_(min=0)
    return result


@engine("padding")
def emits_vocabulary_size(verify: Call, ids: torch.Tensor, arguments: dict[str, Any]) -> VerifyResult:
    """The last id of the vocabulary comes back as V."""
    result = verify(ids, **arguments)
    rows = arguments.get("target_probs")
    size = (arguments["target_logits"] if rows is None else rows).shape[-1]
    result.output_token_ids.add_((result.output_token_ids == size - 1).int())
    return result


@engine("nothing_drafted")
def needs_a_request(verify: Call, ids: torch.Tensor, arguments: dict[str, Any]) -> VerifyResult:
    """An empty batch has no longest chain."""
    result = verify(ids, **arguments)
    result.num_accepted.max()
    return result


@engine("placeholder_ends_chain")
def only_minus_one(verify: Call, ids: torch.Tensor, arguments: dict[str, Any]) -> VerifyResult:
    """-1 ends a chain, and any other negative id counts from the end of the vocabulary."""
    rows = arguments.get("target_probs")
    size = (arguments["target_logits"] if rows is None else rows).shape[-1]
    return verify(torch.where(ids < -1, ids + size, ids), **arguments)


@engine("given_bonus_token")
def bonus_instead_of_recovered(verify: Call, ids: torch.Tensor, arguments: dict[str, Any]) -> VerifyResult:
    """The caller's bonus token is emitted after a rejection too."""
    result = verify(ids, **arguments)
    given = arguments.get("bonus_token_ids")
    if given is not None:
        result.output_token_ids.scatter_(1, result.num_accepted[:, None].long(), given[:, None].int())
    return result


@engine("forms_of_a_call")
def counts_with_their_zero(verify: Call, ids: torch.Tensor, arguments: dict[str, Any]) -> VerifyResult:
    """Counts are taken to begin with 0."""
    counts, bonus = arguments.get("cu_num_draft_tokens"), arguments.get("bonus_token_ids")
    if counts is not None and bonus is not None and len(counts) == len(bonus):
        arguments = {**arguments, "cu_num_draft_tokens": counts - counts[0]}
    return verify(ids, **arguments)


@engine("forms_of_a_call")
def streams_of_no_seed(verify: Call, ids: torch.Tensor, arguments: dict[str, Any]) -> VerifyResult:
    """An int gives the same streams as every other."""
    seed = isinstance(arguments.get("rng"), int)
    return verify(ids, **{**arguments, **({"rng": 0} if seed else {})})


@engine("half_precision")
def half_is_bfloat16(verify: Call, ids: torch.Tensor, arguments: dict[str, Any]) -> VerifyResult:
    """Rows of either half precision are read as bfloat16."""

    def read(rows: torch.Tensor) -> torch.Tensor:
        return rows if rows.dtype == torch.float32 else rows.bfloat16()

    return verify(ids, **with_rows(with_rows(arguments, "target", read), "draft", read))


@engine("logprobs")
def stale_logprobs(verify: Call, ids: torch.Tensor, arguments: dict[str, Any]) -> VerifyResult:
    """Log-probabilities behind the stop are left at 0."""
    result = verify(ids, **arguments)
    if result.logprobs is not None:
        result.logprobs.nan_to_num_(nan=0.0)
    return result


@engine("logprobs")
def processed_is_raw(verify: Call, ids: torch.Tensor, arguments: dict[str, Any]) -> VerifyResult:
    """Raw log-probabilities are those after sampling parameters."""
    result = verify(ids, **arguments)
    if result.raw_logprobs is not None:
        result.raw_logprobs.copy_(result.logprobs)
    return result


@engine("ragged_equals_padded")
def row_of_ragged(verify: Call, ids: torch.Tensor, arguments: dict[str, Any]) -> VerifyResult:
    """Row i of a ragged request is read at cu[b] + i, not at cu[b] + b + i."""
    cu = arguments.get("cu_num_draft_tokens")
    if cu is not None:
        starts = cu.tolist()
        rows = [row for b in range(len(cu) - 1) for row in range(starts[b], starts[b + 1] + 1)]
        arguments = {
            name: value[rows] if name in {"target_probs", "target_logits"} and value is not None else value
            for name, value in arguments.items()
        }
    return verify(ids, **arguments)


@engine("permutation")
def keyed_by_batch_row(verify: Call, ids: torch.Tensor, arguments: dict[str, Any]) -> VerifyResult:
    """Streams are keyed by the seed and the batch row."""
    rng = arguments.get("rng")
    if rng is not None:
        row = torch.arange(len(rng.seeds), device=rng.seeds.device)
        arguments = {**arguments, "rng": replace(rng, seeds=rng.seeds + (row << 20))}
    return verify(ids, **arguments)


@engine("neighbours")
def one_fails_all(verify: Call, ids: torch.Tensor, arguments: dict[str, Any]) -> VerifyResult:
    """One bad row marks every request."""
    result = verify(ids, **arguments)
    if len(result.status):
        result.status.copy_(result.status.amax().expand_as(result.status))
    return result


@engine("strides")
def assumes_contiguous(verify: Call, ids: torch.Tensor, arguments: dict[str, Any]) -> VerifyResult:
    """Addresses are computed from the rows' shape."""

    def packed(rows: torch.Tensor) -> torch.Tensor:
        # Rows that are expanded on purpose have less memory than their shape says.
        enough = rows.untyped_storage().nbytes() >= rows.numel() * rows.element_size()
        return torch.as_strided(rows, rows.shape, torch.empty(rows.shape, device="meta").stride()) if enough else rows

    return verify(ids, **with_rows(arguments, "target", packed))


@engine("inputs_unmodified")
def divides_in_place(verify: Call, ids: torch.Tensor, arguments: dict[str, Any]) -> VerifyResult:
    """Temperature is divided into the caller's logits."""
    result = verify(ids, **arguments)
    if arguments.get("sampling") is not None:
        arguments["target_logits"].div_(2)
    return result


class Budget(Rejection):
    """A right strategy with per-request state: it accepts what the target finds possible while a budget lasts."""

    name = "budget"
    traits = replace(UNBOUNDED, state=("budget",))

    def initial_state(self, num_requests: int, device: torch.device | str) -> dict[str, torch.Tensor]:
        return {"budget": torch.full((num_requests,), 2, device=device)}

    def update_state(self, state: Mapping[str, torch.Tensor], result: VerifyResult) -> None:
        state["budget"].sub_(result.num_accepted)

    @rule
    def accept(target_prob: Value, draft_prob: Value, position: Value, budget: Value) -> Value:
        h = ops.minimum(ops.ratio(target_prob, draft_prob), 1.0)
        return ops.where((position < budget) & (target_prob > 0), 1.0, h)


@engine("inputs_unmodified", inner=Budget, traits=Budget.traits)
def spends_state(verify: Call, ids: torch.Tensor, arguments: dict[str, Any]) -> VerifyResult:
    """The state is brought to the next step in `verify`, and once more in `update_state`."""
    result = verify(ids, **arguments)
    arguments["state"]["budget"].sub_(result.num_accepted)
    return result


@engine("permutation", inner=Budget, traits=Budget.traits)
def state_of_row_zero(verify: Call, ids: torch.Tensor, arguments: dict[str, Any]) -> VerifyResult:
    """The first request's state is everybody's."""
    state = {name: value[:1].expand_as(value) for name, value in arguments["state"].items()}
    return verify(ids, **{**arguments, "state": state})


@engine("out_is_overwritten")
def fresh_result(verify: Call, ids: torch.Tensor, arguments: dict[str, Any]) -> VerifyResult:
    """`out` is left alone, and a fresh result returned."""
    return verify(ids, **{**arguments, "out": None})


@engine("out_is_overwritten")
def fresh_result_if_ragged(verify: Call, ids: torch.Tensor, arguments: dict[str, Any]) -> VerifyResult:
    """`out` is left alone in the ragged layout."""
    if arguments.get("cu_num_draft_tokens") is not None:
        arguments = {**arguments, "out": None}
    return verify(ids, **arguments)


@engine("totals")
def totals_of_one_call(verify: Call, ids: torch.Tensor, arguments: dict[str, Any]) -> VerifyResult:
    """Totals begin anew at every call."""
    out = arguments.get("out")
    if out is not None and out.totals is not None:
        out.totals.zero_()
    return verify(ids, **arguments)


@engine("out_is_overwritten")
def stale_ids(verify: Call, ids: torch.Tensor, arguments: dict[str, Any]) -> VerifyResult:
    """Ids behind the stop keep what `out` held."""
    out = arguments.get("out")
    before = None if out is None else out.output_token_ids.clone()
    result = verify(ids, **arguments)
    if before is not None:
        tokens = result.output_token_ids
        tokens.copy_(torch.where(tokens < 0, before, tokens))
    return result


@engine("poisoned_memory")
def reads_before_it_writes(verify: Call, ids: torch.Tensor, arguments: dict[str, Any]) -> VerifyResult:
    """A workspace is read that nothing has written."""
    workspace = torch.empty((), dtype=torch.int64)
    result = verify(ids, **arguments)
    if int(workspace) == 0x5A5A5A5A5A5A5A5A:
        result.num_accepted.zero_()
    return result
