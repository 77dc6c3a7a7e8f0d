"""Whole calls through the Triton engine: what `test_triton_engine.py` checks, in processes of their own.

TRITON_INTERPRET=1 python triton_engine_cases.py interpreted:B2-K3-V301 results.json
python triton_engine_cases.py cuda:80:more results.json
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import quick_interpreter
import torch
import triton
from filelock import FileLock
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton_calls import FILTERED_SHAPE, MAX_SETTLED, ONE_BLOCK, Wild, calls, strategies
from triton_cases import TARGETS

import acceptlib
from acceptlib import AcceptanceStrategy, VerifyResult, Workspace, checks
from acceptlib.checks import Arguments
from acceptlib.engine import torch_engine
from acceptlib.engine.plan import Plan
from acceptlib.engine.triton import call as engine_call
from acceptlib.engine.triton import counters, engine, forms, held, launching, memory, min_p, records, stages, tunings
from acceptlib.engine.triton import kernel as kernels
from acceptlib.engine.triton.launching import Launch
from acceptlib.engine.triton.layout import layout_of, num_counts
from acceptlib.inputs import Inputs, prepare
from acceptlib.result import Status

SHAPES = {
    "B3-K3-V50": ONE_BLOCK,
    "B2-K3-V301": (2, 3, 301),
    "B3-K0-V7": (3, 0, 7),
    "B2-K70-V11": (2, 70, 11),
    "B2-K31-V11": MAX_SETTLED,
    "B3-K2-V100": FILTERED_SHAPE,
}
# Calls that every strategy goes through; "rejection" goes through all.
CORE = ("padded", "placeholders", "logits-temperature", "ragged-logits")
ONCE = ("padded", "ragged-logits")  # calls of a row of one block
# Calls that such rows have alone: two strategies go through them.
SPECIAL = (
    "bad-counts-logits",
    "overlapping-counts",
    "overlapping-counts-filtered",
    "counts-far-below",
    "counts-behind-too-many",
    "lanes",
    "lanes-passed",
    "lanes-min-p",
    "lanes-top-k",
)
# Calls of more positions than are decided at a time, which "rejection" goes through in both small batches.
MANY = ("every-length", "lanes", "lanes-passed")
MEDIUM = (*CORE, "logits")  # calls that "rejection" goes through in a medium batch of several blocks too
# Beside "rejection", which goes through every call with filters. Their searches take long.
FILTERED = {
    # Each way to decide and to sum over rows once.
    "filtered": ("block", "typical", "likeliest", "entropy-scaled", "greedy"),
    "filtered-ends": ("likeliest",),
    "min-p": ("typical",),  # whose sums come after the laws
    "min-p-mixed": ("block", "typical", "likeliest"),
    "top-p": ("typical",),  # likewise
    "bad-draft-parameters": ("typical",),  # which reads no draft
    "filtered-draft": ("forgetful",),  # whose draws go by the law of a row that is not filtered
}
EVERY_SIZE = (
    tunings.Sizes(small=1 << 30, masses=1, large_masses=1 << 30, medium=1 << 30),
    tunings.Sizes(large_masses=1, medium=1, runs=1),
    tunings.Sizes(large_masses=1, medium=1, large=0),
)
"""With which every batch is of the fewest requests, medium, or large."""

MORE = tunings.Sizes(small=1, medium=1 << 30)
"""With which it is small, but not of the fewest, of which fewer positions are decided at a time."""

RUNS = tunings.Sizes(medium=1)
"""With which a batch is medium, and its blocks list runs under min-p alone."""

COMPILED_LARGE = (  # and in the stages of a large batch: each way to decide
    ("rejection", "ragged-logits"),
    ("rejection", "logits-one-hot"),
    ("rejection", "min-p"),
    ("rejection", "filtered-draft"),
    ("block", "passed"),
    ("fly", "padded"),
    ("deferred", "padded"),
)
# That go through "by-mass", "every-length", "last-entry", "many", "passed" and "outside", whose ids are too large
# behind others.
MASSES = ("block",)
FOUND_WITH_STOPS = ("typical", "greedy")  # that go through "outside-logits": a stop tells what is wrong with its token
WINDOWS = ("deferred", "fly")
"""That go through it too, for theirs does not; "logits-placeholders"; "forgiven"; "undrafted", for a carry of inf."""
SUMS = ("typical", "entropy-scaled", "fly")  # strategies that go through a bad entry, for they sum over rows
APART = ("fly",)  # that go through "passed", for a stage of its own finds what passes
WIDE = ("likeliest", "cascade")  # that go through "wide-draft", for they read a row's largest entry
LENGTHS = ("cautious", "saver")  # that go through "cut-short", for they read how many tokens were drafted
UNDRAWN = ("greedy",)  # that go through "logits", where log-probabilities alone ask for normalisers
CARELESS = ("forgetful",)  # that go through bad entries of the draft's rows, for they recover without these
SLOW = ("deferred", "miser", "saver", "cascade", "relaxed")
"""Not of many positions: all rows are reduced, or summed up often."""
SLOW_LENGTH = 10
FIELDS = ("output_token_ids", "num_accepted", "num_emitted", "status")
COMPILED = ("padded", "ragged-logits")
GROUPS = (*COMPILED, "more")
EVERYTHING = "cuda:90"  # the target that all cases are compiled for
# Strategies for the others, and from probabilities: each way to decide once.
ELSEWHERE = ("rejection", "greedy", "typical", "block", "fly")
# What else a kernel may hold, for one strategy; first what it is compiled for elsewhere too.
COMPILED_TOO = ("logits", "passed", "bonus", "ragged-explicit", "ragged-given", "rooted")
# Sampling parameters of one model's rows, the other's read beside: with top-k, and cuts found by stages of their own.
COMPILED_FILTERED = (("rejection", "filtered-target"), ("rejection", "filtered-draft"), ("rejection", "min-p"))
# All of them on both models' rows; masses; draws by a law.
COMPILED_MORE = (
    ("rejection", "filtered-constrained"),
    ("block", "min-p-target"),
    ("rejection", "logits-one-hot"),
    ("forgetful", "filtered-draft"),  # by the law of one model beside filters of the other
)
engine.schedule = engine.schedule.__wrapped__  # for tests change what it depends on


class Forgotten(dict[Any, Any]):
    """Remembers nothing."""

    def __setitem__(self, key: object, value: object) -> None:
        """Leave it out."""


checks._CHECKED = Forgotten()  # likewise


def each(note: Callable[..., object]) -> Callable[..., None]:
    """Return what stands for `engine.launch` and passes on each stage: all of a `Launch` but for its first position,
    and the kernel's arguments.
    """

    def launch(
        launches: tuple[Launch, ...], tensors: tuple[torch.Tensor | None, ...], numbers: tuple[int, ...]
    ) -> None:
        for stage in launches:
            note(*stage[:4], (*tensors, *numbers, stage.first_position))

    return launch


KINDS = {
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
}


def inputs(ids: torch.Tensor, **arguments: object) -> Inputs:
    """Return a validated call."""
    names = arguments.pop("state_names", ())
    return prepare(Arguments(ids, **arguments), names)  # type: ignore[arg-type]


def compare(
    strategy: AcceptanceStrategy, arguments: dict[str, object], sizes: Sequence[tunings.Sizes] = EVERY_SIZE
) -> str:
    """Return an empty string if both engines do the same, for batches of some sizes, else what differs."""
    expected = run(torch_engine.verify, strategy, arguments)
    by_mass = "next_residual_mass" in strategy.plan.reads
    if by_mass:
        sizes = (tunings.Sizes(), *sizes)  # whose smaller batches are told apart
    decides = strategy.plan.traits.stop in {"first_rejection", "window"} or by_mass
    for tunings.SIZES in sizes if decides else sizes[-1:]:
        found = run(engine.verify, strategy, arguments)
        if isinstance(expected, str) or isinstance(found, str):
            return f"{expected} and {found}"
        different = [name for name in FIELDS if not torch.equal(getattr(expected, name), getattr(found, name))]
        if different:
            return "; ".join(f"{name}: {getattr(expected, name)} and {getattr(found, name)}" for name in different)
        if expected.num_passed is not None and found.num_passed is not None:
            torch.testing.assert_close(found.num_passed, expected.num_passed, rtol=0, atol=0)
            torch.testing.assert_close(found.totals, expected.totals, rtol=0, atol=0)
        if expected.logprobs is not None and found.logprobs is not None:
            torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=0, atol=2e-5, equal_nan=True)
            torch.testing.assert_close(found.raw_logprobs, expected.raw_logprobs, rtol=0, atol=2e-5, equal_nan=True)
    return ""


def run(
    verify: Callable[[Plan, Inputs], VerifyResult], strategy: AcceptanceStrategy, arguments: dict[str, object]
) -> VerifyResult | str:
    """Return what an engine makes of a call, or what is wrong with the offsets or the counts that it leaves."""
    rest = {name: value for name, value in arguments.items() if name != "ids"}
    ids, cu = arguments["ids"], rest.get("cu_num_draft_tokens")
    assert isinstance(ids, torch.Tensor)
    bonus = rest.get("bonus_token_ids")
    count = len(bonus) if isinstance(bonus, torch.Tensor) else len(cu) - 1 if isinstance(cu, torch.Tensor) else len(ids)
    if not {"uniforms", "rng"} & {*rest}:
        rest["rng"] = acceptlib.Rng(seeds=torch.arange(count) * 31 - 7, offsets=torch.full((count,), 2**40 + 5))
    if strategy.plan.traits.state:
        rest["state_names"] = strategy.plan.traits.state
        rest["state"] = {name: torch.arange(count) % 2 == 0 for name in strategy.plan.traits.state}
    num_passed = bool(rest.pop("num_passed", False))
    call = inputs(ids, **rest)
    if num_passed:
        out = VerifyResult.empty(count, call.max_num_draft_tokens, call.device, num_passed=True)
        tokens, totals = out.output_token_ids.long(), torch.tensor([5, 2**40])
        call = inputs(ids, **rest, out=dataclasses.replace(out, output_token_ids=tokens, totals=totals))
    result = verify(strategy.plan, call)
    rng = rest.get("rng")
    moved = not isinstance(rng, acceptlib.Rng) or bool((rng.offsets == 2**40 + 5 + rng.advances).all())
    left = sum(int(counts.count_nonzero()) for counts in LENT)
    LENT.clear()
    if left:
        return f"{left} counts are left"
    return result if moved else f"offsets {rng.offsets.tolist()}"


LENT: list[torch.Tensor] = []
"""Counters of calls that have not been looked at since."""


def shrink() -> None:
    """Have small blocks, so that small vocabularies have several too, and memory whose contents help nobody."""
    engine.BLOCK, forms.WARP_BYTES = 256, 16
    tunings.TUNINGS = tunings.Tunings(*(tuning._replace(emit_block=128) for tuning in tunings.TUNINGS))
    forms.MIN_PARTS = 1  # there are no warps that could go different ways
    engine_call.WARP = 4  # so that lanes have several parts each
    held.WARP = triton.language.constexpr(1)  # likewise
    engine.launch = launch_and_hold
    stages.GROUP_BLOCKS = 4  # so that rows which take several launches are read in two groups
    engine.resident_programs = lambda *_: 5  # so few that one of two programs goes through two of three blocks
    memory._taken = poisoned


def launch_and_hold(launches: tuple[Any, ...], tensors: tuple[Any, ...], numbers: tuple[int, ...]) -> None:
    """Launch a call's stages, and the last one twice if its programs hold their weights.

    Interpreted, programs run one after the other, so all but the last one leave. The second time every sum is there,
    and each has to write the token that the draw gives it. Nor does any wait for its request's stop, so look for that.
    """
    for stage in launches[:-1]:
        launching.dispatch(stage, tensors, numbers)
    last = launches[-1]
    call = last.key.call
    given = dict(zip(kernels.verify_kernel.arg_names, [*tensors, *numbers], strict=False))
    num_requests, most = given["num_requests"], given["max_num_draft_tokens"]
    settled = given["counters_ptr"][num_counts.fn(num_requests, most).value :].view(torch.int64)[:num_requests].clone()
    changed = [given[name] for name in ("offsets_ptr", "totals_ptr") if given[name] is not None]
    before = [tensor.clone() for tensor in changed]
    launching.dispatch(last, tensors, numbers)
    if call.settles:
        results = (settled, given["num_accepted_ptr"], given["status_ptr"])
        for word, stop, status in zip(*(result.tolist() for result in results), strict=True):
            accepted, rejected = word & (1 << 32) - 1, word >> 32
            first = ~accepted & (accepted + 1)
            if most >= counters.MAX_SETTLED.value:
                assert word == 0
            elif status != Status.INVALID_COUNT:  # whose rows nobody reads, nor waits for
                assert rejected & first, "its programs would wait for ever"
                assert first == 1 << stop or status != Status.OK
    if call.draws_held:
        programs, *others = last.grid
        tokens = given["token_ids_ptr"]
        drawn = tokens.clone()
        tokens.fill_(-7)
        for tensor, value in zip(changed, before, strict=True):
            tensor.copy_(value)
        sizes = ("num_positions", "num_tokens", "num_requests", "num_blocks", "num_emit_blocks")
        layout = layout_of.fn(*(given[name] for name in sizes), call)
        marks = layout.partials + given["num_programs"] + layout.partial_words * torch.arange(given["num_requests"])
        given["workspace_ptr"][marks] = 0
        launching.dispatch(last._replace(grid=(programs - 1, *others)), tensors, numbers)
        wrong = (tokens != -7) & (tokens != drawn)
        assert not wrong.any(), f"programs that hold their weights drew {tokens}, the last one {drawn}"
        launching.dispatch(last, tensors, numbers)
        assert torch.equal(tokens, drawn), f"together with the last one they drew {tokens}, which drew {drawn}"


def shrink_further() -> None:
    """Have rows of several blocks, not all of which fit into a tile, nor all of their runs into lists."""
    engine.BLOCK, engine.TILE = 64, 2
    records.HELD = min_p.HELD = triton.language.constexpr(4)


def poisoned(place: memory.Place, num_counters: int, num_words: int) -> memory.Lent:
    """Return memory whose words are anything, every other NaN, and no counts."""
    device = place[0]
    workspace = Workspace.allocate(num_counters, num_words, device)
    LENT.append(workspace.counters)
    workspace.words.random_(generator=torch.Generator(device).manual_seed(num_words.bit_length()))
    workspace.words[::2] = -1
    return memory.Lent(workspace, place)


def codes(
    strategy: AcceptanceStrategy, target: str, arguments: dict[str, object]
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Yield what every stage of a call is compiled for, and its code."""
    launched: list[tuple[object, ...]] = []
    with mock.patch.object(engine, "launch", each(lambda *launch: launched.append(launch))):
        run(engine.verify, strategy, arguments)
    names = kernels.verify_kernel.arg_names
    annotated = [parameter.annotation_type or "i32" for parameter in kernels.verify_kernel.params]
    for (*key, _), _, warps, _, values in launched:
        assert isinstance(values, tuple)
        typed = [values[0] if v is None else v for v in values]  # as `launch` has it compiled
        kinds = zip(typed, annotated, strict=False)  # constants follow
        signature = [KINDS[v.dtype] if isinstance(v, torch.Tensor) else kind for v, kind in kinds]
        overlap = target == EVERYTHING  # where kernels may start before the one that they depend on ends
        call, *others = key
        # Interpreted, no thread waits by itself, nor on AMD.
        call = dataclasses.replace(call, spins=TARGETS[target][0] == "cuda", overlaps=overlap)
        constants = (call, *others, overlap)
        positions = {(len(values) + index,): value for index, value in enumerate(constants)}
        source = ASTSource(
            fn=kernels.verify_kernel,
            signature=dict(zip(names, [*signature, *["constexpr"] * len(constants)], strict=True)),
            constexprs=positions,
        )
        options = {"enable_fp_fusion": False, "num_warps": warps}
        yield constants, triton.compile(source, target=GPUTarget(*TARGETS[target]), options=options).asm


