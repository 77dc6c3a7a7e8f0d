"""Figures, from plain data to the bytes of a file. matplotlib is an extra and is imported when a figure is drawn."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

ENDINGS: Final = (".png", ".svg", ".pdf")

SIZE: Final = (11.0, 4.6)
"""Inches; two panels side by side."""

DOTS_PER_INCH: Final = 160

STYLE: Final[Any] = {
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "lines.markersize": 6.5,
    "svg.hashsalt": "acceptlib",  # equal figures make equal files
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
}

# Okabe and Ito's palette, darkest hues first, and three more. Markers and dashes tell the same apart without colour.
COLORS: Final = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#000000",
    "#cc79a7",
    "#56b4e9",
    "#e69f00",
    "#7f7f7f",
    "#882255",
    "#999933",
)
MARKERS: Final = ("o", "s", "^", "D", "v", "P", "<", "*", ">", "X", "h")
DASHES: Final[tuple[Any, ...]] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (7, 2)), (0, (1, 1)), (0, (3, 3)))
FRONT_COLOR: Final = "0.6"
TEXT_COLOR: Final = "0.15"

TV_DIGITS: Final = 12
"""Decimals of a TV that count: a lossless rule's is some 1e-16, by rounding."""
MIN_TV: Final = 0.1
"""Up to which TVs are shown at least, though all are 0."""
NAME_OFFSET: Final = 9.0
"""Typographic points from a marker to its name."""

LINE_HEIGHT: Final = 11.5
"""Typographic points between two names."""


@dataclass(frozen=True, slots=True)
class Point:
    """One strategy at one draft length.

    Attributes:
        strategy: Its name.
        guarantee: `lossless`, `greedy` or `lossy`.
        num_draft_tokens: K.
        tau: Emitted tokens a step.
        tau_error: Its standard error.
        tv: Total variation from the target.
        acceptance_by_position: Share of steps in which each drafted position stood.
    """

    strategy: str
    guarantee: str
    num_draft_tokens: int
    tau: float
    tau_error: float
    tv: float
    acceptance_by_position: tuple[float, ...]


def comparison(points: Sequence[Point], ending: str) -> bytes:
    """Draw tokens a step against distance from the target, and acceptance by position.

    Args:
        points: At least one.
        ending: One of `ENDINGS`.
    """
    looks = _looks([point.strategy for point in points])

    def draw(figure: Any) -> None:
        left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
        _draw_trade(left, points, looks)
        _draw_positions(right, points, looks)

    return render(draw, ending, SIZE)


def render(draw: Callable[[Any], None], ending: str, size: tuple[float, float]) -> bytes:
    """Return what `draw` draws on a matplotlib figure of `size` inches, as the bytes of a file."""
    import matplotlib as mpl  # noqa: PLC0415 - an extra
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=size)
        figure.set_layout_engine("constrained", wspace=0.06, hspace=0.08)
        FigureCanvasAgg(figure)
        draw(figure)
        file = io.BytesIO()
        # No date, so that equal figures make equal files.
        metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(ending, {})
        figure.savefig(file, format=ending[1:], dpi=DOTS_PER_INCH, metadata=metadata)
    return file.getvalue()


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """Return the points that no other one beats in both tau (more) and TV (less, beyond rounding), by rising TV."""
    front: list[Point] = []
    for point in sorted(points, key=lambda point: (round(point.tv, TV_DIGITS), -point.tau)):
        if not front or point.tau > front[-1].tau:
            front.append(point)
    return front


