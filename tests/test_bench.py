"""Benchmarks: workloads are what they say, the gate refuses wrong results, and the command tells all of it."""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import math
import os
import platform
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import pydantic
import pytest
import torch
from typer.testing import CliRunner

import acceptlib
from acceptlib import AcceptanceStrategy, Status, Traits, plots, registry, rule
from acceptlib.benchmarks import environment as environments
from acceptlib.benchmarks import gate, measure, timing, workloads
from acceptlib.benchmarks.measure import Row
from acceptlib.benchmarks.peers import PEERS, Peer, vllm
from acceptlib.benchmarks.workloads import ALPHA, Batch, Workload
from acceptlib.cli import bench
from acceptlib.cli.app import app
from acceptlib.errors import InputError, StatusError
from acceptlib.exact import oracle
from acceptlib.strategies.block import Block
from acceptlib.strategies.greedy import Greedy
from acceptlib.strategies.lenience import Lenience
from acceptlib.strategies.rejection import Rejection
from acceptlib.strategies.typical import Typical

if TYPE_CHECKING:
    from collections.abc import Callable

    from acceptlib.ops import Value

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")
SMALL = Workload(num_requests=3, num_draft_tokens=3, vocab_size=1200)
FILTERED = replace(SMALL, temperature=0.7, top_k=50, top_p=0.9)


def run(*arguments: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == code, result.output
    return result


TINY = ["--shapes", "1x2", "--vocab-size", "500", "--inputs", "probs", "--peers", "none"]


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "SECONDS", 0.0)


def overlap(batch: Batch) -> float:
    """Return the mean probability that rejection sampling accepts a drafted token."""
    assert batch.draft is not None
    return float(torch.minimum(batch.target[:, :-1], batch.draft).sum(-1).mean())