def compile_only(strategy: AcceptanceStrategy, target: str, arguments: dict[str, object]) -> str:
    """Return an empty string if every stage of a call compiles to a binary, and waits for what comes before it."""
    problems = []
    stage = None
    for (call, stage, _, first, _, overlap), asm in codes(strategy, target, arguments):
        problems += [] if {"cubin", "hsaco"} & asm.keys() else [f"{stage}: no binary in {sorted(asm)}"]
        spins = [word for word in ("WAIT", "LOOK") if f"bra {word}" in asm.get("ptx", "")]
        wanted = []
        if stage == "emit" and ((call.spins and call.awaits) or (overlap and call.settles)):
            wanted = ["LOOK" if call.holds else "WAIT"]
        problems += [] if spins == wanted else [f"{stage}: threads wait by themselves in {spins}, not in {wanted}"]
        waits = asm.get("ptx", "").count("griddepcontrol.wait")
        problems += [] if bool(waits) == (overlap and not first) else [f"{stage}: waits {waits} times"]
        if call.settles and overlap:  # what is settled is seen behind what it was found from, and cleared after the end
            both = 2  # for many positions, and before counters are cleared
            if stage == "emit" and not (waits == both and "ld.acquire.gpu.global.b64" in asm["ptx"]):
                problems.append(f"{stage}: does not wait for a request alone, or for all before it clears")
            if stage == "reduce" and not call.selects and "gpu.release.or.b64" not in asm["ptx"]:
                problems.append(f"{stage}: says what is settled before what it was found from")
    return "; ".join(problems) if stage else "nothing was launched"


