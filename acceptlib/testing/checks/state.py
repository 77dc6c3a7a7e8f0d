"""What a strategy with `Traits.state` promises to whoever carries its state from step to step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch

from acceptlib.testing.batches import Request, lay_out, mixed, tokens
from acceptlib.testing.checks.execution import waiting_is_an_error
from acceptlib.testing.subject import Skipped, Subject, require

COUNT: Final = 5
STEPS: Final = 3
RESULTS: Final = ("output_token_ids", "num_accepted", "num_emitted", "status")


def check_initial_state(subject: Subject) -> None:
    """A new request's state has the names of `Traits.state`, with a tensor [B] of each on the device.

    Catches a name forgotten and one value for all requests, over which every other check would trip: where this one
    fails, no other is run.
    """
    require(not subject.state_problem, subject.state_problem)


def check_new_requests_are_alike(subject: Subject) -> None:
    """New requests have the same state, whatever place they have, and whoever was new before them.

    Catches a state that depends on the row, and one tensor shared by requests that are new at different times: later
    ones find in it what the others left.
    """
    state = subject.further(range(COUNT)).get("state")
    if not isinstance(state, Mapping) or "state" in subject.verify_arguments(COUNT, subject.device):
        msg = "its state is not its own initial_state's"
        raise Skipped(msg)
    first = subject.strategy.initial_state(COUNT, subject.device)
    before = {name: tensor.clone() for name, tensor in first.items()}
    for name, tensor in before.items():
        alike = bool((tensor == tensor[:1]).all())
        require(alike, f"initial_state({COUNT}): expected one {name!r} for all, got {tensor.tolist()}")
    for tensor in first.values():
        tensor.copy_(tensor == 0)  # changes every value
    for count in (COUNT, 1):
        for name, tensor in subject.strategy.initial_state(count, subject.device).items():
            found, wanted = tensor.tolist(), before[name][:count].tolist()
            require(
                found == wanted,
                f"initial_state({count}), after the state of others was written: expected {name!r} {wanted}, got "
                f"{found}: return new tensors",
            )


def check_state_of_each_request(subject: Subject) -> None:
    """What a step leaves of a request's state, and its next tokens, depend on the request alone.

    Catches an update that reads a neighbour's count, or the batch's: engines add and remove requests at every step, and
    pad K. Also one that is random, or writes into the result, which the caller has yet to read.
    """
    requests, keys = mixed(COUNT), range(COUNT)
    if not isinstance(subject.further(keys).get("state"), Mapping):
        msg = "its state is no mapping that could be updated"
        raise Skipped(msg)
    together = _two_steps(subject, requests)
    reordered = [*keys][::-1]
    cases = {
        "once more": (_two_steps(subject, requests), [*keys]),
        "in another order": (_two_steps(subject, requests[::-1]), reordered),
        "with a larger K": (_two_steps(subject, requests, longer=3), [*keys]),
        **{f"request {key} alone": (_two_steps(subject, [requests[key]]), [key]) for key in keys},
    }
    for what, (found, places) in cases.items():
        for name, values in found.items():
            wanted = [together[name][place] for place in places]
            require(values == wanted, f"{what}: {name} was {wanted}, and is {values}")


def _two_steps(subject: Subject, requests: Sequence[Request], longer: int = 0) -> dict[str, list[Any]]:
    """Return the state after a step, and the tokens of the next, of each request."""
    keys = [request.key for request in requests]
    further = subject.further(keys)
    rows, rng = subject.place(lay_out(requests)), subject.streams(keys)
    rows["max_num_draft_tokens"] += longer
    result = subject.strategy.verify(**rows, **further, rng=rng)
    before = replace(result, **{name: getattr(result, name).clone() for name in RESULTS})
    subject.strategy.update_state(further["state"], result)
    for name in RESULTS:
        kept = torch.equal(getattr(result, name), getattr(before, name))
        require(kept, f"update_state wrote into result.{name}")
    after = {f"state[{name!r}] after a step": tensor.tolist() for name, tensor in further["state"].items()}
    following = subject.strategy.verify(**rows, **further, rng=rng)
    return {**after, "the next step": [tokens(following, index) for index in range(len(requests))]}


def check_update_state(subject: Subject) -> None:
    """`update_state` writes into the tensors that it is given, and does not wait for the device.

    Catches a name bound to a new tensor, or a new state returned: an engine that holds the old tensors, as a CUDA graph
    does, goes on with the state of the first step. Also an update that decides on the host what to do.
    """
    arguments = subject.further(range(COUNT))
    state = arguments.get("state")
    if not isinstance(state, Mapping) or not state:
        msg = "its state is no mapping that could be updated"
        raise Skipped(msg)
    rows, rng = subject.place(lay_out(mixed(COUNT))), subject.streams(range(COUNT))
    held = dict(state)
    before = {name: (tensor.data_ptr(), tensor.shape, tensor.dtype) for name, tensor in held.items()}
    for _ in range(STEPS):
        result = subject.strategy.verify(**rows, **arguments, rng=rng)
        spare = {name: tensor.clone() for name, tensor in held.items()}
        subject.strategy.update_state(spare, result)  # the first call may compile
        with waiting_is_an_error(subject.device):
            returned = subject.strategy.update_state(state, result)  # type: ignore[func-returns-value]
        require(
            returned is None, f"update_state returned {returned!r}, which is lost: write into the tensors of `state`"
        )
        for name, tensor in held.items():
            after = (tensor.data_ptr(), tensor.shape, tensor.dtype)
            require(
                state[name] is tensor and after == before[name],
                f"update_state put another tensor in the place of state[{name!r}]: write into the one that is there, "
                f"as state[{name!r}].copy_(...) does",
            )