def _looks(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return a colour, a marker and dashes for each name, the same in all panels."""
    names = list(dict.fromkeys(names))
    return {
        name: {
            "color": COLORS[number % len(COLORS)],
            "marker": MARKERS[number % len(MARKERS)],
            "linestyle": DASHES[number % len(DASHES)],
        }
        for number, name in enumerate(names)
    }


def _largest(points: Sequence[Point]) -> list[Point]:
    """Return each strategy's point with the longest draft."""
    best: dict[str, Point] = {}
    for point in points:
        if point.strategy not in best or point.num_draft_tokens > best[point.strategy].num_draft_tokens:
            best[point.strategy] = point
    return list(best.values())


def _draw_trade(axes: Any, points: Sequence[Point], looks: dict[str, dict[str, Any]]) -> None:
    from matplotlib.patheffects import withStroke  # noqa: PLC0415 - an extra

    halo = withStroke(linewidth=2.5, foreground="white")  # keeps a name legible across another rule's error bar
    largest = _largest(points)
    for point in largest:
        look = looks[point.strategy]
        axes.errorbar(
            [point.tv], [point.tau], yerr=[point.tau_error], color=look["color"], marker=look["marker"],
            markerfacecolor=_face(point, look), markeredgewidth=1.4, elinewidth=1.0, zorder=3,
        )  # fmt: skip
    axes.set_xlabel("mean total variation from the target (0 to 1)")
    axes.set_ylabel("tau: emitted tokens a step (± 1 standard error)")
    lengths = sorted({point.num_draft_tokens for point in largest})
    axes.set_title("Tokens against fidelity, K = " + ", ".join(map(str, lengths)))
    axes.margins(x=0.06, y=0.1)
    low, high = axes.get_xlim()
    high = max(high, MIN_TV)
    high += 0.18 * (high - low)  # room for the names
    axes.set_xlim(low, high)
    front = pareto_front(largest)
    x, y = [point.tv for point in front], [point.tau for point in front]
    axes.plot([*x, high], [*y, y[-1]], drawstyle="steps-post", color=FRONT_COLOR, linewidth=1.0, zorder=1)
    axes.annotate(
        "Pareto front", (high, y[-1]), xytext=(0, 4), textcoords="offset points", ha="right",
        va="bottom", color="0.4", fontsize="small",
    )  # fmt: skip
    for point, height in _spread(axes, largest):
        axes.annotate(
            point.strategy, (point.tv, point.tau), xytext=(NAME_OFFSET, height), textcoords="offset points",
            va="center", color=TEXT_COLOR, path_effects=[halo], zorder=4,
        )  # fmt: skip


def _spread(axes: Any, points: Sequence[Point]) -> list[tuple[Point, float]]:
    """Return each point with the height of its name over it, in typographic points, so that no two names overlap."""
    axes.figure.draw_without_rendering()  # only now are data coordinates final
    scale = 72.0 / axes.figure.dpi
    placed: list[tuple[float, float, float]] = []
    offsets: list[tuple[Point, float]] = []
    for point in sorted(points, key=lambda point: point.tau, reverse=True):
        x, y = (float(value) * scale for value in axes.transData.transform((point.tv, point.tau)))
        end = x + NAME_OFFSET + 6.0 * len(point.strategy)
        # Below the line of the front, which runs through the points on it.
        height = y - LINE_HEIGHT / 1.6 if point in pareto_front(points) else y
        while any(x < right and left < end and abs(height - other) < LINE_HEIGHT for left, right, other in placed):
            height -= 1.0
        placed.append((x, end, height))
        offsets.append((point, height - y))
    return offsets


def _face(point: Point, look: dict[str, Any]) -> str:
    """Return the colour inside a marker: filled where the rule is lossless."""
    return str(look["color"]) if point.guarantee == "lossless" else "white"


def _draw_positions(axes: Any, points: Sequence[Point], looks: dict[str, dict[str, Any]]) -> None:
    longest = max(point.num_draft_tokens for point in points)
    for point in points:
        if point.num_draft_tokens != longest:
            continue
        look = looks[point.strategy]
        axes.plot(
            range(1, longest + 1), point.acceptance_by_position, label=point.strategy,
            markerfacecolor=_face(point, look), markeredgewidth=1.4, **look,
        )  # fmt: skip
    axes.set_xlabel("drafted position")
    axes.set_ylabel("share of steps in which it stood")
    axes.set_title(f"Acceptance by position, K = {longest}")
    axes.set_xticks(range(1, longest + 1, max(1, math.ceil(longest / 12))))
    axes.set_ylim(0, 1.02)
    legend = axes.legend(
        loc="center left", bbox_to_anchor=(1.0, 0.5), handlelength=3.4, labelspacing=0.7,
        title="filled: lossless\nopen: not lossless",
    )  # fmt: skip
    legend.get_title().set_fontsize("small")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One strategy or other library on one workload.

    Attributes:
        path: What is verified from what; each path has panels of its own.
        name: Of the strategy or library.
        peer: Whether it is another library.
        num_requests: B.
        num_draft_tokens: K.
        microseconds: Of one call.
        read_floor: Microseconds of reading what the step has to read; None for another library.
        rows_read: How many rows of a request that is.
    """

    path: str
    name: str
    peer: bool
    num_requests: int
    num_draft_tokens: int
    microseconds: float
    read_floor: float | None = None
    rows_read: int | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """B and K."""
        return self.num_requests, self.num_draft_tokens


def timings(rows: Sequence[Timing], ending: str) -> bytes:
    """Draw time against batch, with the read floor and other libraries, and the share of the floor where one is known.

    Args:
        rows: At least one.
        ending: One of `ENDINGS`.
    """
    paths = list(dict.fromkeys(row.path for row in rows))
    looks = _looks([row.name for row in rows])
    draws = [_draw_times, _draw_shares] if any(row.read_floor for row in rows) else [_draw_times]

    def draw(figure: Any) -> None:
        panels = figure.subplots(len(paths), len(draws), squeeze=False)
        for line, path in zip(panels, paths, strict=True):
            here = [row for row in rows if row.path == path]
            shapes = sorted({row.shape for row in here})
            for axes, panel in zip(line, draws, strict=True):
                panel(axes, here, shapes, looks)
            line[0].set_title(f"Time, from {path}")
            for axes in line:
                axes.set_xticks(range(len(shapes)), [f"{size}, {length}" for size, length in shapes])
                axes.set_xlabel("batch: requests B, drafted tokens of each K")
                axes.margins(x=0.04)
                axes.grid(axis="y", color="0.9", linewidth=0.7)
                axes.set_axisbelow(True)

    return render(draw, ending, (SIZE[0] * len(draws) / 2, SIZE[1] * len(paths)))


def _draw_times(
    axes: Any, rows: Sequence[Timing], shapes: Sequence[tuple[int, int]], looks: dict[str, dict[str, Any]]
) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter  # noqa: PLC0415 - an extra

    for name in dict.fromkeys(row.name for row in rows):
        mine = {row.shape: row.microseconds for row in rows if row.name == name}
        peer = any(row.peer for row in rows if row.name == name)
        axes.plot(
            [shapes.index(shape) for shape in mine], list(mine.values()), label=name, markeredgewidth=1.4,
            markerfacecolor="white" if peer else looks[name]["color"], **looks[name],
        )  # fmt: skip
    floors: dict[str, dict[tuple[int, int], float]] = {}
    for row in rows:
        if row.read_floor is not None and row.rows_read is not None:
            every = row.rows_read > 2  # noqa: PLR2004 - more than the rows of one position
            label = (
                "read floor: every row"
                if every
                else f"read floor: {row.rows_read} row{'s' * (row.rows_read > 1)} a request"
            )
            floors.setdefault(label, {})[row.shape] = row.read_floor
    for number, (label, floor) in enumerate(sorted(floors.items())):
        axes.plot(
            [shapes.index(shape) for shape in floor], list(floor.values()), label=label, color="0.55",
            linestyle=("-", (0, (2, 1)), (0, (1, 2)))[number % 3], linewidth=3.2, zorder=1,
        )  # fmt: skip
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))  # a decade alone would have one label
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel("microseconds a call (logarithmic)")
    legend = axes.legend(
        loc="center left", bbox_to_anchor=(1.0, 0.5), handlelength=3.4, labelspacing=0.6,
        title="open: for comparison" if any(row.peer for row in rows) else None,
    )  # fmt: skip
    legend.get_title().set_fontsize("small")


def _draw_shares(
    axes: Any, rows: Sequence[Timing], shapes: Sequence[tuple[int, int]], looks: dict[str, dict[str, Any]]
) -> None:
    for name in dict.fromkeys(row.name for row in rows if row.read_floor is not None):
        mine = {
            shapes.index(row.shape): 100 * row.read_floor / row.microseconds
            for row in rows
            if row.name == name and row.read_floor is not None
        }
        axes.plot(list(mine), list(mine.values()), **looks[name])
    low, high = axes.get_ylim()
    axes.set_ylim(0, 1.08 * max(high, low))  # room for the topmost markers
    axes.set_ylabel("read floor / time (%)")
    axes.set_title("Read floor as a share of the time")
