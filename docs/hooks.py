"""Pages and figures of the site that are made from the code: mkdocs calls the functions at the end.

Each strategy's page comes from its docstring, its options and its exact law on a worked example; the command line's
from the commands; the home page, the changelog and the contributor's page from the files at the root.
"""

from __future__ import annotations

import inspect
import itertools
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import typer

from acceptlib import exact, hookspecs, plots, registry, rules
from acceptlib.cli import describe
from acceptlib.cli.app import GUARANTEE_ORDER, app
from acceptlib.cli.comparison import Row as ComparisonRow
from acceptlib.cli.report import NOTHING, points_of
from acceptlib.plugins import DISABLE_VARIABLE
from acceptlib.strategy import AcceptanceStrategy

ROOT: Final = Path(__file__).parent.parent
RESULTS: Final = ROOT / "bench" / "results"

ROOT_PAGES: Final = {
    "index.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
}

TOKENS: Final = ("a", "b", "c", "d")
TARGET: Final = torch.tensor(
    [[0.50, 0.25, 0.20, 0.05], [0.10, 0.60, 0.20, 0.10], [0.40, 0.30, 0.20, 0.10]], dtype=torch.float64
)
DRAFT: Final = torch.tensor([[0.20, 0.45, 0.25, 0.10], [0.30, 0.40, 0.10, 0.20]], dtype=torch.float64)


def names() -> list[str]:
    """Return the strategies, lossless ones first."""
    return sorted(registry.available(), key=lambda name: (GUARANTEE_ORDER.index(_class(name).traits.guarantee), name))


def _class(name: str) -> type[AcceptanceStrategy]:
    return registry.find(name).strategy


# The math of one strategy


def first_token(strategy: AcceptanceStrategy) -> list[float]:
    """Return the exact law of the first token of a step on the worked example."""
    found: list[float] = exact.complete(exact.law(strategy, TARGET, DRAFT), TARGET, 1).tolist()
    return found


def stands(strategy: AcceptanceStrategy) -> list[float]:
    """Return the probability that each token stands if it is drafted first, over what may be drafted after it."""
    found = []
    for first in range(len(TOKENS)):
        chance = 0.0
        for second in range(len(TOKENS)):
            law = exact.law(strategy, TARGET, DRAFT, draft_token_ids=(first, second))
            chance += float(DRAFT[1, second]) * sum(p for emitted, p in law.items() if len(emitted) > 1)
        found.append(chance)
    return found


def strategy_page(name: str) -> str:
    """Return the page of one strategy."""
    cls = _class(name)
    strategy, parts = cls(), describe.parts(cls)
    aliases = f" Also called {' and '.join(f'`{alias}`' for alias in cls.aliases)}." if cls.aliases else ""
    lines = [f"# {name}", f"{prose(parts['Summary'])}{aliases}"]
    for part, heading in (("Guarantee", "Guarantee"), ("Formula", "Formula"), ("Notes", ""), ("Source", "Source")):
        if part in parts:
            lines += [f"## {heading}"] * bool(heading) + [prose(parts[part])]
    lines += ["## Options", options_table(cls)]
    lines += ["## Worked example", worked_example(name, strategy)]
    lines += [
        "## Declared traits",
        table(["trait", "value"], [[key, value] for key, value in describe.traits(strategy).items()]),
    ]
    if reads := describe.reads(strategy):
        lines += [f"It reads {', '.join(f'`{entry}`' for entry in reads)}; see [what rules read](../rules.md)."]
    code = inspect.getsource(inspect.getmodule(cls) or cls).strip()
    lines += [
        '??? example "All of its code"',
        "    ```python\n" + re.sub(r"^(?=.)", "    ", code, flags=re.MULTILINE) + "\n    ```",
    ]
    return "\n\n".join(lines) + "\n"


