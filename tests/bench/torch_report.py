"""What torch_bench.py measured, as a table and as a plot."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path

LABELS = {
    "untiled": "PyTorch, untiled",
    "tiled": "DeepSpeed TiledMLP",
    "remote": "shardmlp",
    "stash": "shardmlp, stash",
}


@dataclass
class Row:
    """One contender at one length. None where it was not measured; ``too_large`` where memory did not do."""

    dtype: str
    tokens: int
    name: str
    too_large: bool = False
    rate: float | None = None
    over_untiled: list[float] | None = None
    over_tiled: list[float] | None = None
    trainer_mib: float | None = None
    server_mib: float | None = None
    error: float | None = None


def spread(ratios: list[float] | None) -> str:
    """Median and range."""
    if not ratios:
        return ""
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def table(rows: list[Row]) -> str:
    """In Markdown, aligned."""
    header = ["", "tokens", "MLP", "tokens/s", "over untiled", "over tiled", "trainer MiB", "server MiB", "error"]
    cells = [
        [
            row.dtype,
            str(row.tokens),
            LABELS[row.name],
            "out of memory" if row.too_large else number(row.rate, ".0f"),
            spread(row.over_untiled),
            spread(row.over_tiled),
            number(row.trainer_mib, ".0f"),
            number(row.server_mib, ".0f"),
            number(row.error, ".1e"),
        ]
        for row in rows
    ]
    return aligned(header, cells)


def aligned(header: list[str], cells: list[list[str]]) -> str:
    widths = [max(3, *map(len, column)) for column in zip(header, *cells)]
    lines = [header, ["-" * width for width in widths], *cells]
    return "\n".join("| " + " | ".join(c.ljust(w) for c, w in zip(line, widths)) + " |" for line in lines)


def plot(rows: list[Row], path: Path) -> None:
    """A row of panels a dtype: speed over untiled, trainer's memory, gradient's error; each over tokens."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    dtypes = list(dict.fromkeys(row.dtype for row in rows))
    figure, axes = pyplot.subplots(len(dtypes), 3, figsize=(11, 3.2 * len(dtypes)), squeeze=False, sharex=True)
    for dtype, (speed, memory, error) in zip(dtypes, axes):
        for color, (name, label) in enumerate(LABELS.items()):
            own = [row for row in rows if (row.dtype, row.name) == (dtype, name)]
            draw(speed, label, color, [(r.tokens, statistics.median(r.over_untiled)) for r in own if r.over_untiled])
            draw(memory, label, color, [(r.tokens, r.trainer_mib) for r in own if r.trainer_mib is not None])
            draw(error, label, color, [(r.tokens, r.error) for r in own if r.error is not None])
        speed.set(title=f"{dtype}: tokens/s over untiled", ylim=(0, None))
        memory.set(title=f"{dtype}: trainer's peak, MiB", yscale="log")
        error.set(title=f"{dtype}: weight gradients' error", yscale="log")
    for axis in axes[-1]:
        axis.set(xlabel="tokens")
        axis.set_xscale("log", base=2)
    for axis in figure.axes:
        axis.set_visible(bool(axis.lines))  # of what was not measured, none
    axes[-1][-1].legend(*axes[0][-1].get_legend_handles_labels(), fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def draw(axis, label: str, color: int, points: list[tuple[int, float]]) -> None:
    if points:
        axis.plot(*zip(*points), "o-", label=label, color=f"C{color}", markersize=4)
