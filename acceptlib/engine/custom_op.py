"""`verify` as an operator, `torch.ops.acceptlib.verify`: what `torch.compile` and `torch.export` put into their graphs.

Graphs hold tensors and numbers, so a strategy goes into one as a key, and parameters, streams and results as their
tensors and numbers. The operator reassembles them and runs an ordinary call, which writes results in place.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakValueDictionary

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from acceptlib.checks import Arguments, check_kinds, count_requests
from acceptlib.errors import InputError
from acceptlib.result import VerifyResult
from acceptlib.rng import Rng, Uniforms, wrap
from acceptlib.sampling import OFF, LogitBias, SamplingParams
from acceptlib.workspace import Workspace

if TYPE_CHECKING:
    from acceptlib.strategy import AcceptanceStrategy, Options

_STRATEGIES: WeakValueDictionary[str, AcceptanceStrategy] = WeakValueDictionary()
_NUMBERS: Final = itertools.count()

RESULTS: Final = {
    "output_token_ids": "Tensor(a!)",
    "num_accepted": "Tensor(b!)",
    "num_emitted": "Tensor(c!)",
    "status": "Tensor(d!)",
    "logprobs": "Tensor(e!)?",
    "raw_logprobs": "Tensor(f!)?",
    "num_passed": "Tensor(g!)?",
    "totals": "Tensor(j!)?",
}

ARGUMENTS: Final = {
    "strategy": "str",
    **RESULTS,
    "draft_token_ids": "Tensor",
    "target_logits": "Tensor?",
    "target_probs": "Tensor?",
    "draft_logits": "Tensor?",
    "draft_probs": "Tensor?",
    "cu_num_draft_tokens": "Tensor?",
    "max_num_draft_tokens": "SymInt?",
    "bonus_token_ids": "Tensor?",
    "wants_logprobs": "bool",
    # Each parameter that may be a number is None in one of these lists, or in both. The tensors go on with mask,
    # bias ids and bias values. Without parameters both are empty.
    "sampling_numbers": "float?[]",
    "sampling_tensors": "Tensor?[]",
    "draft_sampling_numbers": "float?[]",
    "draft_sampling_tensors": "Tensor?[]",
    "seed": "SymInt?",
    "seeds": "Tensor?",
    "offsets": "Tensor(h!)?",
    "advances": "bool",
    "accept": "Tensor?",
    "emit": "Tensor?",
    "state_names": "str[]",
    "state": "Tensor[]",
    "workspace": "Tensor(i!)[]",
}
"""The operator's arguments and their types; those that are written are marked with `!`."""


def register(strategy: AcceptanceStrategy, options: Options) -> str:
    """Return the key under which this process's graphs find a strategy, for as long as the strategy lives.

    The key has the name and the options, so that a graph saved by another process never finds other options.
    """
    # Not the repr: one that a subclass defines may need attributes that are not set yet.
    key = f"{strategy.name} {options.model_dump()} {next(_NUMBERS)}"
    _STRATEGIES[key] = strategy
    return key


def is_traced(ids: object) -> bool:
    """Return whether a call goes into a graph, or is only played through, instead of being run.

    `torch.compiler.is_compiling()` would be true of every thread while any of them compiles.

    Args:
        ids: The drafted ids that the call was given.

    Raises:
        InputError: A transform of torch.func is at work, which can neither record a call nor see through it.
    """
    if torch.compiler.is_dynamo_compiling():
        return True
    if torch._C._functorch.peek_interpreter_stack() is not None:  # noqa: SLF001 - nothing public tells
        msg = "expected a call outside of torch.func: verify has no rule for vmap, grad, jvp or functionalize"
        raise InputError(msg)
    return get_proxy_mode() is not None or isinstance(ids, FakeTensor)