def worked_example(name: str, strategy: AcceptanceStrategy) -> str:
    """Return the exact figures of a strategy on the example, beside those of rejection sampling."""
    law, out, stand = exact.law(strategy, TARGET, DRAFT), first_token(strategy), stands(strategy)
    lengths = [sum(chance for emitted, chance in law.items() if len(emitted) == length) for length in (1, 2, 3)]
    other = registry.create("rejection")
    rows = [
        [
            f"`{token}`",
            *(f"{value:.4f}" for value in (float(TARGET[0, index]), float(DRAFT[0, index]), stand[index], out[index])),
        ]
        for index, token in enumerate(TOKENS)
    ]
    figures = [
        ["expected tokens a step", _tau(strategy), _tau(other)],
        [
            "total variation from the target, three tokens",
            *(_distance(exact.tv(s, TARGET, DRAFT)) for s in (strategy, other)),
        ],
        ["Kullback-Leibler divergence, nats", *(_distance(exact.kl(s, TARGET, DRAFT)) for s in (strategy, other))],
    ]
    example = "\n".join(
        f"    {symbol} = {_row(row)}"
        for symbol, row in zip(("p1", "p2", "p3", "q1", "q2"), [*TARGET, *DRAFT], strict=True)
    )
    return "\n\n".join(
        [
            "Two drafted tokens, a vocabulary of four, options at their defaults. Rows do not depend on tokens before:",
            example,
            f'<div class="wide" markdown>\n![Law of the first token under {name}](../figures/law-{name}.svg)\n</div>',
            "The first token of a step, by enumeration in float64:",
            table(["token", "target p", "draft q", "stands if drafted", "emitted"], rows),
            f"A step emits one, two or three tokens with probability {', '.join(f'{p:.4f}' for p in lengths)}.",
            table(["", f"`{name}`", "`rejection`"], figures),
        ]
    )


def _tau(strategy: AcceptanceStrategy) -> str:
    return f"{exact.expected_tokens(strategy, TARGET, DRAFT):.4f}"


def _distance(value: float) -> str:
    return "0" if abs(value) < NOTHING else f"{value:.4f}"


def _row(row: torch.Tensor) -> str:
    return "  ".join(f"{token} {float(value):.2f}" for token, value in zip(TOKENS, row, strict=True))


def options_table(cls: type[AcceptanceStrategy]) -> str:
    """Return the options of a strategy."""
    rows = [option.cells for option in describe.options(cls)]
    if not rows:
        return "None."
    return table(
        ["option", "type", "bounds", "default", "meaning"],
        [[f"`{name}`", f"`{kind}`", bounds, f"`{default}`", text] for name, kind, bounds, default, text in rows],
    )


def prose(text: str) -> str:
    """Return a docstring's paragraph as Markdown: indices set below the line, papers linked, code left alone."""
    parts = text.split("`")
    for index in range(0, len(parts), 2):
        part = parts[index].replace("*", "\\*").replace("<", "&lt;")
        part = re.sub(r"\bsum_(\w)\b", r"sum<sub>\1</sub>", part)
        part = re.sub(r"\b([A-Za-z]+)_(?:\{([^}]*)\}|(\w)\b)", lambda m: f"*{m[1]}*<sub>{m[2] or m[3]}</sub>", part)
        parts[index] = re.sub(r"arXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", part)
    text = "`".join(parts)
    return text if text[1:2].isupper() else text[:1].upper() + text[1:]  # vLLM stays vLLM


# The command line


def command_page() -> str:
    """Return the page of the commands, from what they say of themselves."""
    group = typer.main.get_command(app)
    lines = [
        "# Command line",
        str(group.help),
        "Every command has `--help`. Errors go to stderr, in one line where the command line itself is right.",
        EXIT_CODES,
        *_parameters(group, typer.Context(group, info_name="acceptlib")),
    ]
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        lines += [f"## acceptlib {name}", str(command.help)]
        context = typer.Context(command, info_name=f"acceptlib {name}")
        lines.append("```text\n" + " ".join(["acceptlib", name, *command.collect_usage_pieces(context)]) + "\n```")
        lines += _parameters(command, context)
    return "\n\n".join(lines) + "\n"


