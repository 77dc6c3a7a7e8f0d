"""`acceptlib generate`: text whose colours say where each token came from."""

from __future__ import annotations

import sys
import time
import unicodedata
from typing import TYPE_CHECKING, Annotated, Any, Final

import torch
import typer
from rich.console import Console  # noqa: TC002 - rich is loaded anyway
from rich.segment import Segment, Segments
from rich.table import Table
from rich.text import Text

from acceptlib.cli import models
from acceptlib.cli.console import INTERRUPTED, CommandError, complain, stdout
from acceptlib.cli.options import (
    MAX_TOKENS,
    ConfigOption,
    DeviceOption,
    DraftOption,
    MinPOption,
    OptionOption,
    SeedOption,
    TargetOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
    device_of,
    strategy_of,
)
from acceptlib.errors import AcceptlibError
from acceptlib.metrics import AcceptanceMetrics
from acceptlib.sampling import SamplingParams

if TYPE_CHECKING:
    from acceptlib.integrations.transformers import Step

STYLES: Final = {"accepted": "#0072b2", "recovered": "underline #d55e00", "bonus": "bold #aa3377"}
"""Colours that the colour-blind tell apart and that read on black and on white; underline and bold say the same."""

REPLACEMENT: Final = "\ufffd"
BAR_WIDTH: Final = 24

CONTEXT_TOKENS: Final = 8
"""Tokens that a new one is decoded with; more than any one character is split into."""


class TextStream:
    """Turns tokens into text one by one, holding back bytes that do not make a character yet.

    A token is decoded together with those before it: a byte-level tokenizer splits characters, and others put blanks
    between pieces that they would drop at the start of a text.
    """

    def __init__(self, tokenizer: Any, prompt_ids: list[int]) -> None:
        """Start after a prompt."""
        self._tokenizer = tokenizer
        self._ids = prompt_ids[-CONTEXT_TOKENS:]
        self._shown = len(self._ids)

    def add(self, token_id: int) -> str:
        """Return the text that `token_id` completes, perhaps none."""
        self._ids.append(token_id)
        return self._complete(final=False)

    def finish(self) -> str:
        """Return what was held back."""
        return self._complete(final=True)

    def _complete(self, *, final: bool) -> str:
        known = self._decode(self._ids[: self._shown])
        text = self._decode(self._ids)
        if not final and text.endswith(REPLACEMENT):
            return ""
        # The newest tokens are the context of the next one.
        self._ids = self._ids[-CONTEXT_TOKENS:]
        self._shown = len(self._ids)
        return printable(text[len(known) :])

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def printable(text: str) -> str:
    """Return `text` without control characters: a model may write any, and a terminal would obey them."""
    return "".join(letter for letter in text if letter in "\n\t" or unicodedata.category(letter) != "Cc")


def command(  # noqa: PLR0913, PLR0917 - one argument an option
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="Text to continue; - reads it from stdin.")],
    strategy: Annotated[
        str | None,
        typer.Option("--strategy", "-s", metavar="NAME", help="Name of the strategy; rejection if left out."),
    ] = None,
    config: ConfigOption = None,
    option: OptionOption = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, max=MAX_TOKENS, help="Most tokens to generate.")] = 128,
    num_draft_tokens: Annotated[int, typer.Option(min=1, help="Number of drafted tokens a step, K.")] = 4,
    temperature: TemperatureOption = 1.0,
    top_k: TopKOption = 0,
    top_p: TopPOption = 1.0,
    min_p: MinPOption = 0.0,
    seed: SeedOption = 0,
    target: TargetOption = None,
    draft: DraftOption = None,
    device: DeviceOption = "cpu",
) -> None:
    """Continue a text and show, in a terminal's colours, which tokens were accepted, recovered or drawn as a bonus."""
    chosen = strategy_of(strategy, config, option or [])
    where = device_of(device)
    sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    if prompt == "-" and sys.stdin is None:  # closed by the caller
        msg = "PROMPT: - reads the prompt from stdin, which is closed"
        raise CommandError(msg)
    text = sys.stdin.buffer.read().decode(errors="surrogateescape") if prompt == "-" else prompt
    pair = models.load(target, draft, where)
    input_ids = models.encode(pair, text)
    steps = models.steps(
        pair, chosen, input_ids, num_draft_tokens=num_draft_tokens, max_new_tokens=max_new_tokens, sampling=sampling,
        seed=seed,
    )  # fmt: skip
    console = stdout()
    metrics = AcceptanceMetrics()
    stream = TextStream(pair.tokenizer, input_ids[0].tolist())
    _print_as_it_is(console, printable(text), "dim")
    seconds, tokens, kind, interrupted = 0.0, 0, "accepted", False
    try:
        while True:
            start = time.perf_counter()
            step = next(steps, None)
            seconds += time.perf_counter() - start
            if step is None:
                break
            tokens += len(step.token_ids)
            metrics.update(step.result, torch.tensor([step.num_draft_tokens]))
            for index, token_id in enumerate(step.token_ids):
                kind = kind_of(step, index)
                _print_piece(console, stream.add(token_id), kind)
    except KeyboardInterrupt:
        interrupted = True
    except AcceptlibError:
        console.print()  # the message begins a line
        raise
    _print_piece(console, stream.finish(), kind)
    console.print("\n")
    _print_figures(console, repr(chosen), metrics, tokens, seconds)
    if interrupted:
        complain("interrupted")
        raise typer.Exit(INTERRUPTED)


def kind_of(step: Step, index: int) -> str:
    """Return whether the emitted token at `index` is `accepted`, `recovered` or `bonus`."""
    if index < step.num_accepted:
        return "accepted"
    return "bonus" if step.num_accepted == step.num_draft_tokens else "recovered"


def _print_piece(console: Console, piece: str, kind: str) -> None:
    if piece:
        # An underlined blank would look like a character.
        blanks = len(piece) - len(piece.lstrip())
        _print_as_it_is(console, piece[:blanks])
        _print_as_it_is(console, piece[blanks:], STYLES[kind])


def _print_as_it_is(console: Console, text: str, style: str = "") -> None:
    """Print without wrapping lines or expanding tabs."""
    console.print(Segments([Segment(text, console.get_style(style))]), end="", soft_wrap=True)


def _print_figures(console: Console, call: str, metrics: AcceptanceMetrics, tokens: int, seconds: float) -> None:
    if console.is_terminal:
        legend = Text("  ").join(Text(kind, style=style) for kind, style in STYLES.items())
        console.print(legend)
    console.print(Text(call, style="dim"), soft_wrap=True)
    if not metrics.num_steps:
        return
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right")
    table.add_column(style="dim")
    table.add_row(
        "tau",
        f"{tokens / metrics.num_steps:.2f}",  # without what was emitted behind the end of the text
        f"emitted tokens a step, {metrics.num_steps} step{'s' * (metrics.num_steps != 1)}",
    )
    if metrics.num_draft_tokens:
        counts = f"{metrics.num_accepted_tokens} of {metrics.num_draft_tokens} drafted tokens"
        table.add_row("accepted", f"{metrics.draft_acceptance_rate:.1%}", counts)
    table.add_row("speed", f"{tokens / seconds:.0f}", "tokens per second")
    console.print(table)
    if not metrics.drafted_at:
        return
    console.print("\nacceptance by position")
    for position, share in enumerate(metrics.acceptance_by_position, start=1):
        bar = "█" * round(share * BAR_WIDTH)
        console.print(f"{position:3}  {share:6.1%}  {bar}")
