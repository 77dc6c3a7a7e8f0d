"""The list of checks. Each is a function `check_*` of a `Subject` with one property and the bug that it would catch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

from acceptlib.testing.checks import (
    contract,
    declarations,
    execution,
    greedy,
    law,
    parameters,
    randomness,
    state,
    statistics,
    values,
)
from acceptlib.testing.subject import Subject

Function: TypeAlias = Callable[[Subject], None]

STATE: Final[tuple[Function, ...]] = (
    state.check_initial_state,
    state.check_update_state,
    state.check_new_requests_are_alike,
    state.check_state_of_each_request,
)
"""For strategies with `Traits.state`; if the first one fails, no other check can be run."""

PROOFS: Final[dict[str, tuple[Function, ...]]] = {
    "lossless": (law.check_lossless_law, law.check_lossless_law_one_hot, law.check_zero_draft_probability),
    "greedy": (greedy.check_greedy_sequence,),
    "lossy": (declarations.check_promise, law.check_declared_bound, law.check_neutral_setting),
}
"""By declared guarantee: what must be proven before anything is measured."""

EVERY: Final[tuple[Function, ...]] = (
    declarations.check_options_are_read,
    law.check_acceptance_is_probability,
    values.check_decisions_follow_rules,
    values.check_impossible_draft_never_stands,
    values.check_drawn_token_is_possible,
    values.check_invalid_row_marks_request,
    values.check_token_outside_vocabulary,
    values.check_decreasing_counts,
    values.check_nan_in_draft_is_zero,
    values.check_larger_target_vocabulary,
    values.check_wide_flat_rows,
    contract.check_result_types,
    contract.check_accepted_tokens_are_drafted,
    contract.check_counts,
    contract.check_padding,
    contract.check_nothing_drafted,
    contract.check_placeholder_ends_chain,
    contract.check_given_bonus_token,
    contract.check_forms_of_a_call,
    parameters.check_temperature,
    parameters.check_filters,
    parameters.check_parameters_out_of_range,
    contract.check_half_precision,
    parameters.check_logprobs,
    contract.check_ragged_equals_padded,
    contract.check_permutation,
    contract.check_neighbours,
    contract.check_strides,
    contract.check_inputs_unmodified,
    contract.check_out_is_overwritten,
    contract.check_totals,
    contract.check_poisoned_memory,
    randomness.check_uniforms_of_stream,
    randomness.check_own_seed,
    randomness.check_every_bit_of_stream,
    randomness.check_offsets_advance,
    randomness.check_steps_differ,
    execution.check_backends_agree,
    execution.check_no_host_synchronisation,
    execution.check_graph_capture,
    statistics.check_emitted_law,
)

STATISTICS: Final[dict[str, tuple[Function, ...]]] = {"lossless": (statistics.check_lossless_over_two_steps,)}
"""By declared guarantee: checks by random trials, which run last."""


def chosen(guarantee: str, *, state: bool) -> tuple[Function, ...]:
    """Return the checks of a guarantee, with those of state or without, proofs first and statistics last."""
    return (*(STATE if state else ()), *PROOFS[guarantee], *EVERY, *STATISTICS.get(guarantee, ()))


def asked_of(name: str) -> str:
    """Return which strategies a check is limited to, such as `lossless strategies`; empty for all, or if unknown."""
    if name in map(name_of, STATE):
        return "strategies with Traits.state"
    for guarantee, functions in PROOFS.items():
        if name in map(name_of, (*functions, *STATISTICS.get(guarantee, ()))):
            return f"{guarantee} strategies"
    return ""


def name_of(function: Function) -> str:
    """Return the name of a `check_*` function's check."""
    return function.__name__.removeprefix("check_")
