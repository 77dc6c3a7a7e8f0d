"""`acceptlib compare`: its rows, their figures beside exact laws, files and plots, and what ends it early."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from cli_support import fails, run
from rich.console import Console

import acceptlib
from acceptlib import VerifyResult, plots, registry
from acceptlib.cli import compare, comparison, models, report
from acceptlib.cli import format as tables
from acceptlib.cli.comparison import Case, Row, Settings
from acceptlib.cli.console import CommandError
from acceptlib.cli.format import Format
from acceptlib.demo import prompts
from acceptlib.exact.figures import StepFigures
from acceptlib.integrations.transformers import Step
from acceptlib.strategies.block import Block
from acceptlib.strategies.rejection import Rejection

if TYPE_CHECKING:
    from collections.abc import Callable

TINY = ["--prompts", "1", "--max-new-tokens", "8", "--num-draft-tokens", "2"]
PNG = b"\x89PNG\r\n\x1a\n"
CPU = torch.device("cpu")


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> str:
    """A strategy whose rule raises, as a third party's may."""

    class Broken(acceptlib.AcceptanceStrategy):
        """Raise."""

        name = "broken"
        traits = acceptlib.Traits(guarantee="lossy")

        @acceptlib.rule
        def accept(target_prob: Any) -> Any:
            """Return h."""
            return target_prob.no_such_method()

    entry = registry.Entry("broken", Broken, "test 1.0")
    find: Callable[..., registry.Entry] = registry.find
    monkeypatch.setattr(registry, "find", lambda name, **kw: entry if name == "broken" else find(name, **kw))
    return "broken"


def fail() -> Any:
    msg = "what the test asks for has happened"
    raise CommandError(msg)


