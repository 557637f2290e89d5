"""Panels as a picture."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from panels import Panel

BACKGROUND, FACE, INK, GRID = "#111217", "#181b1f", "#ccccdc", "#2c3235"
COLOURS = ["#73bf69", "#f2cc0c", "#5794f2", "#ff9830", "#f2495c", "#b877d9", "#37872d", "#e0b400", "#1f60c4", "#fa6400"]
LEGEND_CHARACTERS = 80  # in a line below the narrowest panel
COLUMNS, INCHES_WIDE, INCHES_A_ROW = 24, 19, 0.42
SIZES = [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, ""), (1e-3, "m"), (1e-6, "µ")]
UNITS = {"s": "s", "Bps": "B/s", "bytes": "B", "flops": "FLOP/s", "none": "", "": ""}


def written(value: float, unit: str) -> str:
    if unit == "percentunit":
        return f"{100 * value:.3g} %"
    size, prefix = next(((s, p) for s, p in SIZES if abs(value) >= s), (1, ""))
    space = " " if prefix or UNITS[unit] else ""
    return f"{value / size:.3g}{space}{prefix}{UNITS[unit]}"


def render(panels: list[Panel], begin: float, title: str, to: Path) -> None:
    """Each where Grafana has it; times in seconds from ``begin``."""
    height = max(panel.place["y"] + panel.place["h"] for panel in panels) + 1
    figure = plt.figure(figsize=(INCHES_WIDE, height * INCHES_A_ROW), facecolor=BACKGROUND)
    figure.text(0.008, 1 - 0.6 / height, title, color=INK, fontsize=13, weight="bold", va="center")
    for panel in panels:
        x, y, w, h = (panel.place[side] for side in "xywh")
        top = 1 - (y + 1) / height
        if panel.kind == "row":
            figure.text(0.008, top - 0.5 / height, panel.title, color=INK, fontsize=11, weight="bold", va="center")
            continue
        left, bottom = x / COLUMNS, top - h / height
        inner = (left + 0.035, bottom + 1.9 / height, w / COLUMNS - 0.045, (h - 3.0) / height)
        if panel.kind == "stat":
            inner = (left + 0.004, bottom + 0.2 / height, w / COLUMNS - 0.008, (h - 0.4) / height)
        axes = figure.add_axes(inner, facecolor=FACE)
        _frame(axes)
        if panel.kind == "stat":
            _stat(axes, panel)
        else:
            _curves(axes, panel, begin)
    figure.savefig(to, dpi=75, facecolor=BACKGROUND)
    plt.close(figure)


def _stat(axes: Axes, panel: Panel) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    axes.text(0.03, 0.9, panel.title, color=INK, fontsize=9, va="top", transform=axes.transAxes)
    for curve in panel.curves[:1]:
        value = written(curve.values[-1], panel.unit)
        axes.text(0.5, 0.48, value, color=COLOURS[0], fontsize=20, ha="center", va="center", transform=axes.transAxes)


def _curves(axes: Axes, panel: Panel, begin: float) -> None:
    axes.set_title(panel.title, color=INK, fontsize=9, loc="left")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: written(value, panel.unit)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f} s"))
    axes.tick_params(colors=INK, labelsize=7, length=0)
    axes.grid(color=GRID, linewidth=0.6)
    floor: dict[float, float] = {}  # by time, where curves are stacked
    for index, curve in enumerate(panel.curves):
        colour = COLOURS[index % len(COLOURS)]
        times = [at - begin for at in curve.times]
        lower = [floor.get(at, 0.0) if panel.stacked else 0.0 for at in curve.times]
        upper = [low + value for low, value in zip(lower, curve.values, strict=True)]
        axes.plot(times, upper, color=colour, linewidth=1.2, label=curve.legend)
        if panel.stacked:
            axes.fill_between(times, lower, upper, color=colour, alpha=0.4, linewidth=0)
            floor.update(zip(curve.times, upper, strict=True))
    axes.set_ylim(bottom=0)
    axes.margins(x=0)
    longest = max((len(curve.legend) for curve in panel.curves), default=1)
    columns = max(1, min(4, LEGEND_CHARACTERS // max(longest, 1)))
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(-0.08, -0.13),
        ncol=columns,
        fontsize=6.5,
        frameon=False,
        labelcolor=INK,
        handlelength=1,
        columnspacing=0.9,
        borderaxespad=0,
    )


def _frame(axes: Axes) -> None:
    for side in axes.spines.values():
        side.set_color(GRID)
