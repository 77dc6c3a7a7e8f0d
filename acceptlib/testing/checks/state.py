"""What a strategy with `Traits.state` promises to whoever carries its state from step to step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from acceptlib.testing.batches import lay_out, mixed
from acceptlib.testing.checks.execution import waiting_is_an_error
from acceptlib.testing.subject import Skipped, Subject, expect

COUNT: Final = 5
STEPS: Final = 3


def check_initial_state(subject: Subject) -> None:
    """A new request's state has the names of `Traits.state`, with a tensor [B] of each on the device.

    Catches a name forgotten and one value for all requests, over which every other check would trip: where this one
    fails, no other is run.
    """
    expect(not subject.state_problem, subject.state_problem)


def check_update_state(subject: Subject) -> None:
    """`update_state` writes into the tensors that it is given, and does not wait for the device.

    Catches a name bound to a new tensor, or a new state returned: an engine that holds the old tensors, as a CUDA graph
    does, goes on with the state of the first step. Also one that asks on the host what it has to do.
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
        with waiting_is_an_error(subject.device, reads=True):
            returned = subject.strategy.update_state(state, result)  # type: ignore[func-returns-value]
        expect(
            returned is None, f"update_state returned {returned!r}, which is lost: write into the tensors of `state`"
        )
        for name, tensor in held.items():
            after = (tensor.data_ptr(), tensor.shape, tensor.dtype)
            expect(
                state[name] is tensor and after == before[name],
                f"update_state put another tensor in the place of state[{name!r}]: write into the one that is there, "
                f"as state[{name!r}].copy_(...) does",
            )
