"""Write the records of bench/results into the pages: `python bench/render.py`.

A page names a record where its tables belong, `<!-- record: NAME -->` to `<!-- /record -->`. What stands between is
made from `bench/results/NAME.json`, and a test fails where it is not. `<!-- summary: NAME -->` to `<!-- /summary -->`
is one table of all that has a goal. The figures are drawn when the site is built.

A record says machine, versions and commit, and may have a `note`. `compare.json` is what `acceptlib compare --output`
writes; any other has `rows`, as `acceptlib bench --output FILE.json` writes them, or `ratios`, as `make record` does.
A row needs `path`, `name`, `B`, `K` and `microseconds`; `peer` marks another library, and `goal` is the least ratio of
speeds to it; `beside` names another path, and `most` is the largest ratio of times to it; `vocab_size`, `dtype`,
`read_floor`, `rows_read`, `host_microseconds`, `mean_emitted` and `match` are shown where they are given.
"""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any, Final

from acceptlib.benchmarks.environment import OTHERS
from acceptlib.cli import comparison, report
from acceptlib.cli.files import write_whole

ROOT: Final = Path(__file__).parent.parent
RESULTS: Final = ROOT / "bench" / "results"
PAGES: Final = (ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in ("performance", "records")))
MARKED: Final = re.compile(r"(<!-- (record|summary): ([\w-]+) -->\n).*?(<!-- /\2 -->)", re.DOTALL)

Record = dict[str, Any]


def page(text: str) -> str:
    """Return a page with its records filled in."""
    return MARKED.sub(lambda match: match[1] + of_file(match[3], match[2]) + match[4], text)


def of_file(name: str, kind: str) -> str:
    """Return what a page shows of one file of `bench/results`: the record or its summary."""
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return "Not recorded yet.\n\n"
    content = json.loads(path.read_text(encoding="utf-8"))
    if name == "compare":
        rows = [comparison.Row(**row) for row in content["rows"]]
        return f"{report.github(rows)}\n{_origin(name, content)}\n"
    return section(name, content) if kind == "record" else summary(content)


def summary(record: Record) -> str:
    """Return a table of the ratios that have goals: paths as rows, batches as columns, bold where a goal is missed."""
    ours = [row for row in record["rows"] if not row.get("peer")]
    shapes = sorted({(row["B"], row["K"]) for row in ours})
    lines, reached, total = [], 0, 0
    for path in dict.fromkeys(row["path"] for row in ours):
        here = {(row["B"], row["K"]): row for row in ours if row["path"] == path}
        for kind in ("goal", "most"):
            timed = {shape: row for shape, row in here.items() if row.get(kind) and row["microseconds"]}
            ratios = {shape: _ratio(row, kind, record["rows"]) for shape, row in timed.items()}
            if not ratios:
                continue
            met = {shape: (here[shape][kind] <= ratio) == (kind == "goal") for shape, ratio in ratios.items()}
            total, reached = total + len(met), reached + sum(met.values())
            first = here[min(ratios)]
            peer = next((row["name"] for row in record["rows"] if row.get("peer") and row["path"] == path), "")
            what = f"speed of {peer}" if kind == "goal" else f"time of {first['beside']}, at most {first['most']:g}"
            cells = ["-" if shape not in ratios else f"{ratios[shape]:.2f}" for shape in shapes]
            cells = [cell if met.get(shape, True) else f"**{cell}**" for shape, cell in zip(shapes, cells, strict=True)]
            lines.append([path, what, *cells])
    header = ["from", "times the", *(f"{num_requests}, {length}" for num_requests, length in shapes)]
    machine = f"{record['machine']}, commit `{record['commit'][:12]}`"
    rest = ", the others in bold" if reached < total else ""
    return f"{machine}: {reached} of {total} goals reached{rest}.\n\n{_table(header, lines)}\n\n"


def _ratio(row: Record, kind: str, rows: list[Record]) -> float:
    """Return the speed of a row beside its peer's (`goal`), or its time beside that of another path (`most`)."""
    if kind == "goal":
        found = [other for other in rows if other.get("peer") and other["path"] == row["path"]]
        peer = next(other for other in found if (other["B"], other["K"]) == (row["B"], row["K"]))
        speed: float = peer["microseconds"] / row["microseconds"]
        return speed
    beside = next(other for other in rows if _same_batch(other, row) and other["path"] == row["beside"])
    time: float = row["microseconds"] / beside["microseconds"]
    return time