def verify(strategy: str, arguments: Arguments) -> VerifyResult:
    """Put a call into the graph that is being traced; see `AcceptanceStrategy.verify`.

    Raises:
        InputError: No graph can hold the call. Whatever else is wrong with it is raised when the graph runs.
    """
    check_kinds(arguments)
    ids, counts, most = arguments.draft_token_ids, arguments.cu_num_draft_tokens, arguments.max_num_draft_tokens
    rng, uniforms, state, workspace = arguments.rng, arguments.uniforms, arguments.state, arguments.workspace
    if rng is not None and not isinstance(rng, (Rng, int)):  # a tuple, as in `check_kinds`
        msg = f"rng: expected acceptlib.Rng, int or None in a compiled function, got {type(rng).__name__}"
        raise InputError(msg)
    out = arguments.out
    if out is None:
        if counts is None:
            num_requests, most = ids.shape[0], ids.shape[-1]
        elif most is not None:
            target = next((rows for rows in (arguments.target_logits, arguments.target_probs) if rows is not None), ids)
            num_requests = count_requests(ids, target, counts, arguments.bonus_token_ids)
        else:
            msg = "max_num_draft_tokens: expected an int in the ragged layout of a compiled function, got None"
            raise InputError(msg)
        out = VerifyResult.empty(num_requests, most, ids.device, logprobs=arguments.logprobs)
    elif counts is not None and most is None:
        most = out.output_token_ids.shape[1] - 1  # off the CPU, finding it would wait for the device
    torch.ops.acceptlib.verify(
        strategy=strategy,
        **{name: getattr(out, name) for name in RESULTS},
        draft_token_ids=ids,
        target_logits=arguments.target_logits,
        target_probs=arguments.target_probs,
        draft_logits=arguments.draft_logits,
        draft_probs=arguments.draft_probs,
        cu_num_draft_tokens=counts,
        max_num_draft_tokens=most if counts is not None else arguments.max_num_draft_tokens,
        bonus_token_ids=arguments.bonus_token_ids,
        wants_logprobs=arguments.logprobs,
        **_take_apart("sampling", arguments.sampling),
        **_take_apart("draft_sampling", arguments.draft_sampling),
        seed=wrap(rng) if isinstance(rng, int) else None,
        seeds=rng.seeds if isinstance(rng, Rng) else None,
        offsets=rng.offsets if isinstance(rng, Rng) else None,
        advances=isinstance(rng, Rng) and rng.advances,
        accept=None if uniforms is None else uniforms.accept,
        emit=None if uniforms is None else uniforms.emit,
        state_names=[] if state is None else list(state.keys()),
        state=[] if state is None else list(state.values()),
        workspace=[] if workspace is None else [workspace.counters, workspace.words],
    )
    return out


def _take_apart(name: str, sampling: SamplingParams | None) -> dict[str, Any]:
    """Return the operator's arguments for sampling parameters."""
    numbers: list[float | None] = []
    tensors: list[torch.Tensor | None] = []
    if sampling is not None:
        values = [getattr(sampling, parameter) for parameter in OFF]
        numbers = [float(value) if isinstance(value, (int, float)) else None for value in values]
        tensors = [value if isinstance(value, torch.Tensor) else None for value in values]
        bias = sampling.logit_bias
        tensors += [sampling.allowed_token_bitmask, *((None, None) if bias is None else (bias.token_ids, bias.values))]
    return {f"{name}_numbers": numbers, f"{name}_tensors": tensors}


def _put_together(numbers: list[float | None], tensors: list[torch.Tensor | None]) -> SamplingParams | None:
    """Return the sampling parameters that `_take_apart` took apart."""
    if not tensors:
        return None
    *values, mask, token_ids, bias = tensors
    found: dict[str, Any] = dict(zip(OFF, values, strict=True))
    found |= {name: number for name, number in zip(OFF, numbers, strict=True) if number is not None}
    if isinstance(found["top_k"], float):
        found["top_k"] = int(found["top_k"])
    logit_bias = None if token_ids is None or bias is None else LogitBias(token_ids, bias)
    return SamplingParams(**found, allowed_token_bitmask=mask, logit_bias=logit_bias)


@torch.library.custom_op(
    "acceptlib::verify",
    mutates_args=[name for name, kind in ARGUMENTS.items() if "!" in kind],
    schema=f"({', '.join(f'{kind} {name}' for name, kind in ARGUMENTS.items())}) -> ()",
)
def _operator(*arguments: Any) -> None:
    given = dict(zip(ARGUMENTS, arguments, strict=True))
    take = given.pop
    key = take("strategy")
    strategy = _STRATEGIES.get(key)
    if strategy is None:
        msg = (
            f"strategy {key!r} of a compiled graph does not exist: keep a strategy for as long as its graphs. A "
            "process that loads a saved graph has to make the same strategies in the same order first."
        )
        raise InputError(msg)
    seed, seeds, offsets, advances = take("seed"), take("seeds"), take("offsets"), take("advances")
    accept, emit = take("accept"), take("emit")
    workspace = take("workspace")
    names, state = take("state_names"), take("state")
    strategy.verify(
        out=VerifyResult(**{name: take(name) for name in RESULTS}),
        logprobs=take("wants_logprobs"),
        sampling=_put_together(take("sampling_numbers"), take("sampling_tensors")),
        draft_sampling=_put_together(take("draft_sampling_numbers"), take("draft_sampling_tensors")),
        rng=seed if seeds is None else Rng(seeds=seeds, offsets=offsets, advances=advances),
        uniforms=None if accept is None else Uniforms(accept=accept, emit=emit),
        state=dict(zip(names, state, strict=True)),
        workspace=Workspace(counters=workspace[0], words=workspace[1]) if workspace else None,
        **given,
    )


@_operator.register_fake
def _(*_arguments: Any) -> None:
    """Return nothing, as the operator does: its results are arguments."""