def _parameters(command: Any, context: typer.Context) -> list[str]:
    """Return a line for each argument and option."""
    found = [parameter.get_help_record(context) for parameter in command.params]
    return [f"`{record[0]}`\n:   {record[1].replace('<', '&lt;')}" for record in found if record is not None]


EXIT_CODES: Final = (
    "Exit codes: 0 where all went well, 1 where a part of the work failed, 2 where nothing was done (a wrong "
    "option, an unknown name), 130 after Ctrl-C."
)


# Rules and the hook

RULES: Final = (
    "A rule's parameters are its declaration: it reads, by name, the quantities below, the strategy's own row sums, "
    "its per-request state and its options. `accept`, `carry`, `forgive` and `residual` read scalars; `residual` and "
    "row sums also read entries."
)


def rules_page() -> str:
    """Return the page of everything that a rule may read, and of the hook."""
    scalars = [[f"`{name}`", text] for name, text in rules.SCALARS.items()]
    elements = [[f"`{name}`", text] for name, text in rules.ELEMENTS.items()]
    hook = hookspecs.acceptlib_strategies
    return "\n\n".join(
        [
            "# What rules read",
            RULES,
            "## Scalars",
            "One a drafted position, float64; those named `is_` are flags, for `ops.where`, `&`, `|` and `~`.",
            table(["name", "what it is"], scalars),
            "## Entries",
            "One a vocabulary entry, float32; `is_drafted` is a flag.",
            table(["name", "what it is"], elements),
            "## Operations",
            "Arithmetic and comparison, and these, which mean the same in torch and inside a Triton kernel:",
            "::: acceptlib.ops\n    options:\n      show_root_heading: false\n      heading_level: 3",
            "## The hook",
            f"`{hook.__name__}()` in a package with an entry point in group `{hookspecs.NAMESPACE}`:",
            prose(inspect.cleandoc(hook.__doc__ or "")),
        ]
    ) + "\n"  # fmt: skip


def table(header: list[str], rows: list[list[str]]) -> str:
    """Return a table in Markdown. A bar within code parts no cells, and a backslash before it would show."""
    escaped = ([re.sub(r"(`[^`]*`)|\|", lambda bar: bar[1] or "\\|", cell) for cell in row] for row in rows)
    cells = [header, ["---"] * len(header), *escaped]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


# Figures


