"""The command line: looking up, options, generation, tables and files, and every way out."""

from __future__ import annotations

import csv
import io
import itertools
import json
import logging
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import pytest
import torch
from cli_support import BUILT_IN, fails, run
from pydantic import Field
from rich.console import Console
from typer import Exit
from typer.testing import CliRunner

import acceptlib
from acceptlib import registry
from acceptlib.cli import console, describe, example, files, generate, models
from acceptlib.cli import format as tables
from acceptlib.cli.app import app
from acceptlib.cli.console import CommandError
from acceptlib.cli.options import device_of, names_of, parse_assignments, parse_value
from acceptlib.errors import MissingPackageError, import_extra
from acceptlib.integrations.transformers import SpeculativeDecoder
from acceptlib.metrics import AcceptanceMetrics
from acceptlib.sampling import SamplingParams
from acceptlib.strategies.rejection import Rejection

ORIGINAL = generate.TextStream.add


@pytest.mark.parametrize("arguments", [["--version"], ["list", "--format", "json"], ["show", "nope"]], ids=" ".join)
def test_a_width_of_0_hides_nothing(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "acceptlib", *arguments]
    environment = os.environ | {"COLUMNS": "0"}
    done = subprocess.run(command, capture_output=True, check=False, env=environment)  # noqa: S603 - ourselves
    assert done.stdout + done.stderr


def test_closed_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(CommandError, match="stdin, which is closed"):
        generate.command("-")


@pytest.mark.parametrize("name", ["cuda:256", "cuda:128", "cuda:99999999999999999999"])
def test_an_index_that_torch_would_wrap(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(CommandError, match="does not exist"):
        device_of(name)


def test_the_last_gpu_is_one_less_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device_of("cuda:1") == torch.device("cuda:1")
    with pytest.raises(CommandError, match="cuda:2 does not exist; this machine has 2 GPUs"):
        device_of("cuda:2")


def test_an_error_is_one_line_whatever_its_message(capsys: pytest.CaptureFixture[str]) -> None:
    console.complain("first,\n  second:\tthird\n" + 40 * "and more ")
    assert capsys.readouterr().err == f"Error: first, second: third{40 * ' and more'}\n"


def test_files_that_are_not_written_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Exit) as caught:
        console.cut_short("out of memory", 1, Path("a.json"), None, Path("b.csv"))
    assert caught.value.exit_code == 1
    assert capsys.readouterr().err == "Error: out of memory; a.json not written; b.csv not written\n"


def test_what_is_missing_is_named_with_its_extra() -> None:
    message = (
        r"^not_there cannot be imported \(No module named 'not_there'\)\. Install it: pip install 'acceptlib\[hf\]'$"
    )
    with pytest.raises(MissingPackageError, match=message):
        import_extra("not_there.at_all", "hf")


@pytest.mark.parametrize(
    ("quiet", "is_terminal", "shown"), [(False, True, True), (True, True, False), (False, False, False)]
)
def test_a_bar_is_shown_in_a_terminal_unless_quiet(
    monkeypatch: pytest.MonkeyPatch, *, quiet: bool, is_terminal: bool, shown: bool
) -> None:
    """Its label is cut where it would leave no room for the rest. In a pipe nothing is written at all."""
    written = io.StringIO()
    monkeypatch.setattr(console, "stderr", lambda: Console(file=written, force_terminal=is_terminal, width=60))
    with console.progress("rows", quiet=quiet) as bar:
        bar.add_task("a label that is cut" + 40 * "!", total=2)
    assert bool(written.getvalue()) == shown
    assert ("0/2" in written.getvalue()) == shown
    assert ("rows 0:00:00" in re.sub(r"\x1b\[[\d;]*m", "", written.getvalue())) == shown
    assert bar.live.transient


def test_names_keep_their_order() -> None:
    assert names_of("--strategies", "typical, block,typical") == ["typical", "block"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("9" * 5000, "Expected a number"),
        ("[" * 5000, "-o: expected a value as in TOML, got '[[["),
        ("{a=" * 5000, "-o: expected a value as in TOML, got '{a={a="),
        ("[0.5,", "-o: expected a value as in TOML, got '[0.5,': "),
        ("'0.5", '-o: expected a value as in TOML, got "\'0.5": '),
    ],
    ids=["digits", "lists", "tables", "list", "text"],
)
def test_value_that_is_no_toml(text: str, message: str) -> None:
    assert message in fails("show", "typical", "-o", f"posterior_alpha={text}")