def interpreted() -> list[tuple[str, str]]:
    """Return the mode and the name of every case that is interpreted: a mode a shape, to run side by side."""
    return [
        (f"interpreted:{shape}", f"{name}-{call}")
        for shape, sizes in SHAPES.items()
        for call in calls(sizes)
        for name in strategies()
        if goes_through(name, sizes, call)
    ]


def compiled() -> list[tuple[str, str]]:
    """Return the mode and the name of every case that is compiled: modes of some cases each, to run side by side."""
    return [
        (f"{target}:{group}", label) for target in TARGETS for group in GROUPS for label in compile_of(target, group)
    ]


def goes_through(name: str, shape: tuple[int, int, int], call: str) -> bool:
    """Return whether a strategy goes through a call when interpreted."""
    if shape == FILTERED_SHAPE:
        return name == "rejection" or name in FILTERED.get(call, ())
    if shape == MAX_SETTLED:
        return name == "rejection"
    if shape[1] > SLOW_LENGTH and name in SLOW:
        return False
    if name == "wild" and shape[1] != len(Wild().options.factors):
        return False
    if shape == ONE_BLOCK:
        return call in ONCE or (call in SPECIAL and name in {"rejection", "typical"})
    more = {
        "bad-entry": SUMS,
        "bad-entry-below-0": SUMS,
        "passed": APART + MASSES,
        "wide-draft": WIDE,
        "cut-short": LENGTHS,
        "logits": UNDRAWN,
    }
    more |= dict.fromkeys(("by-mass", "every-length", "last-entry", "many", "outside", "outside-one-hot"), MASSES)
    more |= {"outside-logits": FOUND_WITH_STOPS + WINDOWS} | dict.fromkeys(("forgiven", "logits-placeholders"), WINDOWS)
    more |= dict.fromkeys(("bad-draft-mass", "bad-entry-of-draft"), CARELESS) | {"undrafted": WINDOWS}
    return name == "rejection" or call in CORE or name in more.get(call, ())