def figures() -> dict[str, Callable[[], bytes]]:
    """Return what draws each figure, by its path in the site."""
    drafted = [
        Drafted("the", 1.0, 0.31),
        Drafted("cat", 0.8, 0.54),
        Drafted("sat", 0.35, 0.72),
        Drafted("on", 0.9, 0.1),
    ]
    found: dict[str, Callable[[], bytes]] = {
        "figures/step.svg": lambda: draw_step(drafted, "ran"),
        "figures/bonus.svg": lambda: draw_step(drafted[:2], "ran"),
        "figures/row.svg": lambda: draw_row(TARGET[0].tolist(), DRAFT[0].tolist(), TOKENS),
    }
    for name in names():
        found[f"figures/law-{name}.svg"] = lambda name=name: _law(name)  # type: ignore[misc]
    for path in sorted(RESULTS.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        if path.stem == "compare":
            rows = [ComparisonRow(**row) for row in record["rows"]]
            found["figures/compare.svg"] = lambda rows=rows: plots.comparison(points_of(rows), ".svg")  # type: ignore[misc]
        elif record.get("rows"):
            found[f"figures/{path.stem}.svg"] = lambda rows=record["rows"]: plots.timings(_timings(rows), ".svg")  # type: ignore[misc]
    return found


def _law(name: str) -> bytes:
    strategy = registry.create(name)
    return draw_law(TARGET[0].tolist(), DRAFT[0].tolist(), first_token(strategy), stands(strategy), TOKENS)


def _timings(rows: list[dict[str, Any]]) -> list[plots.Timing]:
    return [
        plots.Timing(
            path=row["path"],
            name=row["name"],
            peer=row.get("peer", False),
            num_requests=row["B"],
            num_draft_tokens=row["K"],
            microseconds=row["microseconds"],
            read_floor=row.get("read_floor"),
            rows_read=row.get("rows_read"),
        )
        for row in rows
        if row.get("microseconds") is not None
    ]


def draw_row(p: Sequence[float], q: Sequence[float], names: Sequence[str]) -> bytes:
    """Draw one row of speculative sampling: what is accepted, what is rejected, what is recovered from.

    Args:
        p: The target's probabilities of a few tokens.
        q: The draft's.
        names: Of the tokens.
    """
    common = [min(pair) for pair in zip(p, q, strict=True)]
    parts = [
        ("accepted: min(p, q)", common, [0.0] * len(p), {"color": "#56b4e9"}),
        (
            "rejected: q - p",
            [y - c for y, c in zip(q, common, strict=True)],
            common,
            {"color": "white", "hatch": "////"},
        ),
        ("recovered: p - q", [x - c for x, c in zip(p, common, strict=True)], common, {"color": "#d55e00"}),
    ]

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for label, heights, bottoms, look in parts:
            axes.bar(names, heights, 0.62, bottom=bottoms, label=label, edgecolor="0.15", linewidth=0.8, **look)
        for label, values, style in (("target p", p, "-"), ("draft q", q, ":")):
            at = range(len(names))
            axes.hlines(
                values, [x - 0.42 for x in at], [x + 0.42 for x in at], "black", style, label=label, linewidth=1.8
            )
        axes.set_xlabel("token")
        axes.set_ylabel("probability")
        axes.legend(loc="upper right")

    return plots.render(draw, ".svg", (6.4, 3.4))


def draw_law(
    p: Sequence[float],
    q: Sequence[float],
    out: Sequence[float],
    stands: Sequence[float],
    names: Sequence[str],
) -> bytes:
    """Draw the law of a step's first token under a strategy beside target and draft, and what stands of the draft.

    Args:
        p: The target's probabilities of a few tokens.
        q: The draft's.
        out: The strategy's.
        stands: The probability that each stands, if it is drafted.
        names: Of the tokens.
    """

    def draw(figure: Any) -> None:
        left, right = figure.subplots(1, 2, width_ratios=(1.6, 1))
        looks = (("target p", p, "#0072b2", ""), ("emitted", out, "#e69f00", "////"), ("draft q", q, "white", ""))
        for number, (label, heights, color, hatch) in enumerate(looks):
            at = [index + 0.27 * (number - 1) for index in range(len(names))]
            left.bar(at, heights, 0.25, label=label, color=color, hatch=hatch, edgecolor="0.15", linewidth=0.8)
        left.set_xticks(range(len(names)), names)
        left.set_ylabel("probability")
        left.set_title("First token of a step")
        left.legend()
        right.bar(names, stands, 0.5, color="0.6", edgecolor="0.15", linewidth=0.8)
        right.set_ylim(0, 1.02)
        right.set_ylabel("probability that it stands")
        right.set_title("If the token is drafted")
        for axes in (left, right):
            axes.set_xlabel("token")

    return plots.render(draw, ".svg", (8.6, 3.2))


@dataclass(frozen=True, slots=True)
class Drafted:
    """One drafted token of a step.

    Attributes:
        token: Its text.
        h: The probability that it is accepted.
        u: The uniform that decided.
    """

    token: str
    h: float
    u: float


def draw_step(drafted: Sequence[Drafted], last: str) -> bytes:
    """Draw one verified step: which drafted tokens stand, and where the last token comes from.

    Args:
        drafted: The drafted tokens in order; the first with u >= h stops.
        last: Text of the recovered token, or of the bonus token where every drafted token stands.
    """
    stop = next((number for number, token in enumerate(drafted) if token.u >= token.h), len(drafted))

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        axes.set_axis_off()
        axes.set_xlim(-1.25, max(len(drafted) - 0.4, stop + 1.5))
        axes.set_ylim(-1.15, 1.0)
        for height, label in ((0.62, "drafted"), (0.0, "decision"), (-0.72, "emitted")):
            axes.text(-0.6, height, label, ha="right", va="center", color="0.4")
        accepted = {"boxstyle": "round,pad=0.35", "facecolor": "#cfe8f7", "edgecolor": "black"}
        plain = {"boxstyle": "round,pad=0.35", "facecolor": "white", "edgecolor": "0.55", "linestyle": "--"}
        final = {"boxstyle": "square,pad=0.35", "facecolor": "#f7d9c4", "edgecolor": "black", "linewidth": 1.6}
        for number, token in enumerate(drafted):
            axes.text(number, 0.62, token.token, ha="center", va="center", bbox=accepted if number < stop else plain)
            if number <= stop:
                sign, verdict = ("<", "accepted") if number < stop else ("≥", "rejected")
                weight = "normal" if number < stop else "bold"
                text = f"u = {token.u:.2f} {sign} h = {token.h:.2f}\n{verdict}"
                axes.text(number, 0.0, text, ha="center", va="center", weight=weight, fontsize="small")
            else:
                axes.text(number, 0.0, "not looked at", ha="center", va="center", color="0.4", fontsize="small")
            if number < stop:
                axes.text(number, -0.72, token.token, ha="center", va="center", bbox=accepted)
        if stop == len(drafted):
            axes.text(stop, 0.0, "all accepted", ha="center", va="center", color="0.4", fontsize="small")
        kind = "bonus token,\nfrom the row after" if stop == len(drafted) else "recovered token,\nfrom the residual"
        axes.text(stop, -0.72, last, ha="center", va="center", bbox=final)
        axes.text(stop + 0.3, -0.72, kind, ha="left", va="center", fontsize="small")

    return plots.render(draw, ".svg", (7.6, 2.4))


# Pages from the root


def from_root(name: str) -> str:
    """Return a file at the root as a page, with links to where things are in the site."""
    text = (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")
    for page, file in ROOT_PAGES.items():
        text = text.replace(f"]({file})", f"]({page})")
    return text


def pages() -> dict[str, str]:
    """Return the generated pages by path."""
    made = {f"strategies/{name}.md": strategy_page(name) for name in names()}
    made |= {page: from_root(file) for page, file in ROOT_PAGES.items()}
    return made | {"command-line.md": command_page(), "rules.md": rules_page()}


# What mkdocs calls


def on_config(config: Any) -> Any:
    """Put one entry a strategy where the navigation says `strategies`."""
    os.environ[DISABLE_VARIABLE] = "1"  # the site describes what is in the box, whatever else is installed
    for entry in config.nav:
        if entry.get("Strategies") == "strategies":
            entry["Strategies"] = [{name: f"strategies/{name}.md"} for name in names()]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages and figures."""
    from mkdocs.structure.files import File  # noqa: PLC0415 - the tests read this module without mkdocs

    for path, content in itertools.chain(pages().items(), ((path, draw()) for path, draw in figures().items())):
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Keep what belongs together in a table's cell on one line, also on a phone: `128, 7`, `at least 3`."""

    def joined(row: re.Match[str]) -> str:
        gaps = r"(?<=\d)( ±|,) (?=\d)|(?<=\bat) (least|most) (?=\d)|(?<=\d) (?=runs\b)"
        return re.sub(gaps, lambda gap: gap[0].replace(" ", "\N{NO-BREAK SPACE}"), row[0])

    return re.sub(r"^\|.*$", joined, markdown, flags=re.MULTILINE)