class TestCompare:
    @pytest.mark.usefixtures("loaded")
    def test_table(self) -> None:
        result = run("compare", "--strategies", "rejection,greedy", *TINY)
        lines = result.stdout.splitlines()
        assert lines[0].split()[:4] == ["strategy", "K", "guarantee", "tau"]
        assert [line.split()[0] for line in lines[2:4]] == ["rejection", "greedy"]
        assert not result.stderr

    def test_a_figure_of_nothing_is_refused_first(self, tmp_path: Path) -> None:
        arguments = ["--num-draft-tokens", "17,20", "--plot", str(tmp_path / "a.svg")]
        assert "no distance to draw beyond K = 16" in fails("compare", *arguments)

    @pytest.mark.usefixtures("loaded")
    def test_json_csv_and_files(self, tmp_path: Path) -> None:
        output, plot = tmp_path / "rows.csv", tmp_path / "rows.png"
        arguments = [
            "--strategies",
            "block,synthetic",
            "--prompts",
            "2",
            "--max-new-tokens",
            "12",
            "--num-draft-tokens",
            "2",
        ]
        result = run("compare", *arguments, "--format", "json", "--output", str(output), "--plot", str(plot))
        rows = json.loads(result.stdout)["rows"]
        block, synthetic = rows
        assert [row["strategy"] for row in rows] == ["block", "synthetic"]
        assert block["tv"] < 1e-12
        assert synthetic["tv"] > 0.05
        assert synthetic["mean_acceptance_length"] == 3.0
        assert synthetic["expected_acceptance_length"] == pytest.approx(3.0)
        assert synthetic["acceptance_by_position"] == [1.0, 1.0]
        assert all(row["error"] is None and row["num_steps"] > 0 for row in rows)
        written = list(csv.DictReader(io.StringIO(output.read_text())))
        assert [float(row["mean_acceptance_length"]) for row in written] == [
            row["mean_acceptance_length"] for row in rows
        ]
        assert plot.read_bytes().startswith(PNG)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.csv", "rows.png"]

    @pytest.mark.usefixtures("loaded")
    def test_record_says_where_it_was_made(self, tmp_path: Path) -> None:
        output = tmp_path / "rows.json"
        printed = run("compare", "--strategies", "greedy", *TINY, "--format", "json", "--output", str(output)).stdout
        record = json.loads(output.read_text())
        assert printed == output.read_text()
        assert {"machine", "acceptlib", "torch", "triton", "commit", "rows"} <= set(record)
        assert [row["strategy"] for row in record["rows"]] == ["greedy"]

    @pytest.mark.usefixtures("loaded")
    def test_seeds_are_paired_and_reproducible(self) -> None:
        arguments = ["compare", "--strategies", "typical,typical,lenience", *TINY, "-f", "csv", "--seed", "3"]
        tables_ = [list(csv.DictReader(io.StringIO(run(*arguments).stdout))) for _ in range(2)]
        assert [row["strategy"] for row in tables_[0]] == ["typical", "lenience"]
        timed = {"tokens_per_second", "verify_microseconds"}
        first, second = ([{k: v for k, v in row.items() if k not in timed} for row in rows] for rows in tables_)
        assert first == second

    @pytest.mark.usefixtures("loaded")
    def test_config_restricts_to_its_strategy(self, tmp_path: Path) -> None:
        file = tmp_path / "acceptance.json"
        file.write_text(
            json.dumps({"acceptance": {"strategy": "ensemble", "backend": "torch", "options": {"weight": 0.5}}})
        )
        (row,) = json.loads(run("compare", "--config", str(file), *TINY, "-f", "json").stdout)["rows"]
        assert row["strategy"] == "mixture"
        assert row["options"] == {"weight": 0.5}

    @pytest.mark.usefixtures("loaded")
    def test_configs_are_rows_of_their_own(self, tmp_path: Path) -> None:
        """Named by their options where others have the strategy's name."""
        files = []
        for number, (strategy, options) in enumerate(
            [("lenience", {"lenience": 0.5}), ("lenience", {}), ("mixture", {"weight": 0.5})]
        ):
            file = tmp_path / f"{number}.json"
            file.write_text(json.dumps({"acceptance": {"strategy": strategy, "options": options}}))
            files += ["--config", str(file)]
        rows = json.loads(run("compare", "--strategies", "rejection", *files, *TINY, "-f", "json").stdout)["rows"]
        assert [row["strategy"] for row in rows] == ["rejection", "lenience lenience=0.5", "lenience", "mixture"]
        assert rows[1]["options"] == {"lenience": 0.5}
        twice = run("compare", *files, "--config", files[1], *TINY, code=2).stderr
        assert f"--config: expected each file once, got {files[1]} 2 times" in "".join(twice.split("\n"))
        assert len({row["tv"] for row in rows}) == 4

    @pytest.mark.usefixtures("loaded")
    def test_a_strategy_that_raises_costs_only_its_own_row(self, broken: str) -> None:
        arguments = ["compare", "--strategies", f"greedy,{broken},rejection", *TINY]
        lines = run(*arguments, code=1).stdout.splitlines()
        assert "failed: StrategyDefinitionError: rule" in lines[3]
        assert "no_such_method" in lines[3]
        rows = json.loads(run(*arguments, "-f", "json", code=1).stdout)["rows"]
        assert [row["error"] is None for row in rows] == [True, False, True]
        assert "failed: " in run(*arguments, "-f", "github", code=1).stdout

    @pytest.mark.usefixtures("loaded")
    def test_interrupted_keeps_the_rows_so_far(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        measure, output = comparison.measure, tmp_path / "rows.json"
        output.write_text("before")

        def second_is_interrupted(pair: Any, case: Any, *rest: Any) -> Any:
            if case.name == "rejection":
                raise KeyboardInterrupt
            return measure(pair, case, *rest)

        monkeypatch.setattr(comparison, "measure", second_is_interrupted)
        arguments = ["--strategies", "greedy,rejection", *TINY, "-f", "json", "--output", str(output)]
        result = run("compare", *arguments, code=130)
        assert [row["strategy"] for row in json.loads(result.stdout)["rows"]] == ["greedy"]
        assert "interrupted after 1 of 2 rows" in result.stderr
        assert output.read_text() == "before"

    def test_ctrl_c_from_outside(self) -> None:
        """A signal, not an exception we raise ourselves: whatever it meets, the exit is clean."""
        command = [sys.executable, "-m", "acceptlib", "compare", "--prompts", "48", "--max-new-tokens", "400"]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "ACCEPTLIB_DISABLE_PLUGINS": "1", "FORCE_COLOR": "1"}
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background would ignore it
        try:
            process = subprocess.Popen(  # noqa: S603 - our own command line
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
            )
        finally:
            signal.signal(signal.SIGINT, handler)
        try:
            assert process.stderr is not None
            seen = b""
            while b"block, K" not in seen:  # the progress bar has reached the first row
                read = os.read(process.stderr.fileno(), 4096)
                assert read, seen
                seen += read
            process.send_signal(signal.SIGINT)
            output, errors = process.communicate(timeout=30)
        finally:
            process.kill()
            process.communicate()  # closes the pipes
        assert process.returncode == 130
        assert not output
        assert f"interrupted after 0 of {3 * len(registry.available())} rows".encode() in errors
        assert b"Traceback" not in errors

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--strategies", "rejecton"], "Did you mean 'rejection'?"),
            (["--output", "rows.txt"], ".json, .csv, .md"),
            (["--output", "no/such/folder/rows.json"], "does not exist"),
            (["--output", "."], ".json, .csv, .md"),
            (["--output", "/proc/rows.json"], "cannot be written"),
            (["--plot", "rows.gif"], ".png, .svg, .pdf"),
            (["--num-draft-tokens", "2,x"], "integers >= 1"),
            (["--num-draft-tokens", "0"], "integers >= 1"),
            (["--prompts", "1000"], "at most"),
            (["--max-new-tokens", "500"], "512 positions, of which the prompt takes 64"),  # the longest prompt
            (["--config", "missing.toml"], "cannot be read"),
            (["--config", "missing.toml", "--strategies", "fly"], "cannot be read"),
            (["--strategies", "fly,"], "--strategies: expected names separated by commas, got 'fly,'"),
        ],
    )
    @pytest.mark.usefixtures("loaded")
    def test_refused_before_anything_runs(self, arguments: list[str], message: str) -> None:
        assert message in fails("compare", *arguments)

    def test_a_folder_is_no_file(self, tmp_path: Path) -> None:
        (tmp_path / "rows.json").mkdir()
        assert "is a folder" in fails("compare", "--output", str(tmp_path / "rows.json"))

    def test_a_link_to_nowhere_is_refused_first(self, tmp_path: Path) -> None:
        link, loop = tmp_path / "rows.json", tmp_path / "loop.json"
        link.symlink_to(tmp_path / "none" / "rows.json")
        assert f"folder {str(tmp_path / 'none')!r} does not exist" in fails("compare", "--output", str(link))
        loop.symlink_to(loop)
        assert "cannot be written: Too many levels" in fails("compare", "--output", str(loop))
        assert "cannot be written: File name too long" in fails("compare", "--output", "x" * 300 + ".json")

    def test_a_figure_of_the_shorter_drafts_is_drawn(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Beside longer ones, which have no distance."""
        reached: list[None] = []
        monkeypatch.setattr(compare, "_cases", lambda *_: reached.append(None) or fail())
        fails("compare", "--num-draft-tokens", "2,17", "--plot", str(tmp_path / "a.svg"))
        assert reached

    def test_lengths_and_prompts(self) -> None:
        """Each length once, the shortest first; and every bundled prompt may be asked for."""
        assert compare._lengths("4, 2,4") == [2, 4]
        known = prompts()
        assert compare._prompts(2) == known[:2]
        assert compare._prompts(len(known)) == known

    def test_a_strategy_is_compared_once(self) -> None:
        strategies = [case.name for case in compare._cases("rejection,block,speculative", [])]
        assert strategies == ["rejection", "block"]

    def test_without_matplotlib(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        assert "acceptlib[plot]" in fails("compare", "--plot", "rows.png")

    def test_without_transformers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "transformers.utils.logging", None)
        assert "acceptlib[hf]" in fails("compare", *TINY)


class TestFigures:
    def test_standard_error_counts_prompts_not_steps(self) -> None:
        # Two prompts of ten equal steps each: twenty steps, but two independent observations.
        assert comparison.clustered_error([(10, 20), (10, 30)]) == pytest.approx(math.sqrt(2 * 25 * 2) / 20)
        assert comparison.clustered_error([(10, 20), (5, 10)]) == 0
        assert comparison.clustered_error([(10, 20)]) is None

    def test_options_that_are_no_numbers_can_be_written(self, pair: Any) -> None:
        """Minutes of measuring are not lost to a path."""

        class Kept(Rejection):
            """Rejection with an option that JSON has no kind for."""

            name = "kept"

            class Options(acceptlib.Options):
                folder: Path = Path("here")

        settings = comparison.Settings(prompts=compare._prompts(1), max_new_tokens=4)
        row = comparison.measure(pair, comparison.Case("kept", "", Kept), 2, settings, lambda: None)
        assert row.error is None
        assert json.loads(tables.to_json([row.record()]))[0]["options"] == {"folder": "here"}
        assert '{""folder"": ""here""}' in tables.to_csv([row.record()])

    def test_measured_and_exact_tau_agree(self, pair: Any) -> None:
        settings = comparison.Settings(prompts=compare._prompts(2), max_new_tokens=20, temperature=1.0, seed=0)
        for name in ("rejection", "block", "fly"):
            case = comparison.Case(name, "", lambda name=name: acceptlib.create(name))
            row = comparison.measure(pair, case, 3, settings, lambda: None)
            assert row.error is None
            assert row.deviation is not None
            assert 0 < abs(row.deviation) < comparison.SUSPICIOUS

    def test_state_reaches_the_exact_law(self, pair: Any) -> None:
        """Steps that stand whole and steps that stand not at all take turns, by the state of each."""

        class Alternating(Rejection):
            """Accept all or nothing."""

            name = "alternating"
            traits = acceptlib.Traits(guarantee="lossy", bound="none", state=("stands",))

            def initial_state(self, num_requests: int, device: torch.device | str) -> dict[str, torch.Tensor]:
                return {"stands": torch.ones(num_requests, dtype=torch.bool, device=device)}

            def update_state(self, state: Any, result: VerifyResult) -> None:  # noqa: ARG002
                state["stands"].logical_not_()

            @acceptlib.rule
            def accept(stands: Any) -> Any:
                return acceptlib.ops.where(stands, 1.0, 0.0)

        settings = comparison.Settings(prompts=compare._prompts(1), max_new_tokens=16)
        row = comparison.measure(pair, Case("alternating", "", Alternating), 3, settings, lambda: None)
        assert row.error is None
        assert row.expected_acceptance_length == row.mean_acceptance_length
        assert 1 < row.mean_acceptance_length < 4

    @pytest.mark.parametrize("temperature", [0.0, 0.5])
    def test_temperature_reaches_the_exact_law(self, pair: Any, temperature: float) -> None:
        settings = comparison.Settings(prompts=compare._prompts(1), max_new_tokens=12, temperature=temperature, seed=0)
        case = comparison.Case("rejection", "", lambda: acceptlib.create("rejection"))
        row = comparison.measure(pair, case, 2, settings, lambda: None)
        assert row.tv is not None
        assert row.tv < 1e-12
        assert row.expected_acceptance_length is not None
        if temperature == 0:
            assert row.expected_acceptance_length == row.mean_acceptance_length

    @pytest.mark.parametrize("filters", [{"top_k": 4}, {"top_p": 0.7, "temperature": 0.8}, {"min_p": 0.2}])
    def test_filters_reach_the_exact_law(self, pair: Any, filters: dict[str, Any]) -> None:
        """Rows full of zeros: lossless rules keep distance 0, lossy ones a finite one where they keep to p."""
        settings = comparison.Settings(prompts=compare._prompts(1), max_new_tokens=16, seed=0, **filters)
        for name in ("rejection", "block", "fly", "lenience"):
            case = comparison.Case(name, "", lambda name=name: acceptlib.create(name))
            row = comparison.measure(pair, case, 3, settings, lambda: None)
            assert row.error is None
            assert row.kl is not None
            assert math.isfinite(row.kl)
            assert row.tv is not None
            assert (row.tv < 1e-12) == (name in {"rejection", "block"})
            assert {key: getattr(row, key) for key in filters} == filters

    def test_too_short_for_a_whole_draft(self, pair: Any) -> None:
        settings = comparison.Settings(prompts=compare._prompts(1), max_new_tokens=2, temperature=1.0, seed=0)
        case = comparison.Case("greedy", "greedy", lambda: acceptlib.create("greedy"))
        row = comparison.measure(pair, case, 8, settings, lambda: None)
        assert row.error is not None
        assert "--max-new-tokens" in row.error

    def test_they_are_those_of_the_steps(self, pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """All but the speed are of steps that drafted as many tokens as asked for: not the last one of each prompt."""
        exact = iter([StepFigures(0.1, 0.3, 1.5), StepFigures(0.2, 0.1, 2.5), StepFigures(0.4, 0.3, 1.0)])
        first = [step(3, 1e-3), step(2, 9e-3), step(1, 1.0, drafted=1)]
        steps = iter([first, [step(1, 3e-3), step(2, 1.0, drafted=1)]])
        monkeypatch.setattr(models, "steps", lambda *_, **__: iter(next(steps)))
        monkeypatch.setattr(comparison.exact, "step_figures", lambda *_: next(exact))
        monkeypatch.setattr(comparison, "time", SimpleNamespace(perf_counter=itertools.count(0, 0.5).__next__))
        advanced: list[None] = []
        settings = Settings(prompts=compare._prompts(2), max_new_tokens=9)
        row = comparison.measure(pair, Case("rejection", "", Rejection), 2, settings, lambda: advanced.append(None))
        assert (row.error, row.guarantee, len(advanced)) == (None, "lossless", 2)
        assert (row.num_steps, row.mean_acceptance_length, row.draft_acceptance_rate) == (3, 2.0, 0.5)
        assert row.expected_acceptance_length == pytest.approx(5 / 3)
        assert row.deviation == pytest.approx((6 - 5) / math.sqrt(1.5**2 + 0.5**2))
        assert row.standard_error == comparison.clustered_error([(2, 5), (1, 1)])
        assert row.tv == pytest.approx((3 * 0.1 + 2 * 0.2 + 1 * 0.4) / 6)
        assert row.kl == pytest.approx((3 * 0.3 + 2 * 0.1 + 1 * 0.3) / 6)
        assert row.verify_microseconds == pytest.approx(3000)
        assert row.tokens_per_second == pytest.approx(9 / (0.5 * (4 + 3)))  # an end takes a turn too

    def test_figures_of_one_row_a_step_count_once_a_step(self, pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where later rows have a say, figures are of a step's first token, however many tokens it emits."""
        figures = iter([StepFigures(0.1, 0.3, 1.5), StepFigures(0.4, 0.1, 2.5)])
        monkeypatch.setattr(models, "steps", lambda *_, **__: iter([step(3, 1e-3), step(1, 1e-3)]))
        monkeypatch.setattr(comparison.exact, "step_figures", lambda *_: next(figures))
        settings = Settings(prompts=compare._prompts(1), max_new_tokens=9)
        row = comparison.measure(pair, Case("block", "", Block), 2, settings, lambda: None)
        assert (row.tv, row.kl) == (pytest.approx(0.25), pytest.approx(0.2))

    @pytest.mark.parametrize(("length", "has_law"), [(comparison.LONGEST_EXACT, True), (17, False)])
    def test_longer_drafts_have_no_exact_figures(
        self, pair: Any, length: int, *, has_law: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(models, "steps", lambda *_, **__: iter([step(3, 1e-3, drafted=length)]))
        monkeypatch.setattr(comparison.exact, "step_figures", lambda *_: StepFigures(0.0, 0.0, 2.0))
        settings = Settings(prompts=compare._prompts(1), max_new_tokens=20)
        row = comparison.measure(pair, Case("rejection", "", Rejection), length, settings, lambda: None)
        assert (row.error, row.mean_acceptance_length) == (None, 3.0)
        assert (row.tv is not None) == (row.expected_acceptance_length is not None) == has_law

    def test_no_two_prompts_share_a_seed(self, pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of one run, or of two."""
        seeds: list[int] = []
        monkeypatch.setattr(models, "steps", lambda *_, seed, **__: seeds.append(seed) or iter(()))
        for seed in range(3):
            settings = Settings(prompts=compare._prompts(3), max_new_tokens=4, seed=seed)
            comparison.measure(pair, Case("rejection", "", Rejection), 2, settings, lambda: None)
        assert len(set(seeds)) == 9


def step(emitted: int, seconds: float, drafted: int = 2) -> Step:
    """Return a step, of which no row matters."""
    result = VerifyResult.empty(1, drafted, "cpu")
    for tensor, value in ((result.num_accepted, emitted - 1), (result.num_emitted, emitted), (result.status, 0)):
        tensor.fill_(value)
    return Step(
        token_ids=[0] * emitted,
        num_accepted=emitted - 1,
        num_draft_tokens=drafted,
        draft_token_ids=torch.zeros(drafted, dtype=torch.int64),
        target_logits=torch.zeros(drafted + 1, 3),
        draft_probs=torch.full((drafted, 3), 1 / 3),
        verify_seconds=seconds,
        result=result,
        state={},
    )


class TestReport:
    ROW = Row(
        strategy="a",
        num_draft_tokens=2,
        guarantee="lossy",
        mean_acceptance_length=2.345,
        standard_error=0.126,
        expected_acceptance_length=2.5,
        deviation=-5.0,
        draft_acceptance_rate=0.5,
        tv=0.00123,
        kl=1e-6,
        tokens_per_second=99.6,
        verify_microseconds=321.4,
        num_prompts=1,
        max_new_tokens=8,
    )

    def printed(self, *rows: Row, capsys: pytest.CaptureFixture[str]) -> str:
        """Return what is printed of rows, as one line."""
        report.print_rows(rows, Format.plain, CPU, quiet=False)
        return " ".join(capsys.readouterr().out.split())

    def test_figures_have_their_units(self) -> None:
        """A distance that rounding leaves is 0, a small one is not, and what does not exist is a dash."""
        bare = Row(strategy="b", num_draft_tokens=17, guarantee="lossy", mean_acceptance_length=1.0, tv=1e-15)
        _, _, *lines = report.github([self.ROW, bare]).splitlines()
        found = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
        assert found == [
            ["a", "2", "lossy", "2.35 ± 0.13", "2.50", "50.0%", "0.0012", "1e-06", "100", "321"],
            ["b", "17", "lossy", "1.00", "-", "-", "0", "-", "-", "-"],
        ]

    @pytest.mark.parametrize(
        ("deviations", "remark"),
        [
            ((-5.0, 4.5), "5.0 standard errors of their difference (a, K = 2): more than chance explains."),
            ((-1.0, 3.9), "3.9 standard errors of their difference (b, K = 2)."),
        ],
    )
    def test_the_largest_gap_is_judged(
        self, deviations: tuple[float, float], remark: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """On either side; where nothing is random there is none."""
        rows = [replace(self.ROW, strategy=name, deviation=gap) for name, gap in zip("ab", deviations, strict=True)]
        assert f"Largest gap between tau and expected: {remark}" in self.printed(*rows, capsys=capsys)
        assert "Largest gap" not in self.printed(replace(self.ROW, deviation=0.0), capsys=capsys)

    def test_settings_are_said(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Of the filters those that are on, and of exact figures what they are not."""
        said = self.printed(replace(self.ROW, top_k=5, temperature=0.5, seed=3), capsys=capsys)
        assert "1 prompt, up to 8 tokens each, temperature 0.5, top_k 5, seed 3; the same seeds" in said
        assert "later rows have a say" not in said
        longest = replace(self.ROW, num_draft_tokens=comparison.LONGEST_EXACT)
        assert "No exact figures" not in self.printed(longest, capsys=capsys)
        longer = replace(self.ROW, num_draft_tokens=comparison.LONGEST_EXACT + 1)
        ahead = [
            replace(self.ROW, strategy=name, looks_ahead=True) for name in ("fly", "block", "fly", "any", "c", "d")
        ]
        said = self.printed(self.ROW, longer, *ahead, capsys=capsys)
        assert "No exact figures beyond K = 16." in said
        assert ". any, block, c, d, fly: later rows have a say" in said

    def test_a_row_without_distances_is_no_reason_to_explain_them(self, capsys: pytest.CaptureFixture[str]) -> None:
        said = self.printed(replace(self.ROW, strategy="fly", looks_ahead=True, tv=None), capsys=capsys)
        assert "later rows have a say" not in said

    def test_quiet_leaves_the_table_alone(self, capsys: pytest.CaptureFixture[str]) -> None:
        report.print_rows([self.ROW], Format.plain, CPU, quiet=True)
        assert len(capsys.readouterr().out.splitlines()) == 3

    def test_a_message_stands_in_place_of_figures(self, capsys: pytest.CaptureFixture[str]) -> None:
        """In the first row too; what is said of the table stands apart from it."""
        failed = replace(self.ROW, error="no time to run, and so no figures either")
        report.print_rows([failed, self.ROW], Format.plain, CPU, quiet=False)
        table, remarks = capsys.readouterr().out.split("\n\n")
        assert table.splitlines()[2] == "a         2  lossy      failed: no time to run, and so no figures either"
        assert remarks.startswith("tau: emitted tokens a step")

    def test_figures_that_can_be_spared_go_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """And where they are is said."""
        console = Console(file=io.StringIO(), width=64, force_terminal=True, color_system=None)
        for module in (report, tables):
            monkeypatch.setattr(module, "stdout", lambda: console)
        report.print_rows([self.ROW], Format.plain, CPU, quiet=False)
        said = " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]
        assert said.endswith("Left out at this width: us/verify, guarantee, KL. --format csv has every figure.")

    def test_rows_that_all_failed_are_a_table(self) -> None:
        *_, line = report.github([replace(self.ROW, error="no time")]).splitlines()
        assert [cell.strip() for cell in line.split("|")[1:-1]] == ["a", "2", "lossy", "failed: no time", *[""] * 6]

    def test_an_ending_may_be_in_capitals(self, tmp_path: Path) -> None:
        report.write([self.ROW], tmp_path / "rows.CSV", CPU)
        assert (tmp_path / "rows.CSV").read_text() == report.render([self.ROW], Format.csv, CPU)
        row = replace(self.ROW, acceptance_by_position=[0.8, 0.5])
        report.plot([row], tmp_path / "rows.SVG")
        assert (tmp_path / "rows.SVG").read_bytes() == plots.comparison(report.points_of([row]), ".svg")

    def test_a_figure_takes_rows_that_have_a_distance(self) -> None:
        """Of one prompt there is no standard error."""
        rows = [replace(self.ROW, standard_error=None), replace(self.ROW, tv=None)]
        (point,) = report.points_of(rows)
        assert (point.tau, point.tau_error, point.tv) == (2.345, 0.0, 0.00123)

    def test_a_row_at_no_distance_at_all_is_drawn(self) -> None:
        """A greedy row's is 0 to the bit, which is a distance all the same."""
        row = Row(strategy="b", num_draft_tokens=1, guarantee="greedy", mean_acceptance_length=2.0, tv=0.0)
        (point,) = report.points_of([row])
        assert (point.tv, point.tau_error) == (0.0, 0.0)

    def test_a_figure_of_no_row_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(CommandError, match="--plot: no row has a distance to draw; it takes K <= 16"):
            report.plot([replace(self.ROW, tv=None)], tmp_path / "rows.svg")


class TestPlots:
    def point(self, strategy: str, tau: float, tv: float, guarantee: str = "lossy") -> plots.Point:
        return plots.Point(strategy, guarantee, 2, tau, 0.1, tv, (0.8, 0.5))

    def test_front(self) -> None:
        best, worse, lossy = self.point("a", 2.0, 0.0), self.point("b", 1.9, 0.0), self.point("c", 3.0, 0.2)
        beaten = self.point("d", 2.5, 0.3)
        assert plots.pareto_front([beaten, lossy, worse, best]) == [best, lossy]
        as_many, near = self.point("e", 3.0, 0.3), self.point("f", 2.1, 0.001)
        assert plots.pareto_front([as_many, lossy, near, best]) == [best, near, lossy]

    def test_rounding_is_no_distance(self) -> None:
        more, less = self.point("a", 2.0, 1e-16), self.point("b", 1.9, 7e-17)
        assert plots.pareto_front([less, more]) == [more]

    def drawn(self, points: list[plots.Point], monkeypatch: pytest.MonkeyPatch) -> Any:
        """Return the two panels of a figure."""
        figure = pytest.importorskip("matplotlib.figure").Figure(figsize=plots.SIZE)
        monkeypatch.setattr(plots, "render", lambda draw, *_: draw(figure))
        plots.comparison(points, ".svg")
        return figure.axes

    def test_points_are_told_apart(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each strategy has one look in both panels; markers are filled where a rule is lossless."""
        points = [self.point("a", 2.0, 0.0, "lossless"), self.point("b", 2.5, 0.3)]
        shorter = [replace(point, num_draft_tokens=1, tau=1.5, acceptance_by_position=(0.9,)) for point in points]
        left, right = self.drawn([*shorter, *points, *shorter], monkeypatch)
        looks = [(line.get_color(), line.get_marker()) for line in right.lines]
        assert looks == [("#0072b2", "o"), ("#d55e00", "s")]
        assert [line.get_markerfacecolor() for line in right.lines] == ["#0072b2", "white"]
        assert [line.get_ydata().tolist() for line in right.lines] == [[0.8, 0.5]] * 2
        markers = [line for line in left.lines if line.get_marker() in {"o", "s"}]
        assert [(line.get_color(), line.get_marker()) for line in markers] == looks
        assert [line.get_markerfacecolor() for line in markers] == ["#0072b2", "white"]
        assert [line.get_ydata().tolist() for line in markers] == [[2.0], [2.5]]
        low, high = left.containers[0].lines[2][0].get_segments()[0][:, 1]
        assert (low, high) == (pytest.approx(1.9), pytest.approx(2.1))

    def test_looks_begin_anew_after_the_last(self, monkeypatch: pytest.MonkeyPatch) -> None:
        points = [self.point(f"rule{number}", 2.0, 0.1) for number in range(13)]
        _, right = self.drawn(points, monkeypatch)
        assert len({(line.get_color(), line.get_marker()) for line in right.lines}) == 13

    def test_panels_show_whole_scales(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Distances up to 0.1 at least, with room for names; shares from 0 to 1; at most 12 labelled positions."""
        point = plots.Point("a", "lossless", 16, 5.0, 0.1, 1e-16, (0.5,) * 16)
        left, right = self.drawn([point], monkeypatch)
        low, high = left.get_xlim()
        assert high > plots.MIN_TV + 0.15 * (plots.MIN_TV - low)
        assert right.get_ylim() == (0, 1.02)
        assert right.get_xticks().tolist() == [1, 3, 5, 7, 9, 11, 13, 15]

    def test_the_front_rises_at_its_points(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Between two of them no more tokens are had than at the one before."""
        left, _ = self.drawn([self.point("a", 2.0, 0.0), self.point("b", 3.0, 0.2)], monkeypatch)
        (front,) = [line for line in left.lines if line.get_color() == plots.FRONT_COLOR]
        assert front.get_drawstyle() == "steps-post"
        assert front.get_xydata().tolist() == [[0.0, 2.0], [0.2, 3.0], [left.get_xlim()[1], 3.0]]

    def test_names_of_near_points_do_not_overlap(self, monkeypatch: pytest.MonkeyPatch) -> None:
        points = [self.point(name, 2.0 + number / 1000, 0.01) for number, name in enumerate("abc")]
        left, _ = self.drawn(points, monkeypatch)
        scale = 72 / left.figure.dpi
        heights = sorted(
            left.transData.transform(text.xy)[1] * scale + text.xyann[1]
            for text in left.texts
            if text.get_text() in "abc"
        )
        assert len(heights) == 3
        assert min(b - a for a, b in itertools.pairwise(heights)) >= plots.LINE_HEIGHT - 1e-6

    @pytest.mark.parametrize(("ending", "magic"), [(".png", PNG), (".svg", b"<?xml"), (".pdf", b"%PDF")])
    def test_files(self, ending: str, magic: bytes) -> None:
        points = [self.point(f"rule{number}", 2 + number / 10, number / 50) for number in range(12)]
        assert plots.comparison(points, ending).startswith(magic)

    def test_equal_figures_make_equal_files(self) -> None:
        points = [self.point("a", 2.0, 0.0, "lossless")]
        assert plots.comparison(points, ".svg") == plots.comparison(points, ".svg")