def section(name: str, record: Record) -> str:
    """Return what a page shows of one record."""
    parts = [_origin(name, record)]
    if "note" in record:
        parts.append(record["note"])
    if "ratios" in record:
        parts.append(_ratios(record["ratios"]))
    rows = record.get("rows", [])
    for path in dict.fromkeys(row["path"] for row in rows):
        here = [row for row in rows if row["path"] == path]
        parts += [f"**From {path}**, {_setting(here)}", _times(here, rows)]
    if rows:
        parts.append(f'<div class="wide" markdown>\n![Time against batch](figures/{name}.svg)\n</div>')
    return "\n\n".join(parts) + "\n\n"


def _origin(name: str, record: Record) -> str:
    """Return on what and with what a record was made."""
    keys = ("acceptlib", "torch", "triton", *OTHERS, "cuda", "driver")
    versions = [f"{key} {record[key]}" for key in keys if record.get(key)]
    commit = f"commit `{record['commit'][:12]}`" if record.get("commit") else "no commit"
    return f"{record['machine']}; {', '.join(versions)}; {commit}. Record: `bench/results/{name}.json`."


def _setting(rows: list[Record]) -> str:
    """Return what all rows have in common, and whether their results were right."""
    vocab_sizes = sorted({row["vocab_size"] for row in rows if "vocab_size" in row})
    dtypes = sorted({row["dtype"] for row in rows if "dtype" in row})
    parts = [f"V = {' and '.join(map(str, vocab_sizes))}"] * bool(vocab_sizes) + dtypes
    wrong = [row["name"] for row in rows if row.get("match") is False]
    assert not wrong, f"times of wrong results: {wrong}"
    checked = all(row.get("match") for row in rows if not row.get("peer"))
    return ", ".join([*parts, "each result checked first:" if checked else "not every result could be checked:"])


def _times(rows: list[Record], record: list[Record]) -> str:
    """Return a table: batches and strategies as rows, the read floor, the peers and another path as columns."""
    ours = [row for row in rows if not row.get("peer")]
    peers = list(dict.fromkeys(row["name"] for row in rows if row.get("peer")))
    theirs = {(row["name"], row["B"], row["K"]): row["microseconds"] for row in rows if row.get("peer")}
    several = len({row["name"] for row in ours}) > 1
    optional = (
        ("tau", "mean_emitted", ".2f"),
        ("host us", "host_microseconds", ".0f"),
    )
    shown = [column for column in optional if any(row.get(column[1]) is not None for row in ours)]
    floors = ["times floor"] * any(row.get("read_floor") for row in ours)
    header = ["B, K", *["strategy"] * several, *(label for label, _, _ in shown), "us", *floors]
    for peer in peers:
        header += [f"{peer} us", "times ours"]
    lines = []
    goals = bool(peers) and any(row.get("goal") for row in ours)
    header += ["goal"] * goals
    besides = dict.fromkeys(row["beside"] for row in rows if row.get("beside"))
    for beside in besides:
        header += [f"times {beside}", "at most"]
    for row in sorted(ours, key=lambda row: (row["B"], row["K"])):
        time, floor = row["microseconds"], row.get("read_floor")
        cells = [f"{row['B']}, {row['K']}", *[f"`{row['name']}`"] * several]
        cells += [_number(row.get(key), how) for _, key, how in shown]
        cells.append(_number(time, ".1f"))
        if floors:
            cells.append(_number(time / floor if floor and time else None, ".2f"))
        for peer in peers:
            other = theirs.get((peer, row["B"], row["K"]))
            cells += [_number(other, ".1f"), _number(other / time if other and time else None, ".2f")]
        cells += [_number(row.get("goal"), "g")] * goals
        for beside in besides:
            found = [other["microseconds"] for other in record if _same_batch(other, row) and other["path"] == beside]
            ratio = time / found[0] if found and found[0] and time else None
            cells += [_number(ratio, ".2f"), _number(row.get("most"), "g")]
        lines.append(cells)
    return _table(header, lines)


def _same_batch(other: Record, row: Record) -> bool:
    """Return whether a row is ours, on a batch of the same size."""
    return not other.get("peer") and (other["B"], other["K"]) == (row["B"], row["K"])


def _ratios(ratios: list[Record]) -> str:
    lines = []
    for entry in ratios:
        runs = sorted(entry["runs"])
        how = ".2f" if runs[-1] < 10 else ".1f"
        spread = f"{_number(runs[0], how)} to {_number(runs[-1], how)}, {len(runs)} runs"
        lines.append([entry["name"], entry["goal"], _number(statistics.median(runs), how), spread])
    return _table(["figure", "goal", "median", "runs"], lines)


def _number(value: float | None, how: str) -> str:
    return "-" if value is None else format(value, how)


def _table(header: list[str], lines: list[list[str]]) -> str:
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


if __name__ == "__main__":
    for path in PAGES:
        write_whole(path, page(path.read_text(encoding="utf-8")))