@pytest.mark.parametrize("given", [(None, None), ("folder", None)], ids=["bundled", "given"])
def test_the_bundled_pair_runs_on_one_thread(
    given: tuple[str | None, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More would wait for each other wherever another process has a core; models of the user's may need them."""
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(models, "load_pair", lambda target=None, draft=None, *, device: (target, draft, device))
    assert models.load(*given, torch.device("cpu")) == (*given, torch.device("cpu"))
    assert threads == ([1] if given == (None, None) else [])


def test_the_hub_says_nothing_of_each_retry(caplog: pytest.LogCaptureFixture) -> None:
    models.prepare()
    logging.getLogger("huggingface_hub.utils._http").warning("Retrying in 1s")
    assert not caplog.records


class Optional(Rejection):
    """A third party's strategy, with options of every kind."""

    name = "optional"
    aliases = ()

    class Options(acceptlib.Options):
        """Those with defaults."""

        even: int = Field(4, multiple_of=2)
        rates: list[Annotated[float, Field(ge=0), Field(le=1)]] = Field(
            default_factory=lambda: [0.5], min_length=1, max_length=9
        )
        nothing: int | None = None
        dtype: Any = torch.float32


class Whole(acceptlib.AcceptanceStrategy):
    """A strategy that overrides `verify`, written where there are no files."""

    __module__ = "nowhere"
    name = "whole"
    traits = acceptlib.Traits(guarantee="lossy", bound="none")

    def verify(self, draft_token_ids: torch.Tensor, **_: Any) -> acceptlib.VerifyResult:  # type: ignore[override]
        return acceptlib.VerifyResult.empty(len(draft_token_ids), 0, draft_token_ids.device)


class TestLookingUp:
    def test_version(self) -> None:
        assert run("--version").stdout == f"acceptlib {acceptlib.__version__}\n"

    def test_list_names_every_strategy(self) -> None:
        rows = json.loads(run("list", "--format", "json").stdout)
        assert {*BUILT_IN} <= {row["name"] for row in rows}
        rejection = next(row for row in rows if row["name"] == "rejection")
        assert rejection["aliases"] == ["speculative", "standard"]
        assert rejection["guarantee"] == "lossless"
        assert rejection["summary"].startswith("Speculative sampling")

    def test_list_begins_with_what_promises_most(self) -> None:
        """And what promises the same follows by name."""
        rows = [(row["guarantee"], row["name"]) for row in json.loads(run("list", "--format", "json").stdout)]
        order = ["lossless", "greedy", "lossy"]
        assert {guarantee for guarantee, _ in rows} == {*order}
        assert rows == sorted(rows, key=lambda row: (order.index(row[0]), row[1]))

    def test_list_fits_the_terminal(self) -> None:
        columns = [tables.Column("name"), tables.Column("summary", wraps=True)]
        lines, left_out = tables.plain(columns, [["a", "word " * 40]], 80)
        assert not left_out
        assert max(map(len, lines)) <= 80

    def test_columns_that_are_not_needed_make_room(self) -> None:
        columns = [tables.Column("name"), tables.Column("origin", expendable=1), tables.Column("summary", wraps=True)]
        lines, left_out = tables.plain(columns, [["a", "o" * 30, "word " * 40]], 50)
        assert left_out == ["origin"]
        assert max(map(len, lines)) <= 50
        assert not tables.plain(columns, [["a", "o" * 30, "word " * 40]], 70)[1]

    def test_options_alone_are_said_to_be_no_example(self) -> None:
        assert "--example: expected another --format" in fails("show", "block", "--example", "-f", "csv")

    @pytest.mark.parametrize("command", [["list"], ["plugins"], ["show", "typical"]], ids=lambda command: command[0])
    def test_every_format_parses_back(self, command: list[str]) -> None:
        assert json.loads(run(*command, "--format", "json").stdout)
        first, *rest = csv.reader(io.StringIO(run(*command, "--format", "csv").stdout))
        assert rest
        assert all(len(row) == len(first) for row in rest)
        assert re.search(r"^\|:?-+", run(*command, "--format", "github").stdout, re.MULTILINE)
        assert "\x1b" not in run(*command, "--format", "plain").stdout

    def test_show_says_everything(self) -> None:
        text = run("show", "typical").stdout
        for part in ("lossy, without a bound", "posterior_alpha * exp(-H_i)", "arXiv 2401.10774", "target_entropy"):
            assert part in text
        options = {
            option["name"]: option for option in json.loads(run("show", "typical", "-f", "json").stdout)["options"]
        }
        assert re.search(r"posterior_threshold +float +>= 0, <= 1 +0\.09", text)
        threshold = options["posterior_threshold"]
        assert [threshold[name] for name in ("minimum", "maximum", "default", "required")] == [0, 1, 0.09, False]
        assert threshold["exclusive_minimum"] is None
        assert options["recovery"]["default"] == "argmax"
        assert options["posterior_threshold"]["type"] == "float"
        assert "Medusa" in options["posterior_threshold"]["description"]

    def test_show_finds_bounds_within_a_list(self) -> None:
        options = json.loads(run("show", "synthetic", "-f", "json").stdout)["options"]
        assert options[0]["type"] == "tuple[float, ...] | None"
        assert options[0]["entries"] == {"minimum": 0, "maximum": 1}
        assert options[0]["default"] is None
        assert "each >= 0 and <= 1" in run("show", "synthetic").stdout

    def test_show_says_which_bound_is_exclusive(self) -> None:
        (option,) = json.loads(run("show", "lenience", "-f", "json").stdout)["options"]
        assert (option["exclusive_minimum"], option["minimum"], option["maximum"]) == (0, None, 1)

    def test_a_docstring_is_taken_apart(self) -> None:
        """A full stop within a number ends no sentence, notes add up, and a class without a docstring has none."""

        class Described(Rejection):
            """Accept 1.5 times as much. Not more.

            One note.

            Formula: h = 1.5 p / q

            Another note.
            """

        assert describe.summary(Described) == "Accept 1.5 times as much"
        parts = describe.parts(Described)
        assert (parts["Formula"], parts["Notes"]) == ("h = 1.5 p / q", "One note. Another note.")
        plain = type("Plain", (Described,), {})
        assert (describe.summary(plain), describe.parts(plain)) == ("", {})

    def test_a_summary_is_without_its_full_stop(self) -> None:
        one = type("One", (Rejection,), {"__doc__": "Accept 1.5 times as much."})
        assert describe.summary(one) == "Accept 1.5 times as much"

    def test_options_are_described_whatever_they_are(self) -> None:
        """Defaults may be made anew, bounds be of any kind, and values be what JSON has not."""
        even, rates, nothing, dtype = describe.options(Optional)
        assert even.cells == ["even", "int", "multiple of 2", "4", ""]
        assert rates.cells == ["rates", "list[float]", "length >= 1, length <= 9, each >= 0 and <= 1", "[0.5]", ""]
        assert (rates.record()["min_length"], rates.record()["default"]) == (1, [0.5])
        assert (nothing.default, nothing.required) == (None, False)
        assert dtype.record()["default"] == "torch.float32"
        assert json.loads(tables.to_json(replace(dtype, default={1}).record()))["default"] == [1]

    def test_types_are_said_without_what_annotations_add(self) -> None:
        class Annotating(Rejection):
            class Options(acceptlib.Options):
                rates: list[Annotated[float, Field(description="a rate")]] = Field(default_factory=list)
                pairs: tuple[Annotated[float | None, Field(ge=0)], ...] = ()
                word: Literal["a", "b"] | None = None

        types = [option.type for option in describe.options(Annotating)]
        assert types == ["list[float]", "tuple[float | None, ...]", "Literal['a', 'b'] | None"]

    def test_traits_are_those_under_the_options(self) -> None:
        """Without those that say nothing."""
        typical, sampled = (
            describe.traits(acceptlib.create("typical", **given)) for given in ({}, {"recovery": "sample"})
        )
        assert (typical["recovered token"], typical["bonus token"]) == ("argmax", "sample")
        assert sampled["recovered token"] == "sample"
        assert "window" not in typical
        assert describe.traits(acceptlib.create("fly"))["window"] == "6"
        assert describe.traits(acceptlib.create("lenience"))["neutral"] == "lenience = 1, then equal to rejection"

    def test_what_is_read_is_sorted(self) -> None:
        assert describe.reads(acceptlib.create("lenience")) == ["draft_prob", "lenience", "p", "q", "target_prob"]

    def test_a_strategy_of_its_own_verify_is_shown(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of no file, too."""
        monkeypatch.setattr(registry, "find", lambda _: registry.Entry("whole", Whole, "third-party"))
        page = run("show", "whole").stdout
        assert "\nReads\nWhatever its own verify reads.\n" in page
        assert re.search(r"^file +unknown$", page, re.MULTILINE)

    def test_show_takes_an_alias(self) -> None:
        assert run("show", "standard").stdout.startswith("rejection (also speculative, standard)")

    @pytest.mark.parametrize("name", BUILT_IN)
    def test_show_works_for_all(self, name: str) -> None:
        record = json.loads(run("show", name, "-f", "json").stdout)
        assert record["guarantee"]
        assert record["formula"]
        assert record["source"]
        assert record["reads"]
        assert Path(record["origin"]["file"]).name == f"{name.replace('-', '_')}.py"

    def test_schema_is_json_schema(self) -> None:
        schema = json.loads(run("schema").stdout)
        table = schema["properties"]["acceptance"]
        assert table["properties"]["strategy"]["examples"] == acceptlib.available()

    @pytest.mark.parametrize("command", [["compare"], ["generate", "x"]])
    def test_device_that_is_not_there(self, command: list[str]) -> None:
        assert "--device: cuda:99 does not exist" in fails(*command, "--device", "cuda:99")

    @pytest.mark.parametrize("command", [["compare"], ["generate", "x"], ["bench"]])
    def test_temperature_without_bound(self, command: list[str]) -> None:
        shown = run(*command, "--temperature", "inf", code=2).stderr
        assert "Invalid value for '--temperature': inf is not finite." in shown

    def test_unknown_name(self) -> None:
        assert "Did you mean 'rejection'?" in fails("show", "rejecton")

    @pytest.mark.parametrize("argument", ["list", "--help", "--version"])
    def test_output_that_cannot_be_written(self, argument: str) -> None:
        with Path("/dev/full").open("w") as full:
            done = subprocess.run(  # noqa: S603 - what the cases say
                [sys.executable, "-m", "acceptlib", argument],
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
            )
        assert done.returncode == 1
        assert done.stderr == "Error: cannot write the output: No space left on device\n"

    @pytest.mark.parametrize("error", [RuntimeError(), FileNotFoundError(2, "No such file or directory", "a file")])
    def test_unexpected_errors_keep_their_traceback(self, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
        def explode() -> None:
            raise error

        monkeypatch.setattr(registry, "loaded_plugins", explode)
        assert CliRunner().invoke(app, ["plugins"]).exception is error


class TestAssignments:
    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ("0.1", 0.1),
            ("inf", math.inf),
            ("[1.0, 0.5]", [1.0, 0.5]),
            ("true", True),
            ("sample", "sample"),
            ('"sample"', "sample"),
            ("", ""),
            ("1\nother = 2", "1\nother = 2"),
        ],
    )
    def test_values_are_toml_or_text(self, text: str, value: object) -> None:
        assert parse_value(text) == value

    def test_a_value_may_hold_an_equals_sign(self) -> None:
        assert parse_assignments(["a=b=c"]) == {"a": "b=c"}

    @pytest.mark.parametrize(
        ("option", "message"),
        [
            ("posterior_alpha", "expected key=value"),
            ("=1", "expected key=value"),
            ("posterior_alfa=1", "Did you mean 'posterior_alpha'?"),
            ("posterior_threshold=2", "less than or equal to 1"),
            ("backend=torch", "--config"),
        ],
    )
    def test_errors(self, option: str, message: str) -> None:
        assert message in fails("generate", "x", "-s", "typical", "-o", option)

    def test_twice(self) -> None:
        message = fails("generate", "x", "-s", "typical", "-o", "posterior_alpha=1", "-o", "posterior_alpha=2")
        assert "given twice" in message


class TestGenerate:
    @pytest.mark.usefixtures("loaded")
    def test_text_and_figures(self) -> None:
        text = run("generate", "def add(a, b):\n", "--max-new-tokens", "12", "--seed", "1").stdout
        assert text.startswith("def add(a, b):\n")
        assert re.search(r"^tau +\d\.\d\d", text, re.MULTILINE)
        assert "acceptance by position" in text
        assert "\x1b" not in text
        assert "recovered" not in text  # no legend where there are no colours

    def test_more_than_any_machine_holds(self) -> None:
        many = "9" * 20
        for arguments in (
            ("generate", "x", "--max-new-tokens", many),
            ("generate", "x", "--top-k", many),
            ("bench", "rejection", "--vocab-size", many),
        ):
            assert "Invalid value" in run(*arguments, code=2).stderr
        assert "BxK, each from 1 to 999999" in fails("bench", "rejection", "--shapes", f"{many}x5")

    def test_an_engine_that_cannot_run_is_refused_at_once(self) -> None:
        assert "cannot run on cpu" in fails("bench", "rejection", "--backend", "triton", "--device", "cpu")

    @pytest.mark.usefixtures("loaded")
    def test_no_text_is_longer_than_the_models_were_made_for(self) -> None:
        said = fails("generate", "a", "--max-new-tokens", "512")
        assert "512 positions, of which the prompt takes 1: expected a --max-new-tokens of at most 511, got 512" in said
        said = fails("generate", "x" * 5000)
        assert re.search(r"the prompt \(\d+ tokens\) does not fit the models' 512 positions", said)

    def test_a_text_may_fill_the_positions_of_both_models(self, pair: Any) -> None:
        models.expect_room(pair, 1, 511)
        sizes = (SimpleNamespace(config=SimpleNamespace(max_position_embeddings=size)) for size in (512, 100))
        target, draft = sizes
        for one, other in ((target, draft), (draft, target)):
            mixed = replace(pair, target=one, draft=other)
            models.expect_room(mixed, 60, 40)
            with pytest.raises(CommandError, match="the models have 100 positions"):
                models.expect_room(mixed, 60, 41)

    @pytest.mark.parametrize(("given", "ends"), [(None, ()), (3, (3,)), ([3, 5], (3, 5))])
    def test_a_model_may_have_several_ends(
        self, loaded: Any, given: Any, ends: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(loaded.target.generation_config, "eos_token_id", given)
        seen: list[Any] = []
        monkeypatch.setattr(
            SpeculativeDecoder, "steps", lambda *_, eos_token_ids: seen.append(eos_token_ids) or iter(())
        )
        run("generate", "x")
        assert seen == [ends]

    @pytest.mark.usefixtures("loaded")
    def test_speed_is_that_of_all_steps(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Half a second each here, as long as it takes to find that there are no more."""
        monkeypatch.setattr(generate, "time", SimpleNamespace(perf_counter=itertools.count(0, 0.5).__next__))
        text = run("generate", "import os", "--max-new-tokens", "200", "--num-draft-tokens", "1").stdout
        (steps,) = re.findall(r"emitted tokens a step, (\d+) steps", text)
        assert re.search(rf"^speed +{200 / (0.5 * (int(steps) + 1)):.0f} ", text, re.MULTILINE)
        ((share, bar),) = re.findall(r"^  1 +([\d.]+)%  (█+)$", text, re.MULTILINE)
        assert len(bar) == round(float(share) / 100 * generate.BAR_WIDTH)

    def test_what_is_held_back_ends_the_text(self, loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """A model may stop within a character."""
        start, *_ = loaded.tokenizer("🎉").input_ids
        monkeypatch.setattr(generate.TextStream, "add", lambda stream, _: ORIGINAL(stream, start))
        assert run("generate", "x", "--max-new-tokens", "1").stdout.startswith("x\ufffd\n")

    @pytest.mark.usefixtures("loaded")
    def test_tabs_stay(self) -> None:
        assert run("generate", "a\tb", "--max-new-tokens", "1").stdout.startswith("a\tb")

    @pytest.mark.usefixtures("loaded")
    def test_a_prompt_gives_a_terminal_no_orders(self) -> None:
        assert run("generate", "a\x1b[31mb", "--max-new-tokens", "1").stdout.startswith("a[31mb")

    @pytest.mark.usefixtures("loaded")
    def test_no_acceptance_is_told_of_where_nothing_is_drafted(self) -> None:
        assert "accept" not in run("generate", "a", "--max-new-tokens", "1").stdout.replace("acceptlib", "")

    def test_figures_in_a_terminal(self) -> None:
        """Bars are rounded, and blanks before a piece have no style: an underlined one would look like a character."""
        terminal = Console(file=io.StringIO(), force_terminal=True, color_system="truecolor", width=80)
        metrics = AcceptanceMetrics(num_steps=20, num_draft_tokens=20, num_accepted_tokens=13)
        metrics.accepted_at, metrics.drafted_at = [13], [20]
        generate._print_piece(terminal, "  x  ", "recovered")
        generate._print_figures(terminal, "a call", metrics, 33, 3.0)
        written = terminal.file.getvalue()
        assert written.startswith("  \x1b[4;")
        plain = re.sub(r"\x1b\[[\d;]*m", "", written)
        assert plain.startswith("  x  accepted  recovered  bonus\na call\n")
        assert re.search(r"^tau +1\.65 +emitted tokens a step, 20 steps", plain, re.MULTILINE)
        assert re.search(r"^accepted +65\.0% +13 of 20 drafted tokens", plain, re.MULTILINE)
        assert re.search(r"^speed +11 ", plain, re.MULTILINE)
        assert plain.endswith(f"  1   65.0%  {16 * '█'}\n")

    def test_tau_is_of_the_text(self, loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """What a step emitted behind the end of the text is not in it."""
        arguments = ["generate", "x = 1", "--num-draft-tokens", "8", "--max-new-tokens", "40", "--seed", "1"]

        def steps() -> list[Any]:
            ids, chosen = models.encode(loaded, "x = 1"), acceptlib.create("rejection")
            options = {"num_draft_tokens": 8, "max_new_tokens": 40, "seed": 1}
            return list(models.steps(loaded, chosen, ids, sampling=SamplingParams(), **options))

        seen: set[int] = set()
        for step in steps():
            if step.num_accepted > 1 and step.token_ids[0] not in seen:
                break
            seen.update(step.token_ids)
        end = step.token_ids[0]  # a drafted token that stands, and others behind it
        monkeypatch.setattr(loaded.target.generation_config, "eos_token_id", end)
        cut = steps()
        assert len(cut[-1].token_ids) < int(cut[-1].result.num_emitted[0])
        tau = sum(len(step.token_ids) for step in cut) / len(cut)
        assert re.search(rf"^tau +{tau:.2f} ", run(*arguments).stdout, re.MULTILINE)

    @pytest.mark.usefixtures("loaded")
    def test_an_error_begins_a_line(self, tmp_path: Path) -> None:
        config = tmp_path / "triton.json"
        config.write_text('{"acceptance": {"strategy": "rejection", "backend": "triton"}}')
        result = run("generate", "import os", "--config", str(config), code=2)
        assert result.stdout == "import os\n"
        assert result.stderr.startswith("Error: backend='triton' cannot run")

    @pytest.mark.usefixtures("loaded")
    def test_a_seed_is_a_text(self) -> None:
        arguments = ["generate", "import os", "-s", "block", "--max-new-tokens", "12", "--seed", "5"]
        first, second = (run(*arguments).stdout.partition("tau")[0] for _ in range(2))
        assert first == second

    @pytest.mark.usefixtures("loaded")
    def test_config_and_stdin(self, tmp_path: Path) -> None:
        file = tmp_path / "acceptance.toml"
        file.write_text('[acceptance]\nstrategy = "lenience"\n[acceptance.options]\nlenience = 0.5\n')
        text = run(
            "generate", "-", "--config", str(file), "-o", "lenience=0.25", "--max-new-tokens", "4", input="import sys"
        ).stdout
        assert text.startswith("import sys")
        assert "acceptlib.create('lenience', lenience=0.25)" in text

    @pytest.mark.usefixtures("loaded")
    def test_letters_that_the_terminal_has_not(self) -> None:
        environment = os.environ | {"PYTHONIOENCODING": "ascii"}
        command = [sys.executable, "-m", "acceptlib", "generate", "π = ", "--max-new-tokens", "6"]
        done = subprocess.run(command, capture_output=True, check=False, env=environment)  # noqa: S603 - ourselves
        assert done.returncode == 0, done.stderr
        assert b"? = " in done.stdout

    @pytest.mark.parametrize("how", ["argument", "stdin"])
    def test_a_prompt_that_is_no_text(self, how: str) -> None:
        prompt, given = ("a\udcff", None) if how == "argument" else ("-", b"a\xff")
        assert "not valid UTF-8" in fails("generate", prompt, input=given)

    def test_nothing_to_continue(self) -> None:
        assert "at least one character" in fails("generate", "")

    def test_no_name(self) -> None:
        assert "Unknown strategy ''" in fails("generate", "x", "-s", "")

    def test_two_names(self, tmp_path: Path) -> None:
        assert "give one" in fails("generate", "x", "-s", "typical", "--config", str(tmp_path / "a.toml"))

    def test_config_that_is_not_there(self, tmp_path: Path) -> None:
        assert "cannot be read" in fails("generate", "x", "--config", str(tmp_path / "no.toml"))

    def test_model_that_is_not_there(self, tmp_path: Path) -> None:
        nowhere = str(tmp_path / "nowhere")
        assert "nowhere" in fails("generate", "x", "--target", nowhere, "--draft", nowhere)
        long = "./" + 5000 * "x"
        assert "does not exist" in fails("generate", "x", "--target", long, "--draft", long)

    @pytest.mark.usefixtures("loaded")
    def test_sampling_options_choose_the_text(self) -> None:
        arguments = ["generate", "import os", "--max-new-tokens", "12"]
        greedy = run(*arguments, "--temperature", "0").stdout.split("acceptlib.create")[0]
        for options in (["--top-k", "1"], ["--top-p", "0.000001"], ["--min-p", "1"]):
            assert run(*arguments, *options).stdout.split("acceptlib.create")[0] == greedy
        assert run(*arguments, "--top-k", "50").stdout.split("acceptlib.create")[0] != greedy
        assert "0.0 is not above 0" in run(*arguments, "--top-p", "0", code=2).stderr

    @pytest.mark.usefixtures("loaded")
    def test_interrupted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        steps = models.steps

        def interrupted(*arguments: Any, **options: Any) -> Any:
            yield next(steps(*arguments, **options))
            raise KeyboardInterrupt

        monkeypatch.setattr(models, "steps", interrupted)
        result = run("generate", "import os", "--max-new-tokens", "50", code=130)
        assert re.search(r"emitted tokens a step, 1 step\b", result.stdout)
        assert "interrupted" in result.stderr

    def test_kinds(self, loaded: Any) -> None:
        ids = models.encode(loaded, "def f(x):")
        options: dict[str, Any] = {"num_draft_tokens": 3, "max_new_tokens": 40, "sampling": SamplingParams(), "seed": 0}
        seen = set()
        for step in models.steps(loaded, acceptlib.create("rejection"), ids, **options):
            kinds = [generate.kind_of(step, index) for index in range(len(step.token_ids))]
            last = "bonus" if step.num_accepted == step.num_draft_tokens else "recovered"
            assert kinds == ["accepted"] * step.num_accepted + [last]
            seen.update(kinds)
        assert seen == {"accepted", "recovered", "bonus"}


class TestTextStream:
    @pytest.mark.parametrize("text", ["def größe(): 'π ≈ 3' # 日本語 🎉🏳️‍🌈 fin", "\n\n    x = 1\n", "🎉"])
    def test_pieces_add_up_and_no_character_is_cut(self, pair: Any, text: str) -> None:
        prompt = pair.tokenizer("s = ").input_ids
        stream = generate.TextStream(pair.tokenizer, prompt)
        pieces = [stream.add(token_id) for token_id in pair.tokenizer(text).input_ids]
        assert "".join(pieces) == text
        assert not any("\ufffd" in piece for piece in pieces)
        assert not stream.finish()

    def test_a_cut_character_is_held_back_to_the_end(self, pair: Any) -> None:
        ids = pair.tokenizer("🎉").input_ids
        assert len(ids) > 1
        stream = generate.TextStream(pair.tokenizer, pair.tokenizer("x").input_ids)
        assert [stream.add(token_id) for token_id in ids[:-1]] == [""] * (len(ids) - 1)
        assert set(stream.finish()) == {"\ufffd"}

    def test_what_is_no_text_is_left_out(self, pair: Any) -> None:
        """Control characters, and tokens that stand for none."""
        stream = generate.TextStream(pair.tokenizer, [])
        pieces = [
            stream.add(token_id) for token_id in [*pair.tokenizer("a\x1bb").input_ids, pair.tokenizer.eos_token_id]
        ]
        assert "".join(pieces) == "ab"

    def test_control_characters_do_not_reach_the_terminal(self) -> None:
        assert generate.printable("a\x1b[31mb\r\x07\n\tc\x9b") == "a[31mb\n\tc"


class TestTables:
    COLUMNS = (
        tables.Column("name"),
        tables.Column("a", "right", expendable=1),
        tables.Column("b", "right", expendable=2),
    )

    def test_columns_go_where_there_is_no_room(self) -> None:
        lines, left_out = tables.plain(self.COLUMNS, [["x" * 20, "1" * 20, "2" * 20]], 50)
        assert left_out == ["b"]
        assert len(lines[0]) <= 50
        assert tables.plain(self.COLUMNS, [["x" * 20, "1" * 20, "2" * 20]], None)[1] == []

    def test_where_the_columns_left_out_are_is_said(self, monkeypatch: pytest.MonkeyPatch) -> None:
        console = Console(file=io.StringIO(), width=50, force_terminal=True, color_system=None)
        monkeypatch.setattr(tables, "stdout", lambda: console)
        tables.show(self.COLUMNS, [["x" * 20, "1" * 20, "2" * 20]], [{}], tables.Format.plain)
        *_, beneath = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
        assert beneath == "Left out at this width: b. --format json has them."

    def test_headings_stand_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Bold, and dim what is beneath them; in a table of figures too."""
        console = Console(file=io.StringIO(), width=50, force_terminal=True, color_system="standard", no_color=False)
        monkeypatch.setattr(tables, "stdout", lambda: console)
        tables.show(self.COLUMNS, [["x", "1", "2"]], [{}], tables.Format.plain)
        tables.print_figures(self.COLUMNS, [["x", "1", "2"]], [], 1)
        lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
        table = ["\x1b[1mname  a  b\x1b[0m", "\x1b[2m----  -  -\x1b[0m", "x     1  2"]
        assert lines == [*table, *table]

    def test_columns_stay_where_there_is_just_enough_room(self) -> None:
        rows = [["x" * 20, "1" * 20, "2" * 6], ["y", "3", "4"]]
        assert tables.plain(self.COLUMNS, rows, 50)[1] == []
        lines, left_out = tables.plain(self.COLUMNS, rows, 49)
        assert left_out == ["b"]
        assert [line.split() for line in lines[2:]] == [row[:2] for row in rows]

    def test_no_rows(self) -> None:
        assert tables.plain(self.COLUMNS, [], 80)[0][0].split() == ["name", "a", "b"]
        assert tables.github(self.COLUMNS, []).startswith("| name")

    def test_a_message_spans_its_row(self) -> None:
        lines, _ = tables.plain(self.COLUMNS, [["x", "", ""], ["y", "1", "2"]], None)
        spread = tables.spread(lines, 1, {0: "failed: too long for any column"})
        assert spread[2] == "x     failed: too long for any column"
        assert spread[3] == lines[3]

    def test_a_message_that_is_cut_stands_in_full_beneath(self, monkeypatch: pytest.MonkeyPatch) -> None:
        console = Console(file=io.StringIO(), width=40, force_terminal=True, color_system=None)
        monkeypatch.setattr(tables, "stdout", lambda: console)
        message = "failed: " + "word " * 20
        left_out = tables.print_figures(self.COLUMNS, [["x", message, ""], ["y", "1", "2"]], [0], 1)
        table, _, beneath = console.file.getvalue().partition("\n\n")  # type: ignore[attr-defined]
        assert not left_out
        assert [line.rstrip() for line in table.splitlines()[::3]] == ["name  a  b", "y     1  2"]
        assert beneath.split() == message.split()
        assert max(map(len, beneath.splitlines())) <= 40

    @pytest.mark.parametrize(("width", "times"), [(24, 1), (23, 2)])
    def test_a_message_is_repeated_where_it_is_cut(
        self, width: int, times: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """In red, beneath the table once for all of its rows, and not where it just fits."""
        console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system="standard", no_color=False)
        monkeypatch.setattr(tables, "stdout", lambda: console)
        message = "failed: for good x"
        cells = [["x", message, ""], ["y", message, ""]]
        tables.print_figures(self.COLUMNS, cells, [0, 1], 1)
        table, *beneath = console.file.getvalue().split("\n\n")  # type: ignore[attr-defined]
        assert table.count("\x1b[31m") == 2
        assert len(beneath) == times - 1

    def test_a_text_is_folded_to_words_however_narrow_a_terminal_is(self) -> None:
        lines, _ = tables.plain([tables.Column("note", wraps=True)], [["some words that wrap"]], 5)
        assert lines[1] == "-" * 12

    def test_a_long_number_is_folded_too(self) -> None:
        lines, _ = tables.plain([tables.Column("note", wraps=True)], [["1" * 30]], 20)
        assert lines[2:] == ["1" * 20, "1" * 10]

    def test_a_column_goes_where_a_text_would_have_too_little_room(self) -> None:
        columns = [tables.Column("a", expendable=1), tables.Column("note", wraps=True)]
        rows = [["12345", "word " * 20]]
        width = 5 + tables.GAP + tables.NARROW_COLUMN
        lines, left_out = tables.plain(columns, rows, width)
        assert (lines[1], left_out) == ("-----  " + "-" * tables.NARROW_COLUMN, [])
        lines, left_out = tables.plain(columns, rows, width - 1)
        assert (lines[1], left_out) == ("-" * (width - 1), ["a"])

    def test_a_column_that_never_goes_stays(self) -> None:
        """However narrow the terminal is: lines are cut there rather than columns lost."""
        columns = [tables.Column("name"), tables.Column("b", "right", expendable=1), tables.Column("c", "right")]
        lines, left_out = tables.plain(columns, [["x" * 20, "1", "2"]], 10)
        assert (lines[0].split(), left_out) == (["name", "c"], ["b"])

    def test_a_message_stands_where_figures_begin(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Also where a column before them is left out."""
        console = Console(file=io.StringIO(), width=30, force_terminal=True, color_system=None)
        monkeypatch.setattr(tables, "stdout", lambda: console)
        columns = [tables.Column("name"), tables.Column("origin", expendable=1), tables.Column("figure", "right")]
        rows = [["x", "o" * 30, "failed: at once"], ["y", "o" * 30, "1"]]
        assert tables.print_figures(columns, rows, [0], 2) == ["origin"]
        *_, failed, whole = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
        assert (failed.rstrip(), whole) == ("x     failed: at once", "y          1")

    def test_the_sources_of_strategies_fit_the_terminal(self) -> None:
        columns = [tables.Column("entry point", expendable=1), tables.Column("distribution")]
        columns += [tables.Column("strategies", wraps=True), tables.Column("problems", wraps=True)]
        row = ["entropy-scaled", "acceptlib-entropy-scaled 0.1.0", "entropy-scaled", "its hook returned accept " * 5]
        lines, left_out = tables.plain(columns, [row], 80)
        assert left_out == ["entry point"]
        assert max(map(len, lines)) <= 80

    def test_numbers_that_are_not_finite(self) -> None:
        assert json.loads(tables.to_json([{"a": math.inf, "b": [math.nan, 1.0]}])) == [{"a": None, "b": [None, 1.0]}]
        assert json.loads(tables.to_json({"a": (0.5, -math.inf)})) == {"a": [0.5, None]}
        assert tables.to_csv([{"a": math.inf, "b": [0.5, 1.0], "c": None}]) == "a,b,c\n,0.5 1.0,\n"

    def test_columns_of_csv_are_there_without_a_row(self) -> None:
        assert tables.to_csv([], ["a", "b"]) == "a,b\n"
        assert tables.to_csv([{"b": 1, "c": 2}], ["a", "b"]) == "a,b,c\n,1,2\n"

    def test_sentences_in_a_cell_are_told_apart(self) -> None:
        assert tables.to_csv([{"a": ["is not there", "nor this"], "b": ["x"]}]) == "a,b\nis not there; nor this,x\n"

    def test_letters_of_any_language_can_be_read_in_json(self) -> None:
        assert tables.to_json({"name": "Maß"}) == '{\n  "name": "Maß"\n}\n'

    def test_figures_in_markdown_keep_their_zeros_and_their_side(self) -> None:
        columns = [tables.Column("name"), tables.Column("tau", "right")]
        lines = tables.github(columns, [["a", "2.50"], ["b", "10.00"]]).splitlines()
        assert lines[2:] == ["| a      |  2.50 |", "| b      | 10.00 |"]

    def test_pipes_do_not_break_markdown(self) -> None:
        """Nor do ends of lines."""
        assert "float \\| None" in tables.github([tables.Column("type")], [["float | None"]])
        assert "| two lines |" in tables.github([tables.Column("note")], [["two\nlines"]])

    def test_a_file_is_written_whole_or_not_at_all(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "rows.json"
        path.write_text("before")

        def full(self: Path, data: bytes) -> int:
            with self.open("wb") as file:
                file.write(data[:2])
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Path, "write_bytes", full)
        with pytest.raises(acceptlib.AcceptlibError, match="No space left"):
            files.write_whole(path, "after")
        assert path.read_text() == "before"
        assert list(tmp_path.iterdir()) == [path]

    def test_a_link_is_followed_and_a_mode_kept(self, tmp_path: Path) -> None:
        path, link = tmp_path / "rows.json", tmp_path / "link.json"
        path.write_text("before")
        path.chmod(0o600)
        link.symlink_to(path.name)
        files.write_whole(link, "after")
        assert link.is_symlink()
        assert path.read_text() == "after"
        assert path.stat().st_mode & 0o777 == 0o600

    @pytest.mark.parametrize("named", [False, True], ids=["descriptor", "fifo"])
    def test_a_pipe_is_written_into(self, tmp_path: Path, *, named: bool) -> None:
        """By its name, or as /dev/stdout leads to one: it is no file to be replaced."""
        link = tmp_path / "rows.json"
        if named:
            os.mkfifo(tmp_path / "pipe")
            # One descriptor for both ends: neither side waits for the other.
            ends = [os.open(tmp_path / "pipe", os.O_RDWR)] * 2
            link.symlink_to("pipe")
        else:
            ends = [*os.pipe()]
            link.symlink_to(f"/proc/self/fd/{ends[1]}")
        try:
            os.set_blocking(ends[0], False)
            files.check_ending(link, (".json",), "--output")
            files.write_whole(link, "rows")
            assert os.read(ends[0], 10) == b"rows"
            assert link.is_symlink()
            assert not named or (tmp_path / "pipe").is_fifo()
        finally:
            for end in {*ends}:
                os.close(end)


# The worked example


def test_example_shows_rows_acceptance_and_figures() -> None:
    record = json.loads(run("show", "block", "--example", "--format", "json").stdout)["example"]
    by_tokens = {drafted["tokens"]: drafted for drafted in record["drafted"]}
    # P_1 = 0.3 / 0.5, Z = (0.6 * 0.5 - 0.2) = 0.1 and h_1 = Z / (Z + 1 - P_1); h_2 = P_2.
    assert by_tokens["ba"]["acceptance"] == pytest.approx([0.2, 0.24])
    assert by_tokens["ba"]["stops"] == pytest.approx([0.608, 0.152, 0.24])
    assert by_tokens["ba"]["chance"] == pytest.approx(0.5 * 0.5)  # under q
    assert sum(drafted["chance"] for drafted in record["drafted"]) == pytest.approx(1)
    assert record["first_token"] == pytest.approx([0.5, 0.3, 0.2])
    assert record["tv"] == pytest.approx(0, abs=1e-12)
    assert record["expected_tokens"] == pytest.approx(2.4)


def test_an_example_is_a_page_of_tables() -> None:
    lines = [line.split() for line in run("show", "lenience", "--example", "-o", "lenience=0.8").stdout.splitlines()]
    rows, drafted = (
        lines.index(["row", "a", "b", "c"]),
        lines.index(["drafted", "chance", "h1", "h2", "0", "stand", "1", "stand", "2", "stand"]),
    )
    assert lines[rows + 2 : rows + 8] == [
        ["p1", "0.5", "0.3", "0.2"],
        ["p2", "0.2", "0.5", "0.3"],
        ["p3", "0.4", "0.4", "0.2"],
        ["q1", "0.3", "0.5", "0.2"],
        ["q2", "0.5", "0.2", "0.3"],
        ["first", "token", "0.4083", "0.375", "0.2167"],
    ]
    assert lines[drafted + 2] == ["aa", "0.15", "1", "0.5", "0", "0.5", "0.5"]
    assert lines[drafted + 5] == ["ba", "0.25", "0.75", "0.5", "0.25", "0.375", "0.375"]
    assert [line[-1] for line in lines[-3:]] == ["0.1008", "0.03095", "2.531"]


def test_rounding_leaves_0_in_an_example() -> None:
    """On either side of it."""
    shown = example.Example([], [1e-17, -1e-17, 1e-11], tv=1e-16, kl=-0.00123456, expected_tokens=2.0)
    assert shown.rows()[-1] == ["first token", "0", "0", "1e-11"]
    assert [*shown.figures().values()] == ["0", "-0.001235", "2"]


@pytest.mark.parametrize("name", acceptlib.available())
def test_example_of_every_strategy(name: str) -> None:
    for form in ("plain", "github"):
        page = run("show", name, "--example", "--format", form).stdout
        assert "expected tokens a step" in page
        assert "drafted" in page


class Demanding(Rejection):
    """A third party's strategy that is nothing without an option."""

    name = "demanding"
    aliases = ()

    class Options(acceptlib.Options):
        """One without a default."""

        share: float


def test_an_example_takes_options_that_are_required(monkeypatch: pytest.MonkeyPatch) -> None:
    """All else of a strategy is shown without them too, but it says what is missing."""
    monkeypatch.setattr(registry, "find", lambda _: registry.Entry("demanding", Demanding, "third-party"))
    assert "share" in fails("show", "demanding", "--example")
    assert "share" in fails("show", "demanding", "-o", "shares=0.5")
    assert "Example" in run("show", "demanding", "--example", "-o", "share=0.5").stdout
    record = json.loads(run("show", "demanding", "-f", "json").stdout)
    assert "share" in record["problem"]
    assert (record["traits"], record["reads"], "example" in record) == ({}, [], False)
    (option,) = record["options"]
    assert (option["required"], option["default"]) == (True, None)
    assert re.search(r"share +float +required", run("show", "demanding").stdout)


def test_example_takes_options() -> None:
    figures = [
        json.loads(run("show", "lenience", "--example", "-o", f"lenience={value}", "--format", "json").stdout)
        for value in (1.0, 0.5)
    ]
    assert figures[0]["example"]["tv"] == pytest.approx(0, abs=1e-12)
    assert figures[1]["example"]["tv"] > 0.01