class TestWorkloads:
    @pytest.mark.parametrize("level", ALPHA)
    def test_synthetic_rows_are_accepted_as_stated(self, level: Any) -> None:
        workload = Workload(num_requests=4, vocab_size=32000, kind="probs", acceptance=level)
        assert overlap(workloads.make(workload)) == pytest.approx(ALPHA[level], abs=0.05)

    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    def test_one_hot_drafts_are_accepted_as_stated(self, temperature: float) -> None:
        batch = workloads.make(replace(SMALL, kind="one-hot", acceptance="high", temperature=temperature))
        chances = (batch.target[:, :-1] / temperature).softmax(-1).gather(-1, batch.draft_token_ids[..., None])
        assert torch.allclose(chances, torch.tensor(ALPHA["high"]), atol=1e-5)
        processing = {"sampling"} if temperature != 1 else set()
        assert batch.arguments(Rejection()).keys() == {"target_logits"} | processing

    def test_rows_of_the_pair_are_ordered_by_acceptance(self) -> None:
        levels = [
            overlap(workloads.make(Workload(num_requests=4, num_draft_tokens=3, vocab_size=3072, kind="probs",
                                            acceptance=level, source="pair")))
            for level in ("low", "medium", "high")
        ]  # fmt: skip
        assert levels == sorted(levels)
        padded = workloads.make(Workload(num_draft_tokens=3, vocab_size=4000, kind="probs", source="pair"))
        assert float(padded.target[..., 3072:].sum()) < 1e-3
        with pytest.raises(InputError, match="3072"):
            workloads.make(Workload(num_draft_tokens=3, vocab_size=100, source="pair"))

    @pytest.mark.parametrize("name", ["kind", "dtype", "acceptance", "source"])
    def test_a_word_that_says_nothing_is_refused(self, name: str) -> None:
        with pytest.raises(InputError, match=f"{name}: expected '.*', got 'more'"):
            replace(SMALL, **{name: "more"})

    @pytest.mark.parametrize("kind", ["logits", "probs", "one-hot"])
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_equal_arguments_make_equal_rows(self, kind: Any, dtype: str) -> None:
        workload = replace(SMALL, kind=kind, dtype=dtype)
        first, again, other = (workloads.make(workload, seed=seed) for seed in (0, 0, 1))
        assert torch.equal(first.target, again.target)
        assert torch.equal(first.draft_token_ids, again.draft_token_ids)
        assert not torch.equal(first.target, other.target)
        assert str(first.target.dtype) == f"torch.{dtype}"

    def test_counts(self) -> None:
        assert workloads.make(replace(SMALL, counts=True)).out.num_passed is not None
        assert workloads.make(SMALL).out.num_passed is None

    def test_name(self) -> None:
        assert str(Workload()) == "B1-K5-V128256-float32-logits-medium"
        assert str(Workload(temperature=0.7, source="pair")) == "B1-K5-V128256-float32-logits-T0.7-medium-pair"
        assert Workload(kind="one-hot", temperature=0.7).path == "logits, one-hot draft, T = 0.7"
        assert Workload(top_k=5, filters_draft=False).path == "logits, top-k 5, drafts unfiltered"
        assert Workload(kind="probs", counts=True).path == "probabilities, counted"

    @pytest.mark.parametrize("num_requests", [1, 2, 5])
    def test_other_seeds_take_other_steps_of_the_pair(self, num_requests: int) -> None:
        workload = replace(
            SMALL, num_requests=num_requests, num_draft_tokens=4, vocab_size=3072, source="pair", acceptance="high"
        )
        found = [workloads.make(workload, seed=seed).draft_token_ids.tolist() for seed in range(3)]
        assert len({str(ids) for some in found for ids in some}) == 3 * num_requests

    def test_drafts_that_the_pair_has_no_steps_of(self) -> None:
        with pytest.raises(InputError, match=r"num_draft_tokens: expected so few .* got 40, of which they have 0"):
            workloads.make(Workload(num_draft_tokens=40, vocab_size=3072, source="pair"))

    @pytest.mark.parametrize("filters_draft", [True, False])
    def test_filters_of_drafts(self, *, filters_draft: bool) -> None:
        """They are the draft's too unless it says otherwise; then it keeps its temperature."""
        batch = workloads.make(replace(FILTERED, filters_draft=filters_draft))
        assert batch.draft is not None
        for request in range(3):
            p, q = batch.probabilities(request)
            assert q is not None
            assert int((p > 0).sum(1).max()) <= 50
            assert (q[:, batch.draft_token_ids[request]].diagonal() > 0).all()
            plain = (batch.draft[request] / 0.7).softmax(-1)
            assert torch.allclose(q, plain, rtol=1e-5) == (not filters_draft)

    def test_a_mask_forbids_what_is_unlikely_and_not_drafted(self) -> None:
        batch = workloads.make(replace(SMALL, temperature=10.0, masked=True))
        unlikely, ids = batch.target < batch.target.mean(-1, keepdim=True), batch.draft_token_ids[..., None]
        assert unlikely[:, :-1].gather(-1, ids).any()  # so hot that unlikely ones are drafted
        unlikely[:, :-1].scatter_(-1, ids, value=False)
        for request in range(3):
            p, q = batch.probabilities(request)
            assert torch.equal(p > 0, ~unlikely[request])
            assert q is not None
            assert (q > 0).all()  # the mask is the target's
        assert gate.check(Rejection(), batch) is True

    def test_other_seeds_have_other_streams(self) -> None:
        streams = [workloads.make(SMALL, seed=seed).rng.seeds.tolist() for seed in range(3)]
        assert len({seed for seeds in streams for seed in seeds}) == 9

    @pytest.mark.parametrize(
        "wrong",
        [
            {"num_requests": 0},
            {"vocab_size": 1},
            {"temperature": -1.0},
            {"kind": "probs", "temperature": 0.5},
            {"kind": "probs", "masked": True},
            {"temperature": 0.5, "filters_draft": False},
            {"kind": "one-hot", "top_k": 5, "filters_draft": False},
        ],
    )
    def test_wrong_values(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(InputError, match="expected"):
            Workload(**wrong)


class TestGate:
    @pytest.mark.parametrize("name", acceptlib.available())
    @pytest.mark.parametrize(
        "workload",
        [SMALL, replace(SMALL, kind="probs"), replace(SMALL, temperature=0.7), replace(FILTERED, filters_draft=False)],
        ids=str,
    )
    def test_right_results_pass(self, name: str, workload: Workload) -> None:
        assert gate.check(acceptlib.create(name), workloads.make(workload)) is True

    def test_a_checked_batch_is_as_it_was(self) -> None:
        """So what is measured afterwards does not depend on how often a batch was checked."""
        batch = workloads.make(SMALL)
        before = batch.rng.offsets.clone()
        gate.check(Rejection(), batch)
        assert torch.equal(batch.rng.offsets, before)

    def test_a_request_without_a_law_is_not_timed(self) -> None:
        """However well formed its tokens are."""

        class Unlawful(AcceptanceStrategy):
            name = "unlawful"
            traits = Traits(guarantee="lossy", bound="none")

            def verify(self, draft_token_ids: torch.Tensor, **arguments: Any) -> Any:  # type: ignore[override]
                result = Rejection().verify(draft_token_ids, **arguments)
                result.status[1] = Status.INVALID_ROW
                return result

        with pytest.raises(StatusError, match="request 1"):
            gate.check(Unlawful(), workloads.make(SMALL))
        (row,) = measure.run(SMALL, {"unlawful": Unlawful}, [], CPU)
        assert row.error is not None
        assert row.error.startswith("StatusError: request 1")
        assert (row.match, row.microseconds) == (None, None)

    def test_a_plugin_is_checked_against_its_rules(self) -> None:
        """Outside the package, the oracle knows no rule; the exact evaluation stands in."""
        for base in (Rejection, Greedy, Typical, Block):
            plugin = type("Plugin", (base,), {"__doc__": base.__doc__, "name": "plugin", "aliases": ()})
            assert not plugin.__module__.startswith("acceptlib.strategies")
            for kind in ("probs", "logits", "one-hot"):
                assert gate.check(plugin(), workloads.make(replace(SMALL, kind=kind))) is True

    def test_a_plugin_with_the_name_of_a_rule_is_checked_against_its_own(self) -> None:
        class Other(Lenience):
            name = "rejection"

        batch = workloads.make(replace(SMALL, num_requests=16, kind="probs"))
        assert gate.check(Other(lenience=0.2), batch) is True

    def test_where_both_engines_agree_some_requests_are_compared(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[int] = []
        monkeypatch.setattr(gate, "_check_request", lambda _strategy, _batch, request, *_: seen.append(request))
        gate.check(Rejection(), workloads.make(replace(SMALL, num_requests=7)))
        assert seen == [0, 3, 6]

    def test_state_of_new_requests_is_given(self) -> None:
        """A strategy with per-request state is measured like any other."""

        class Budget(Rejection):
            name = "budget"
            aliases = ()
            traits = acceptlib.Traits(guarantee="lossy", bound="none", state=("budget",))

            def initial_state(self, num_requests: int, device: Any) -> dict[str, torch.Tensor]:
                return {"budget": torch.full((num_requests,), 2.0, device=device)}

            @acceptlib.rule
            def accept(target_prob: Value, draft_prob: Value, budget: Value) -> Value:
                h = acceptlib.ops.ratio(target_prob, budget * draft_prob)
                return acceptlib.ops.minimum(h, 1.0)

        (row,) = measure.run(SMALL, {"budget": Budget}, [], CPU)
        assert (row.error, row.match, row.backend) == (None, True, "torch")

    @pytest.mark.parametrize("field", ["output_token_ids", "num_accepted"])
    @pytest.mark.parametrize("base", [Rejection, type("Plugin", (Rejection,), {"name": "plugin", "aliases": ()})])
    def test_wrong_results_do_not(self, field: str, base: Any) -> None:
        """One request of the batch, and not one of those that every check looks at."""

        class Wrong(base):
            name = "wrong"
            aliases = ()

            def __init__(self, **options: Any) -> None:
                super().__init__(**options)
                self.plan = Rejection().plan  # a strategy with a `verify` of its own has none

            def verify(self, draft_token_ids: torch.Tensor, **arguments: Any) -> Any:
                result = super().verify(draft_token_ids, **arguments)
                if self.backend != "torch":
                    if field == "num_accepted":
                        result.num_accepted[1] = (int(result.num_accepted[1]) + 1) % 3
                    else:
                        result.output_token_ids[1, int(result.num_accepted[1])] ^= 1
                return result

        batch = workloads.make(Workload(num_requests=7, num_draft_tokens=3, vocab_size=1200, kind="probs"))
        with pytest.raises(gate.MismatchError, match="request 1"):
            gate.check(Wrong(), batch)

    def test_a_wrong_engine_does_not(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What both engines get wrong alike shows beside the oracle."""

        class Eager(Rejection):
            """Accept with probability 1 - (1 - h)^2."""

            name = "rejection"

            @acceptlib.rule
            def accept(target_prob: Value, draft_prob: Value) -> Value:
                h = acceptlib.ops.minimum(acceptlib.ops.ratio(target_prob, draft_prob), 1.0)
                return 1.0 - (1.0 - h) * (1.0 - h)

        Eager.__module__ = "acceptlib.strategies.rejection"
        batch = workloads.make(Workload(num_requests=64, num_draft_tokens=3, vocab_size=1200, kind="probs"))
        batch.rng.seeds.zero_()  # the oracle looks at three requests: let all have the numbers that decide
        seed = next(seed for seed in range(64) if self._differs(Eager(), batch, seed))
        batch.rng.seeds.fill_(seed)
        with pytest.raises(gate.MismatchError, match="oracle"):
            gate.check(Eager(), batch)
        monkeypatch.setattr(gate, "_is_rounding", lambda *_: True)  # which there is none of from equal probabilities
        with pytest.raises(gate.MismatchError, match="oracle"):
            gate.check(Eager(), batch)

    def test_a_token_without_weight_is_no_rounding(self) -> None:
        """However close to its edge the draw's number is, as here to that of all three tokens."""
        weights = torch.tensor([0.5, 0.0, 0.5])
        chain = oracle.Chain([], oracle.first_rejection, lambda _tau: weights, weights)
        found = [gate._is_rounding(chain, [], 0, weights, weights, token, 1 << 63) for token in range(3)]
        assert found == [True, False, True]

    def test_only_the_edge_of_a_decision_is_rounding(self) -> None:
        """And of a draw, on either side."""
        weights = torch.tensor([0.25, 0.5, 0.25])
        chain = oracle.Chain([0.5], oracle.first_rejection, lambda _tau: weights, weights)

        def rounds(u: float, tau: int, token: int = 1, drawn: float = 0.5) -> bool:
            return gate._is_rounding(chain, [u], tau, weights, weights, token, int(drawn * 2**64))

        numbers = (0.5 - 1e-4, 0.5 - 1e-6, 0.5 + 1e-6, 0.5 + 1e-4)
        assert [rounds(u, 0) for u in numbers] == [False, True, True, True]
        assert [rounds(u, 1) for u in numbers] == [True, True, True, False]
        draws = (0.25 - 1e-4, 0.25 - 1e-6, 0.75 + 1e-6, 0.75 + 1e-4)
        assert [rounds(0.4, 1, drawn=drawn) for drawn in draws] == [False, True, True, False]
        assert [rounds(0.4, 1, token, drawn=0.1 - 1) for token in range(3)] == [True, False, False]  # of an int64

    def test_without_weights_the_draw_is_from_the_targets_row(self) -> None:
        weights, p = torch.zeros(3), torch.tensor([0.25, 0.5, 0.25])
        chain = oracle.Chain([], oracle.first_rejection, lambda _tau: weights, weights)
        found = [gate._is_rounding(chain, [], 0, weights, p, token, 1 << 63) for token in range(3)]
        assert found == [False, True, False]

    @staticmethod
    def _differs(strategy: Any, batch: Batch, seed: int) -> bool:
        def accepted(subject: Any) -> int:
            rng = acceptlib.Rng(seeds=torch.full_like(batch.rng.seeds, seed), offsets=torch.zeros_like(batch.rng.seeds))
            return int(subject.verify(batch.draft_token_ids, **batch.arguments(subject), rng=rng).num_accepted[0])

        return accepted(strategy) != accepted(Rejection())

    def test_form(self) -> None:
        batch = workloads.make(SMALL)
        tokens = torch.nn.functional.pad(batch.draft_token_ids, (0, 1))
        gate.form(batch, tokens, torch.full((3,), 3))
        for wrong, count in ((tokens, 1), (tokens + 1, 3), (tokens, 2)):
            broken = wrong.clone()
            broken[:, count] = SMALL.vocab_size
            with pytest.raises(gate.MismatchError, match="request 0"):
                gate.form(batch, broken, torch.full((3,), count))
        for place, token in ((3, -1), (1, int(tokens[0, 1]) ^ 1)):  # no token, and another than the drafted one
            broken = tokens.clone()
            broken[0, place] = token
            with pytest.raises(gate.MismatchError, match="request 0: expected 3 drafted tokens"):
                gate.form(batch, broken, torch.full((3,), 3))
        for count in (-1, 4):  # as of a library that emitted nothing, or more than there is room for
            with pytest.raises(gate.MismatchError, match=f"request 0: expected {count} drafted tokens"):
                gate.form(batch, tokens, torch.full((3,), count))


class TestMeasuring:
    def test_what_has_to_be_read(self) -> None:
        def reads(name: str, kind: Any) -> tuple[int, int]:
            found = timing.Reads.of(acceptlib.create(name), workloads.make(replace(SMALL, kind=kind)))
            return found.target, found.draft

        assert reads("rejection", "logits") == (4, 3)
        assert reads("rejection", "one-hot") == (4, 0)
        assert reads("rejection", "probs") == (1, 1)
        assert reads("synthetic", "probs") == reads("synthetic", "logits") == (1, 0)
        assert reads("greedy", "logits") == (4, 0)
        assert reads("greedy", "probs") == (4, 0)
        assert reads("typical", "probs") == (4, 0)
        assert reads("block", "probs") == (4, 3)
        batch = workloads.make(replace(SMALL, kind="probs", dtype="bfloat16"))
        assert timing.Reads(1, 1).bytes(batch) == 2 * 3 * 1200 * 2

    @pytest.mark.parametrize(
        "name",
        [
            "target_max_prob",
            "draft_max_prob",
            "is_target_argmax",
            "target_entropy",
            "target_top_entropy",
            "next_residual_mass",
        ],
    )
    def test_what_is_found_of_whole_rows_has_every_row_read(self, name: str) -> None:
        """From probabilities too; entries of drafted tokens alone have not."""
        batch = workloads.make(replace(SMALL, kind="probs"))
        for reads, expected in (({"target_prob", name}, (4, 3)), ({"target_prob", "draft_prob"}, (1, 1))):
            plan = SimpleNamespace(reads=reads, reads_draft=True, used_row_sums={})
            found = timing.Reads.of(SimpleNamespace(plan=plan), batch)  # type: ignore[arg-type]
            assert (found.target, found.draft) == expected

    def test_the_floor_reads_every_batch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As the calls do, so that a cache spares neither."""
        monkeypatch.setattr(timing.Reads, "floor", lambda _, batch: batch)
        batches = [workloads.make(SMALL, seed=seed) for seed in (0, 1)]
        _, floor = measure.examine(Row.of(SMALL, "rejection"), Rejection(), batches)
        assert [*map(id, floor)] == [*map(id, batches)]

    @pytest.mark.parametrize(("target", "draft"), [(4, 3), (1, 1), (4, 0)])
    def test_the_floor_sums_what_has_to_be_read(self, target: int, draft: int) -> None:
        batch = workloads.make(replace(SMALL, kind="probs"))
        assert batch.draft is not None
        sums = timing.Reads(target, draft).floor(batch)()
        expected = [batch.target[:, :target].sum(-1), *([batch.draft[:, :draft].sum(-1)] if draft else [])]
        assert len(sums) == len(expected)
        assert all(torch.equal(found, rows) for found, rows in zip(sums, expected, strict=True))

    def test_the_floor_of_a_gpu_takes_every_block_of_a_row(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of rows that lie apart, too; the last block is a part."""
        pytest.importorskip("triton", minversion="3.6")
        from acceptlib.benchmarks import floor  # noqa: PLC0415 - Triton is slow to import

        kernel = mock.MagicMock()
        monkeypatch.setattr(floor, "sum_blocks", kernel)
        rows = torch.empty(3, 5, 2 * floor.BLOCK + 1, device="meta")[:, :2]
        floor.read(rows)()
        kernel.__getitem__.assert_called_once_with((3, 2, 3))
        (given, sums, *numbers), constants = kernel.__getitem__.return_value.call_args
        assert given is rows
        assert (sums.shape, sums.dtype) == ((3, 2, 3), torch.float32)
        assert numbers == [5 * rows.shape[2], rows.shape[2], rows.shape[2]]
        assert constants["BLOCK"] == floor.BLOCK

    def test_the_floor_of_a_gpu_is_the_sum_of_each_block(self) -> None:
        """By Triton's interpreter, in a process of its own: it must be known before the kernel is."""
        pytest.importorskip("triton", minversion="3.6")
        code = """
import inspect
import torch
from acceptlib.benchmarks import floor
size = 2 * floor.BLOCK + 1
rows = torch.randint(1, 9, (2, 5, size), generator=torch.Generator().manual_seed(0)).float()[:, 1:3]
call = floor.read(rows)
call()
blocks = torch.nn.functional.pad(rows, (0, 3 * floor.BLOCK - size)).unflatten(-1, (3, floor.BLOCK))
assert torch.equal(inspect.getclosurevars(call).nonlocals["sums"], blocks.sum(-1))
"""
        environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(  # noqa: S603 - our own interpreter
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr

    @pytest.mark.parametrize("kind", [RuntimeError, SystemExit])
    def test_rows(self, kind: type[BaseException]) -> None:
        """Strategies, one that raises, and a peer: each has its row."""

        def broken() -> Any:
            msg = "no such thing"
            raise kind(msg)

        strategies: dict[str, Callable[[], Any]] = {"rejection": Rejection, "broken": broken}
        one = replace(SMALL, num_requests=1)
        ours, failed, peer = measure.run(one, strategies, [PEERS["transformers"], PEERS["vllm"]], CPU)
        assert (ours.name, ours.backend, ours.match, ours.rows_read) == ("rejection", "torch", True, 7)
        assert ours.microseconds
        assert ours.read_floor
        assert ours.share_of_floor == ours.read_floor / ours.microseconds
        assert replace(ours, microseconds=None).share_of_floor is None
        assert replace(ours, read_floor=None).share_of_floor is None
        assert 1 <= (ours.mean_emitted or 0) <= 4
        assert failed.error == f"{kind.__name__}: no such thing"
        assert failed.microseconds is None
        assert (peer.name, peer.peer, peer.match, peer.read_floor) == ("transformers", True, None, None)
        assert peer.microseconds
        (failed,) = measure.run(one, {}, [replace(PEERS["transformers"], bind=lambda _: broken())], CPU)
        assert failed.error == f"{kind.__name__}: no such thing"

    def test_calls_are_those_of_an_engine(self) -> None:
        """In place, in memory that is allocated once, with streams that advance from call to call."""
        batch = workloads.make(SMALL)
        call = measure.step(Rejection(), batch)
        with mock.patch.object(Rejection, "verify") as verify:
            call()
            call()
        (first, second) = (given.kwargs for given in verify.call_args_list)
        for given in (first, second):
            assert given["rng"] is batch.rng
            assert given["out"] is batch.out
        assert isinstance(first["workspace"], acceptlib.Workspace)
        assert second["workspace"] is first["workspace"]

    def test_to_ask_for_the_engine_draws_no_number(self) -> None:
        """Whatever torch's own generator is used for goes on as before."""
        before = torch.get_rng_state()
        assert measure.backend_of(Rejection(), workloads.make(SMALL)) == "torch"
        assert torch.equal(torch.get_rng_state(), before)

    def test_own_verify_may_read_everything(self) -> None:
        """So does a sum over rows, from probabilities too."""

        class Whole(AcceptanceStrategy):
            name = "whole"
            traits = Traits(guarantee="lossy", bound="none")

            def verify(self, *_: Any, **__: Any) -> Any:  # type: ignore[override]
                raise NotImplementedError  # it is asked what it reads, not run

        class Summed(Rejection):
            name = "summed"
            aliases = ()

            @acceptlib.row_sum
            def squares(p: Value) -> Value:
                return p * p

            @rule
            def accept(squares: Value) -> Value:
                return squares

        batch = workloads.make(replace(SMALL, kind="probs"))
        assert {timing.Reads.of(strategy, batch) for strategy in (Whole(), Summed())} == {timing.Reads(4, 3)}
        assert measure.backend_of(Whole(), batch) == ""  # no engine runs it

    def test_calls_are_timed_as_the_engine_allows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """In graphs if it never waits for the device; so are peers' if graphs can hold them."""
        found: list[str] = []
        monkeypatch.setattr(measure, "fill_times", lambda *arguments: found.append(arguments[-1]))
        for backend in ("torch", "triton"):
            monkeypatch.setattr(measure, "backend_of", lambda *_, backend=backend: backend)
            assert [row.error for row in measure.run(SMALL, {"rejection": Rejection}, [], CPU)] == [None]
        for replays in (True, False):
            peer = Peer(label={"logits": "x"}, module="x.y", bind=accepting, devices=("cpu",), replays=replays)
            (row,) = measure.run(SMALL, {}, [peer], CPU, "queue")
            assert (row.error, row.backend, row.mean_emitted) == (None, "x", 4.0)
        assert found == ["turns", "graph", "queue", "turns"]

    @pytest.mark.parametrize(("device", "how"), [("cuda", "queue"), ("cpu", None)])
    def test_times_of_a_row(self, device: str, how: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
        """Calls on a CPU are timed in turns, however those on a GPU would be."""
        times = timing.Time(median=5.0, spread=2.0), timing.Time(median=3.0, spread=1.0)
        monkeypatch.setattr(timing, "beside", lambda *_: times)
        monkeypatch.setattr(timing, "host", lambda *_: 4.0)
        row = Row.of(SMALL, "rejection")
        measure.fill_times(row, [int], [int], torch.device(device), "queue")
        assert (row.microseconds, row.spread, row.read_floor, row.host_microseconds) == (5.0, 2.0, 3.0, 4.0)
        assert row.how == how

    def test_emitted_tokens_are_counted_in_every_call(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of 3 requests in 22 calls, or of 6 in 11 of each batch: at least 64."""
        for num_sets in (1, 2):
            numbers = itertools.count(1)
            monkeypatch.setattr(
                measure,
                "step",
                lambda _, batch: lambda: batch.out.num_emitted.fill_(next(numbers)),  # noqa: B023
            )
            monkeypatch.setattr(timing, "num_sets", lambda _: num_sets)  # noqa: B023
            batches = measure.batches_of(SMALL, CPU)
            assert len({str(batch.draft_token_ids) for batch in batches}) == num_sets
            row = Row.of(SMALL, "rejection")
            measure.examine(row, Rejection(), batches)
            assert row.mean_emitted == 11.5

    def test_peers_say_what_they_take(self) -> None:
        assert PEERS["transformers"].unsupported(SMALL, CPU) == "takes at most 1 request"
        assert PEERS["transformers"].unsupported(replace(SMALL, kind="probs"), CPU) == "takes logits, not probs"
        assert PEERS["vllm"].unsupported(SMALL, CPU) == "runs on cuda"
        given = replace(FILTERED, min_p=0.1, masked=True)
        assert PEERS["vllm"].unsupported(given, torch.device("cuda")) == "takes no bitmask, min_p"
        assert PEERS["vllm"].unsupported(FILTERED, torch.device("cuda")) is None
        assert PEERS["flashinfer"].unsupported(FILTERED, torch.device("cuda")) == "takes no top_k, top_p"
        heated = replace(SMALL, temperature=0.7)
        assert PEERS["flashinfer"].unsupported(heated, torch.device("cuda")) is None
        assert PEERS["vllm"].unsupported(replace(heated, kind="one-hot"), torch.device("cuda")) is None
        assert PEERS["transformers"].unsupported(replace(SMALL, num_requests=1), torch.device("cuda")) is None
        assert {name: peer.replays for name, peer in PEERS.items()} == {
            "flashinfer": True,
            "transformers": False,
            "vllm": True,
        }

    def test_a_peer_says_why_it_is_missing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """In one line, whatever its import raises: one of another machine's build may raise anything."""
        (tmp_path / "of_another_machine.py").write_text("raise OSError('no\\n  driver')", encoding="utf-8")
        monkeypatch.syspath_prepend(tmp_path)
        absent = Peer(label={}, module="no_such_module", bind=lambda _: (int, lambda _: _), devices=())
        assert absent.missing() == "no_such_module cannot be imported (No module named 'no_such_module')"
        broken = replace(absent, module="of_another_machine")
        assert broken.missing() == "of_another_machine cannot be imported (no driver)"
        assert replace(absent, module="json").missing() is None

    def test_transformers_gets_rows_under_the_temperature(self, monkeypatch: pytest.MonkeyPatch) -> None:
        utils = pytest.importorskip("transformers.generation.utils")
        batch = workloads.make(replace(SMALL, num_requests=1, temperature=0.5))
        assert batch.draft is not None
        given: list[torch.Tensor] = []

        def sampling(ids: torch.Tensor, draft: torch.Tensor, length: int, target: torch.Tensor, *_: Any) -> Any:
            given.extend((draft, target))
            return ids[:, -length:], torch.tensor(length - 1)

        monkeypatch.setattr(utils, "_speculative_sampling", sampling)
        call, read = PEERS["transformers"].bind(batch)
        tokens, accepted = read(call())
        assert all(
            torch.equal(rows, logits / 0.5) for rows, logits in zip(given, (batch.draft, batch.target), strict=True)
        )
        assert tokens.tolist() == [[*batch.draft_token_ids[0].tolist(), -1]]
        assert accepted.tolist() == [2]

    @pytest.mark.parametrize("earlier", [False, True])
    def test_transformers_gets_rows_as_they_are_at_temperature_1(
        self, monkeypatch: pytest.MonkeyPatch, *, earlier: bool
    ) -> None:
        """A division would be timed too. Earlier versions are told that the sequence goes on."""
        utils = pytest.importorskip("transformers.generation.utils")
        batch = workloads.make(replace(SMALL, num_requests=1))

        def now(*arguments: Any) -> Any:
            return arguments

        def before(*arguments: Any, is_done_candidate: Any = None) -> Any:  # noqa: ARG001 - what is looked for
            return arguments

        monkeypatch.setattr(utils, "_speculative_sampling", before if earlier else now)
        ids, draft, length, target, *goes_on = PEERS["transformers"].bind(batch)[0]()
        assert ids[:, -length:].equal(batch.draft_token_ids)
        assert (draft is batch.draft, target is batch.target) == (True, True)
        assert goes_on == [False] * earlier

    def test_a_peer_of_another_form_is_not_timed(self) -> None:
        def bind(batch: Batch) -> Any:
            tokens = torch.nn.functional.pad(batch.draft_token_ids + 1, (0, 1))
            return int, lambda _: (tokens, torch.tensor([3]))

        (row,) = measure.run(replace(SMALL, num_requests=1), {}, [replace(PEERS["transformers"], bind=bind)], CPU)
        assert row.error is not None
        assert row.error.startswith("MismatchError: request 0")
        assert row.microseconds is None

    def test_vllm_and_flashinfer_get_what_they_document(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Their arguments, by stand-ins that check shapes: the libraries themselves need a GPU."""
        batch = workloads.make(replace(SMALL, temperature=0.5))
        probs = workloads.make(replace(SMALL, kind="probs"))
        B, K, V = 3, 3, 1200  # noqa: N806 - the field's symbols

        def rejection_sample(target: torch.Tensor, draft: torch.Tensor, **given: Any) -> Any:
            assert target.shape == (B * (K + 1), V)
            assert batch.draft is not None
            assert torch.equal(draft, batch.draft / 0.5)
            assert torch.equal(target.view(B, K + 1, V), batch.target / 0.5)
            assert given["cu_num_logits"].tolist() == [0, 4, 8, 12]
            assert given["draft_sampled"].view(B, K + 1)[:, 1:].equal(batch.draft_token_ids)
            assert given["expanded_local_pos"].tolist() == given["pos"].tolist() == [0, 1, 2, 3] * B
            assert given["idx_mapping"].tolist() == [0, 1, 2]
            assert given["temperature"].tolist() == [1.0] * B  # the logits are divided already
            assert given["seed"] is batch.rng.seeds
            assert given["expanded_idx_mapping"].tolist() == [0] * 4 + [1] * 4 + [2] * 4
            assert given["num_speculative_steps"] == K
            return given["draft_sampled"].view(B, K + 1).roll(-1, 1), torch.full((B,), K + 1)

        def chain(q: torch.Tensor, ids: torch.Tensor, p: torch.Tensor, *counts: torch.Tensor, generator: Any) -> Any:
            assert (q.shape, p.shape) == ((B, K, V), (B, K + 1, V))
            assert ids.dtype == torch.int32
            offset = torch.tensor([0, 8]).view(torch.uint8)  # after the seed, where it goes on at the next call
            generator.set_state(offset)
            assert generator.get_state().equal(offset)
            assert torch.allclose(p.sum(-1), torch.ones(B, K + 1), atol=1e-5)
            return torch.nn.functional.pad(ids, (0, 1), value=-1), *counts

        def softmax(logits: torch.Tensor, temperature: float) -> torch.Tensor:
            assert logits.ndim == 2
            assert temperature == 0.5
            return (logits / temperature).softmax(-1)

        stand_ins = {
            "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils": SimpleNamespace(
                rejection_sample=rejection_sample
            ),
            "vllm.v1.worker.gpu.sample.gumbel": SimpleNamespace(
                apply_temperature=lambda logits, request, heat: logits.div_(heat[request.long()][:, None])
            ),
            "flashinfer.sampling": SimpleNamespace(chain_speculative_sampling=chain, softmax=softmax),
        }
        monkeypatch.setattr("acceptlib.benchmarks.peers.importlib.import_module", stand_ins.__getitem__)
        for name, rows, accepted in (("vllm", batch, 3), ("flashinfer", batch, 2), ("flashinfer", probs, 2)):
            peer = PEERS[name]
            assert peer.module in stand_ins
            assert ("softmax" in peer.label[rows.workload.kind]) == (name == "flashinfer" and rows is batch)
            call, read_result = peer.bind(rows)
            tokens, count = read_result(call())
            gate.form(rows, tokens, count)
            assert count.tolist() == [accepted] * B

    @pytest.mark.parametrize(
        ("parameters", "filters"),
        [
            ({}, None),
            ({"temperature": 0.0, "top_k": 50}, None),
            ({"top_k": 50}, (50, None)),
            ({"top_p": 0.75}, (None, 0.75)),
            ({"temperature": 0.5, "top_k": 50, "top_p": 0.75}, (50, 0.75)),
        ],
        ids=str,
    )
    def test_vllm_filters_logits_as_its_sampler_does(
        self,
        parameters: dict[str, Any],
        filters: tuple[int | None, float | None] | None,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """On a copy, and where there is nothing to do, at temperature 0 too, on the rows themselves."""
        batch = workloads.make(replace(SMALL, **parameters))
        size, rows = 3, 12
        heat = parameters.get("temperature", 1.0)
        filtered = torch.zeros(rows, 1200)
        gumbel, top, sampler = mock.Mock(), mock.Mock(), mock.Mock()
        top.apply_top_k_top_p_triton.return_value = filtered
        modules = {"gumbel": gumbel, "topk_topp_triton": top, "rejection_sampler_utils": sampler}
        monkeypatch.setattr(
            "acceptlib.benchmarks.peers.importlib.import_module", lambda name: modules[name.rpartition(".")[2]]
        )
        vllm(batch, use_block_verification=True)[0]()
        (logits, draft), given = sampler.rejection_sample.call_args
        assert given["use_block_verification"] is True
        assert given["temperature"].tolist() == [float(heat > 0)] * size
        assert batch.draft is not None
        assert draft.equal(batch.draft if heat in {0.0, 1.0} else batch.draft / heat)
        assert gumbel.apply_temperature.called == (heat == 0.5)
        assert top.apply_top_k_top_p_triton.called == (filters is not None)
        if filters is None:
            assert logits.data_ptr() == batch.target.data_ptr()
            return
        assert logits is filtered
        copied, *found = top.apply_top_k_top_p_triton.call_args.args
        assert copied.data_ptr() != batch.target.data_ptr()
        for values, number, dtype in zip(found, filters, (torch.int32, torch.float32), strict=True):
            if number is None:
                assert values is None
            else:
                assert (values.tolist(), values.dtype) == ([number] * rows, dtype)


def accepting(batch: Batch) -> Any:
    """Bind a library that accepts every drafted token."""
    tokens = torch.nn.functional.pad(batch.draft_token_ids, (0, 1))
    return lambda: None, lambda _: (tokens, torch.full((len(tokens),), tokens.shape[1] - 1))


class TestTiming:
    GPU = torch.device("cuda")

    def test_spread_is_between_the_quartiles(self) -> None:
        assert timing.Time.of([9.0, 1.0, 3.0, 2.0, 4.0]) == timing.Time(median=3.0, spread=2.0)

    @pytest.mark.parametrize(("seconds", "rounds"), [(0.0, timing.MIN_ROUNDS), (1e-3, 80), (1.0, timing.MAX_ROUNDS)])
    def test_turns(self, seconds: float, rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """For so many seconds for each of the calls: as many rounds of both as that is, within limits."""
        monkeypatch.setattr(timing, "SECONDS", seconds)
        monkeypatch.setattr(timing, "clock", lambda _: itertools.count(0, 5e-6).__next__)
        calls = [mock.Mock(), mock.Mock()]
        for time in timing.in_turns(calls, CPU):
            assert time.median == pytest.approx(5.0)
        (count,) = {call.call_count for call in calls}
        assert count - 1 == pytest.approx(rounds, rel=0.03)  # the first is not timed

    def test_each_way_to_time_calls(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Others are timed beside them in graphs, and on a CPU in turns with them."""
        for name in ("replayed", "queued"):
            monkeypatch.setattr(timing, name, lambda calls, _, name=name: (name, [call() for call in calls]))
        monkeypatch.setattr(timing, "in_turns", lambda calls, _: [("turns", call()) for call in calls])
        calls, others = [lambda: 1, lambda: 2], [lambda: 3, lambda: 4]
        for how, time in (("graph", ("replayed", [1, 2])), ("queue", ("queued", [1, 2])), ("turns", ("turns", 1))):
            assert timing.beside(calls, others, self.GPU, how) == (time, ("replayed", [3, 4]))  # type: ignore[arg-type]
            assert timing.beside(calls, [], self.GPU, how) == (time, None)  # type: ignore[arg-type]
        assert timing.beside(calls, others, CPU, "graph") == (("turns", 1), ("turns", 3))
        assert timing.beside(calls, [], CPU, "graph") == (("turns", 1), None)

    def test_host(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=itertools.count(0, 1e-3).__next__))
        monkeypatch.setattr(timing.torch.cuda, "synchronize", lambda _: None)
        assert timing.host(int, self.GPU) == pytest.approx(1e3 / timing.HOST_CALLS)
        assert timing.host(int, CPU) is None

    @pytest.mark.parametrize(("size", "draft", "number"), [(10**6, False, 50), (1_100_000, False, 46),
                                                           (10**6, True, 25), (10**8, False, 4)])  # fmt: skip
    def test_inputs_are_more_than_a_cache_holds(self, size: int, number: int, *, draft: bool) -> None:
        rows = torch.empty(size, device="meta")
        batch: Any = SimpleNamespace(device=self.GPU, target=rows, draft=rows if draft else None)
        assert timing.num_sets(batch) == number


class TestCommand:
    def test_table(self) -> None:
        text = run("rejection", "block", *TINY).stdout
        assert [line.split()[3] for line in text.splitlines()[2:4]] == ["rejection", "block"]
        assert "match: the result is the oracle's" in text
        assert "V = 500, float32" in text
        assert "Not measured" not in text

    def test_what_a_peer_does_not_run_is_said(self) -> None:
        given = ["--vocab-size", "500", "--inputs", "logits,probs", "--peers", "transformers"]
        text = run("rejection", "--shapes", "1x2,2x2", *given).stdout
        for expected in (
            "1 of 4 workloads, since it takes at most 1 request",
            "2 of 4 workloads, since it takes logits, not probs",
        ):
            assert f"Not measured: transformers in {expected}." in " ".join(text.split())
        text = run("rejection", "--shapes", "1x2", *given[:2], "--inputs", "logits", *given[-2:]).stdout
        assert "Not measured" not in text

    def test_configs_are_rows_of_their_own(self, tmp_path: Path) -> None:
        """With the backend that they name, unless the command line names one."""
        files = []
        for number, (options, backend) in enumerate([({"lenience": 0.5}, "auto"), ({}, "triton")]):
            file = tmp_path / f"{number}.json"
            config = {"strategy": "lenience", "backend": backend, "options": options}
            file.write_text(json.dumps({"acceptance": config}))
            files += ["--config", str(file)]
        rows = json.loads(run(*files, *TINY, "-f", "json", code=1).stdout)["rows"]
        assert [row["name"] for row in rows] == ["lenience lenience=0.5", "lenience"]
        assert [row["error"] is None for row in rows] == [True, False]
        assert "triton" in rows[1]["error"]
        rows = json.loads(run("greedy", *files, *TINY, "--backend", "torch", "-f", "json").stdout)["rows"]
        assert [row["name"] for row in rows] == ["greedy", "lenience lenience=0.5", "lenience"]
        assert {row["backend"] for row in rows} == {"torch"}

    def test_configs_that_differ_in_the_backend_or_nothing_are_told_apart(self, tmp_path: Path) -> None:
        files = {name: tmp_path / f"{name}.json" for name in ("auto", "torch", "again")}
        for name, file in files.items():
            backend = "torch" if name == "torch" else "auto"
            file.write_text(json.dumps({"acceptance": {"strategy": "greedy", "backend": backend}}))
        given = [argument for file in files.values() for argument in ("--config", str(file))]
        rows = json.loads(run("greedy", *given, *TINY, "-f", "json").stdout)["rows"]
        assert [row["name"] for row in rows] == [
            "greedy",
            f"greedy {files['auto']}",
            f"greedy {files['torch']}",
            f"greedy {files['again']}",
        ]
        assert [row["backend"] for row in rows] == ["torch"] * 4

    def test_rows_of_the_pair_without_transformers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "transformers.utils.logging", None)
        assert "acceptlib[hf]" in run("greedy", *TINY, "--rows", "pair", code=2).stderr

    def test_every_strategy_without_names(self) -> None:
        rows = json.loads(run(*TINY, "--format", "json").stdout)["rows"]
        assert [row["name"] for row in rows] == acceptlib.available()
        assert all(row["match"] for row in rows)

    def test_files(self, tmp_path: Path) -> None:
        """The record says machine, versions and commit; a figure is drawn of the same rows."""
        for ending in (".json", ".csv", ".md"):
            run(
                "rejection",
                *TINY,
                "--quiet",
                "--output",
                str(tmp_path / f"r{ending}"),
                "--plot",
                str(tmp_path / "f.svg"),
            )
        record = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
        assert {"machine", "acceptlib", "torch", "triton", "commit", "rows"} <= set(record)
        assert len(list(csv.reader((tmp_path / "r.csv").read_text(encoding="utf-8").splitlines()))) == 2
        assert "| rejection |" in (tmp_path / "r.md").read_text(encoding="utf-8")
        assert (tmp_path / "f.svg").read_bytes().startswith(b"<?xml")

    def test_versions_of_other_libraries_are_said_where_they_are_installed(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(environments, "_version", {"transformers": "5.0", "torch": "2.6"}.get)
        found = environments.environment(torch.device("cpu"))
        assert {name: found.get(name) for name in ("torch", *environments.OTHERS)} == {
            "torch": "2.6",
            "transformers": "5.0",
            "vllm": None,
            "flashinfer-python": None,
        }
        assert "vllm" not in found

    def test_what_is_not_installed_has_no_version(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(environments, "OTHERS", ("torch", "no-such-library"))
        found = environments.environment(CPU)
        assert found["torch"] == torch.__version__
        assert "no-such-library" not in found
        assert found["python"] == platform.python_version()

    @pytest.mark.parametrize(
        ("cpuinfo", "processor", "named"),
        [
            ("processor\t: 0\nmodel name\t: Fast: 2 GHz\nprocessor\t: 1\nmodel name\t: Slow\n", "x86", "Fast: 2 GHz"),
            ("processor\t: 0\n", "arm", "arm"),
            (None, "arm", "arm"),
            (None, "", "riscv64"),
        ],
    )
    def test_a_cpu_is_named_with_its_threads(
        self, cpuinfo: str | None, processor: str, named: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """By Linux's file where that says it, otherwise as the system calls it, or its kind."""
        read = Path.read_text

        def read_text(path: Path, **how: Any) -> str:
            if path != Path("/proc/cpuinfo"):
                return read(path, **how)
            if cpuinfo is None:
                raise FileNotFoundError(path)
            return cpuinfo

        monkeypatch.setattr(Path, "read_text", read_text)
        monkeypatch.setattr(platform, "processor", lambda: processor)
        monkeypatch.setattr(platform, "machine", lambda: "riscv64")
        monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
        monkeypatch.setattr(os, "cpu_count", lambda: 8)
        assert environments.environment(CPU)["machine"] == f"{named}, 3 of 8 cores"

    @pytest.mark.parametrize(
        ("script", "driver"), [("echo 580.1; echo 580.1", "580.1"), ("echo has failed; exit 9", None), (None, None)]
    )
    def test_a_gpu_is_named_with_its_driver(
        self, script: str | None, driver: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of several GPUs one says it; where nobody says it there is none, nor a commit without git."""
        if script is not None:
            tool = tmp_path / "nvidia-smi"
            tool.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
            tool.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU of {device}")
        found = environments.environment(torch.device("cuda:1"))
        assert (found["machine"], found["driver"], found["commit"]) == ("GPU of cuda:1", driver, None)
        assert found["cuda"] == torch.version.cuda

    def test_commit_is_that_of_the_code(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """With a mark where the code was changed, and none of a clone around an installed package."""
        for variable in [name for name in os.environ if name.startswith("GIT_")]:
            monkeypatch.delenv(variable)
        git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@x"]
        package = tmp_path / "site" / "acceptlib"
        (package / "benchmarks").mkdir(parents=True)
        (package / "__init__.py").touch()
        monkeypatch.setattr(environments, "__file__", str(package / "benchmarks" / "environment.py"))

        def commit(*command: str) -> str | None:
            subprocess.run([*git, *command], check=True, capture_output=True)  # noqa: S603 - git
            found: str | None = environments.environment(torch.device("cpu"))["commit"]
            return found

        commit("init")
        assert commit("commit", "--allow-empty", "--message", "of something else") is None
        commit("add", ".")
        made = commit("commit", "--message", "x")
        assert made is not None
        assert re.fullmatch(r"[0-9a-f]{40}", made)
        (tmp_path / "record.json").touch()
        assert commit("status") == made
        (package / "__init__.py").write_text("changed", encoding="utf-8")
        assert commit("status") == f"{made}-dirty"

    def test_failing_strategy_has_its_row(self, monkeypatch: pytest.MonkeyPatch) -> None:
        entry = replace(registry.find("rejection"), strategy=SimpleNamespace(name="broken"))
        monkeypatch.setattr(registry, "find", lambda _name: entry)
        result = run("broken", *TINY, code=1)
        assert re.search(r"failed: PluginError: .* creating it raised TypeError", " ".join(result.stdout.split()))

    def test_options_of_the_strategy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made: list[str] = []

        def note(_: Workload, strategies: dict[str, Any], *__: Any) -> list[Any]:
            made.extend(repr(make()) for make in strategies.values())
            return []

        monkeypatch.setattr(measure, "run", note)
        run("lenience", "-o", "lenience=0.25", *TINY)
        assert made == ["acceptlib.create('lenience', lenience=0.25)"]

    def test_strategies_run_on_the_engine_that_is_asked_for(self) -> None:
        made = [make() for make in bench._strategies(["rejection", "block"], [], [], "torch").values()]
        assert [(strategy.name, strategy.backend) for strategy in made] == [("rejection", "torch"), ("block", "torch")]

    def test_workloads_are_what_was_asked_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Sampling parameters are those of logits alone: probabilities beside them are processed already."""
        seen: list[Workload] = []
        monkeypatch.setattr(measure, "run", lambda workload, *_: seen.append(workload) or [])
        shape = ["--shapes", "2x3,1x4", "--vocab-size", "50", "--dtype", "bfloat16", "--acceptance", "low"]
        run("rejection", *shape, "--inputs", "probs,logits", "--top-k", "3", "--temperature", "0.5", "--peers", "none")
        common: dict[str, Any] = {"vocab_size": 50, "dtype": "bfloat16", "acceptance": "low"}
        assert seen == [
            Workload(num_requests=num_requests, num_draft_tokens=num_draft_tokens, kind=kind, **given, **common)
            for kind, given in (("probs", {}), ("logits", {"top_k": 3, "temperature": 0.5}))
            for num_requests, num_draft_tokens in ((1, 4), (2, 3))
        ]

    @pytest.mark.parametrize(
        ("error", "asked"),
        [
            (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0"), "2.50 GiB"),
            (None, "1125899906842624 bytes"),
        ],
    )
    def test_out_of_memory(self, error: Exception | None, asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: Any) -> Any:
            if error:
                raise error
            torch.empty(1 << 50, dtype=torch.int8)

        monkeypatch.setattr(measure, "run", fail)
        message = run("rejection", *TINY, code=2).stderr
        assert f"out of memory on cpu, which tried to allocate {asked}: give smaller --shapes" in message

    def test_a_workload_that_fails_leaves_finished_rows(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """What was measured before is printed, and then the error is said; what a file held before stays."""
        real = measure.batches_of

        def fail(workload: Workload, device: torch.device) -> Any:
            if workload.num_requests == 2:
                torch.empty(1 << 50, dtype=torch.int8)
            if workload.num_requests == 3:
                msg = "no such rows"
                raise InputError(msg)
            return real(workload, device)

        monkeypatch.setattr(measure, "batches_of", fail)
        path = tmp_path / "r.json"
        path.write_text("before", encoding="utf-8")
        small = ["--vocab-size", "50", "--inputs", "probs", "--peers", "none", "--output", str(path)]
        for shapes, message in (
            ("1x2,2x2", "B2-K2-V50-float32-probs-medium: out of memory"),
            ("1x2,3x2,4x1", "no such rows"),
        ):
            result = run("rejection", "--shapes", shapes, *small, "--format", "json", code=1)
            assert [(row["B"], row["K"]) for row in json.loads(result.stdout)["rows"]] == [(1, 2)]
            said = " ".join(result.stderr.split())
            assert f"after 1 row: {message}" in said
            assert "r.json not written" in said
            assert path.read_text(encoding="utf-8") == "before"

    def test_options_are_those_that_were_given(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A validator that changes a value has done so once."""

        class Percent(AcceptanceStrategy):
            """Reads an option that is given in percent."""

            name = "percent"
            traits = Traits(guarantee="lossy")

            class Options(acceptlib.Options):
                share: float = 50.0

                @pydantic.field_validator("share")
                @classmethod
                def _of_percent(cls, value: float) -> float:
                    return value / 100

            @rule
            def accept(share: Value) -> Value:
                return share

        monkeypatch.setattr(registry, "create", lambda *_, **options: Percent(**options))
        (make,) = bench._strategies(["percent"], [], ["share=40"], "torch").values()
        strategy = make()
        assert strategy.options.share == 0.4
        assert strategy.backend == "torch"
        assert strategy.with_backend("auto").options.share == 0.4

    def test_parameters_of_logits_beside_probabilities(self) -> None:
        message = run("rejection", *TINY, "--top-k", "3", code=2).stderr
        assert "--top-k, --top-p and --min-p act on logits" in message

    def test_other_errors_of_torch_are_not_taken_for_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: Any) -> Any:
            msg = "another"
            raise RuntimeError(msg)

        monkeypatch.setattr(measure, "run", fail)
        with pytest.raises(RuntimeError, match="another"):
            CliRunner().invoke(app, ["bench", "rejection", *TINY], catch_exceptions=False)

    def test_interruption_leaves_finished_rows(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        real = measure.run

        def stop(*arguments: Any) -> Any:
            yield next(real(*arguments))
            raise KeyboardInterrupt

        monkeypatch.setattr(measure, "run", stop)
        result = run("rejection", "block", *TINY, "--output", str(tmp_path / "r.json"), code=130)
        assert "rejection" in result.stdout
        assert "interrupted after 1 row; " in result.stderr
        assert not (tmp_path / "r.json").exists()

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["rejecton"], "Did you mean 'rejection'?"),
            (["--shapes", "3"], "expected BxK"),
            (["--shapes", "0x3"], "expected BxK"),
            (["--inputs", "logit"], "expected some of logits, probs, one-hot"),
            (["--peers", "sglang"], "expected none, or some of flashinfer, transformers, vllm"),
            (["--peers", "vllm"], "cannot be imported"),
            (["--device", "tpu"], "expected cpu, cuda"),
            (["--device", "cuda:99"], "does not exist"),
            (["--plot", "figure.bmp"], "expected a file ending in .png"),
            (["-o", "lenience=0.5"], "-o: expected one strategy to give options to"),
            (["lenience", "typical", "-o", "lenience=0.5"], "-o: expected one strategy to give options to"),
            (["lenience", "-o", "lenience=0.5", "--config", "a.toml"], "-o: expected one strategy to give options to"),
            (["--config", "missing.toml"], "missing.toml: cannot be read"),
            (["lenience", "-o", "leniency=0.5"], "Did you mean 'lenience'?"),
        ],
        ids=str,
    )
    def test_refused(self, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(measure, "run", lambda *_: pytest.fail("something ran"))
        assert message in run(*arguments, code=2).stderr


class Queue:
    """A device that a host fills at once or not, in fake seconds: it stands for `torch.cuda`."""

    def __init__(self, filled_after: float, call: float) -> None:
        """Take how long the host takes to fill it, and the device for a call."""
        self.filled_after, self.call = filled_after, call
        self.held, self.calls = 0.0, 0

    device = staticmethod(contextlib.nullcontext)

    def synchronize(self) -> None:
        """Be done."""

    def _sleep(self, cycles: int) -> None:
        self.held = cycles / timing.CYCLES

    def Event(self, *, enable_timing: bool) -> Any:  # noqa: N802 - torch's name
        """Return an event that has come if the device was not held for long enough."""
        assert enable_timing
        event = mock.Mock()
        event.query = lambda: self.held < self.filled_after
        event.record.side_effect = lambda: setattr(event, "calls", self.calls)
        waited = lambda: self.filled_after if event.query() else 0.0  # noqa: E731
        event.elapsed_time = lambda end: 1e3 * ((end.calls - event.calls) * self.call + waited())
        return event


def test_queued_calls_are_timed_where_the_device_never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue(filled_after=0.003, call=5e-6)
    monkeypatch.setattr(timing.torch, "cuda", queue)

    def call() -> None:
        queue.calls += 1

    time = timing.queued([call, call, call], torch.device("cuda"))
    assert time.median == pytest.approx(5.0)
    assert time.spread == pytest.approx(0.0, abs=1e-9)
    queue.filled_after = math.inf
    with pytest.raises(RuntimeError, match="wait for the device"):
        timing.queued([call], torch.device("cuda"))


def test_replayed_calls_are_timed_in_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which holds them several times over; the time is that of one, and none of a process's first graphs."""
    queue: Any = Queue(filled_after=0.0, call=5e-6)
    graph, calls = mock.Mock(), [lambda: captured.append(None)] * 3
    captured: list[None] = []
    graphs: list[None] = []
    slow = timing.FIRST_GRAPHS * timing.REPLAYS * 2  # replays

    def replay() -> None:
        queue.calls += len(captured) * (1 if graph.replay.call_count > slow else 2)

    def new() -> Any:
        captured.clear()
        graphs.append(None)
        return graph

    graph.replay.side_effect = replay
    queue.CUDAGraph, queue.graph = new, lambda _: contextlib.nullcontext()
    monkeypatch.setattr(timing.torch, "cuda", queue)
    monkeypatch.setattr(timing, "_GRAPHS", itertools.count())
    for expected in (timing.FIRST_GRAPHS + 1, timing.FIRST_GRAPHS + 2):
        assert timing.replayed(calls, torch.device("cuda")).median == pytest.approx(5.0)
        assert len(captured) == 18
        assert len(graphs) == expected


def test_figure_of_times() -> None:
    """Two paths, a peer without a floor, gaps: drawn in every format."""
    common = {"num_draft_tokens": 3, "read_floor": 2.0, "rows_read": 2, "peer": False, "name": "rejection"}
    rows = [plots.Timing(path=path, num_requests=b, microseconds=3.0 * b, **common) for path in "xy" for b in (1, 8)]
    rows.append(plots.Timing(path="x", name="other", peer=True, num_requests=8, num_draft_tokens=3, microseconds=99.0))
    for ending in plots.ENDINGS:
        assert plots.timings(rows, ending) == plots.timings(rows, ending)


def test_panels_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each path has its own, with the floors of its rows and the share of the time that they are."""
    figure = pytest.importorskip("matplotlib.figure").Figure()
    monkeypatch.setattr(plots, "render", lambda draw, _, size: (draw(figure), sizes.append(size)))
    sizes: list[tuple[float, float]] = []
    shape: dict[str, Any] = {"path": "x", "num_draft_tokens": 3, "peer": False}
    rows = [
        plots.Timing(
            **shape, name=name, num_requests=b, microseconds=b * time, read_floor=b * floor, rows_read=rows_read
        )
        for name, time, floor, rows_read in (
            ("block", 8.0, 4.0, 7),
            ("typical", 5.0, 2.0, 2),
            ("synthetic", 4.0, 1.0, 1),
        )
        for b in (8, 1)
    ]
    peer = plots.Timing(**{**shape, "peer": True, "path": "y"}, name="other", num_requests=2, microseconds=99.0)
    plots.timings([*rows, peer], ".svg")
    times, shares, beside, _ = figure.axes
    lines = {line.get_label(): line for line in times.lines}
    floors = ["read floor: 1 row a request", "read floor: 2 rows a request", "read floor: every row"]
    assert [*lines] == ["block", "typical", "synthetic", *floors]
    assert sorted(map(tuple, lines["block"].get_xydata())) == [(0, 8), (1, 64)]
    assert sorted(map(tuple, lines["read floor: every row"].get_xydata())) == [(0, 4), (1, 32)]
    assert lines["block"].get_markerfacecolor() == lines["block"].get_color()
    assert [label.get_text() for label in times.get_xticklabels()] == ["1, 3", "8, 3"]
    assert [line.get_ydata().tolist() for line in shares.lines] == [[50, 50], [40, 40], [25, 25]]
    assert shares.get_ylim()[0] == 0
    (other,) = beside.lines
    assert (other.get_label(), other.get_markerfacecolor()) == ("other", "white")
    titles = [axes.get_legend().get_title().get_text() for axes in (times, beside)]
    assert titles == ["", "open: for comparison"]
    figure.clear()
    plots.timings([peer], ".svg")  # without a floor there is no share of it
    assert len(figure.axes) == 1
    assert sizes == [(plots.SIZE[0], 2 * plots.SIZE[1]), (plots.SIZE[0] / 2, plots.SIZE[1])]


def test_suite_of_benchmarks_runs(tmp_path: Path) -> None:
    """`make bench`, each case once and untimed, on the smallest workload and for a peer."""
    command = [sys.executable, "-m", "pytest", "bench", "--benchmark-disable", "-q", "-p", "no:cacheprovider"]
    chosen = [
        "-k",
        "V3072 and medium and (rejection or typical) or transformers and float32",
        f"--basetemp={tmp_path / 'base'}",
    ]
    done = subprocess.run(  # noqa: S603 - this suite
        [*command, *chosen], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout
