"""From many numbers to the few that are shown: spreads, intervals, slopes, tables and plots in plain text.

Nothing here knows what was measured. No NumPy: the benchmarks run wherever relight runs.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

RESAMPLES = 4000


def percentile(values: Sequence[float], share: float) -> float:
    """The least value that at least `share` of all values do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def spread(values: Sequence[float], digits: int = 6) -> dict[str, float]:
    """Samples, median, 95th percentile, least and greatest; only `samples` if there are none."""
    if not values:
        return {"samples": 0}
    figures = {
        "median": statistics.median(values),
        "p95": percentile(values, 0.95),
        "min": min(values),
        "max": max(values),
    }
    return {"samples": len(values), **{name: round(value, digits) for name, value in figures.items()}}


def median_interval(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """A 95 % confidence interval of the median: percentiles of the medians of resampled values (bootstrap)."""
    draw = random.Random(seed)
    medians = [statistics.median(draw.choices(values, k=len(values))) for _ in range(RESAMPLES)]
    return percentile(medians, 0.025), percentile(medians, 0.975)


def median_of_groups(groups: Sequence[Sequence[float]]) -> float:
    """The median of the groups' medians."""
    return statistics.median(statistics.median(group) for group in groups)


def groups_interval(groups: Sequence[Sequence[float]], seed: int = 0) -> tuple[float, float]:
    """A 95 % confidence interval of that, where values of a group have something in common: groups are resampled too.

    With a single group, that of its median.
    """
    draw = random.Random(seed)
    found = [
        median_of_groups([draw.choices(group, k=len(group)) for group in draw.choices(groups, k=len(groups))])
        for _ in range(RESAMPLES)
    ]
    return percentile(found, 0.025), percentile(found, 0.975)


@dataclass(frozen=True)
class Line:
    """A least-squares line."""

    slope: float
    slope_error: float  # standard error; neighbouring samples are not independent, so it is a lower bound
    intercept: float


def fit_line(xs: Sequence[float], ys: Sequence[float]) -> Line | None:
    """The line through (xs, ys); None with fewer than three points or a single x."""
    if len(xs) < 3:
        return None
    middle_x, middle_y = statistics.fmean(xs), statistics.fmean(ys)
    width = sum((x - middle_x) ** 2 for x in xs)
    if width == 0:
        return None
    slope = sum((x - middle_x) * (y - middle_y) for x, y in zip(xs, ys, strict=True)) / width
    intercept = middle_y - slope * middle_x
    rest = sum((y - intercept - slope * x) ** 2 for x, y in zip(xs, ys, strict=True))
    return Line(slope, math.sqrt(rest / (len(xs) - 2) / width), intercept)


# ---------------------------------------------------------------- text


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def ways_table(names: Mapping[str, str], figures: Mapping[str, Any], rate_name: str = "GiB/s") -> str:
    """Every way of moving `total_bytes`, beside relight's: median, range and speed, as a table in Markdown."""
    rows = [
        [
            names[way],
            f"{median:.3f} s",
            f"{min(figures['seconds'][way]):.3f} to {max(figures['seconds'][way]):.3f}",
            f"{figures['total_bytes'] / median / 2**30:.2f}",
            f"{median / figures['median_s']['relight']:.2f}",
        ]
        for way, median in figures["median_s"].items()
    ]
    return markdown_table(["way", "median", "range", rate_name, "times relight"], rows)


def milliseconds(seconds: float | None) -> str:
    """A duration for a table, with as many digits as it deserves."""
    if seconds is None:
        return "–"
    value = seconds * 1e3
    return f"{value:.2f} ms" if value < 10 else f"{value:.1f} ms" if value < 100 else f"{value:.0f} ms"


def spread_cell(figures: dict[str, float]) -> str:
    """Median, 95th percentile and greatest of a spread of seconds."""
    if not figures.get("samples"):
        return "–"
    return " / ".join(milliseconds(figures[name]) for name in ("median", "p95", "max"))


def mebibytes(size: float) -> str:
    """A size for a table."""
    return f"{size / 2**20:.1f} MiB"


@dataclass(frozen=True)
class Series:
    """Points of one mark in a plot."""

    mark: str
    name: str
    points: Sequence[tuple[float, float]]


def plot(series: Sequence[Series], *, x_name: str, y_name: str, height: int = 14, width: int = 64) -> str:
    """Points over a logarithmic x axis, in characters; a later series covers an earlier one."""
    points = [point for one in series for point in one.points if point[0] > 0]
    if not points:
        return "(nothing to plot)"
    left, right = (math.log(edge(x for x, _ in points)) for edge in (min, max))
    low, high = min(0.0, *(y for _, y in points)), max(y for _, y in points)
    if high <= low:
        high = low + 1.0
    grid = [[" "] * (width + 1) for _ in range(height + 1)]
    for one in series:
        for x, y in one.points:
            column = round((math.log(x) - left) / ((right - left) or 1.0) * width)
            grid[height - round((y - low) / (high - low) * height)][column] = one.mark
    labels = [f"{high - (high - low) * row / height:8.2f}" if row % 2 == 0 else " " * 8 for row in range(height + 1)]
    lines = [f"{label} |{''.join(row).rstrip()}" for label, row in zip(labels, grid, strict=True)]
    axis = f"{math.exp(left):.3g}".ljust(width - 4) + f"{math.exp(right):.3g}"
    legend = ", ".join(f"{one.mark}: {one.name}" for one in series)
    return "\n".join([y_name, *lines, " " * 8 + " +" + "-" * (width + 1), " " * 10 + axis, f"{x_name}   ({legend})"])