def compile_of(target: str, group: str) -> dict[str, tuple[str, str, tunings.Sizes]]:
    """Return what is compiled for a target: strategies, calls and sizes by the case's name."""
    everything = target == EVERYTHING
    if group in COMPILED:
        names = strategies() if everything and group == "ragged-logits" else ELSEWHERE
        return {f"{name}-{group}": (name, group, EVERY_SIZE[0]) for name in names}
    too, more, large = COMPILED_TOO, COMPILED_MORE, COMPILED_LARGE
    if not everything:
        too, more, large = too[:1], (), large[:1]
    small = [*(("cautious", call) for call in too), *COMPILED_FILTERED, *more]
    found = {f"{name}-{call}": (name, call, EVERY_SIZE[0]) for name, call in small}
    found |= {f"{name}-{call}-large": (name, call, EVERY_SIZE[-1]) for name, call in large}
    if everything:
        found["rejection-logits-small"] = ("rejection", "logits", MORE)
        found |= {f"{name}-logits-smaller": (name, "logits", tunings.Sizes()) for name in MASSES}
    return found


def run_apart(mode: str, path: Path, script: str = __file__) -> dict[str, str]:
    """Run this script, or one like it, in a process of its own, once for all workers; return what is wrong by case."""
    with FileLock(f"{path}.lock"):
        if not path.exists():
            environment = {**os.environ, "TRITON_INTERPRET": str(int(mode.startswith("interpreted")))}
            environment["PYTHONPATH"] = os.pathsep.join(sys.path)
            subprocess.run([sys.executable, script, mode, path], check=True, env=environment)  # noqa: S603 - ourselves
        return json.loads(path.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def main(mode: str, path: str) -> None:
    """Run every case of a mode."""
    torch.set_num_threads(1)
    results = {}
    kind, _, shape = mode.partition(":")
    if kind == "interpreted":
        quick_interpreter.install()
        shrink()
        sizes = SHAPES[shape]
        if sizes == FILTERED_SHAPE:
            shrink_further()
        for call, arguments in calls(sizes).items():
            engine_call.MAX_LISTED = 16  # entries: of some rows more are listed
            for name, strategy in strategies().items():
                if goes_through(name, sizes, call):
                    # A medium batch has little that a small or a large one has not.
                    thorough = sizes == ONE_BLOCK or (name == "rejection" and call in MEDIUM)
                    some = EVERY_SIZE if thorough else EVERY_SIZE[::2]
                    if name == "rejection" and call in (*MEDIUM, *MANY):
                        some = (*some, MORE)
                    results[f"{name}-{call}"] = compare(strategy, arguments, some)
    else:
        given, found = calls(SHAPES["B3-K3-V50"]) | calls(FILTERED_SHAPE), strategies()
        forms.MIN_PARTS = 1  # what longer rows have compiles too
        target, _, group = mode.rpartition(":")
        for label, (name, call, tunings.SIZES) in compile_of(target, group).items():
            results[label] = compile_only(found[name], target, given[call])
    Path(path).write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
