"""The tables about predicted memory, for ``render_results.py``."""

from __future__ import annotations

import statistics
from typing import Any

from tables import Rows, spread, table

from lowtide.core.units import format_bytes


def _errors(row: dict[str, Any]) -> list[str]:
    return [
        f"{row[key]:.2f} %"
        for key in ("median_error_percent", "p95_error_percent", "largest_error_percent")
    ]


def memory_grid_summary(rows: Rows) -> str:
    """Errors and bounds over all rows and over parts of them, then what was checked besides."""
    head = [
        "rows of",
        "count",
        "median error",
        "95th percentile",
        "largest",
        "over the bound",
        "bound / measured, median",
    ]
    judged = [row for row in rows if "median_bound_to_measured" in row]
    cells = [
        [
            row["row"],
            str(row["rows"]),
            *_errors(row),
            f"{row['over_the_bound']} ({row['over_the_bound_percent']:.1f} %)",
            f"{row['median_bound_to_measured']:.3f}",
        ]
        for row in judged
    ]
    by_name = {row["row"]: row for row in rows}
    count, own = by_name["bytes of tensors"], by_name["PyTorch's own count of a real run"]
    speed, failed = by_name["predicting"], by_name["failed"]
    checked = [
        [
            "bytes of tensors equal to a real run, to the byte",
            f"{count['equal_to_the_byte']} of {count['rows']} rows checked",
        ],
        [
            "PyTorch's own count of a real run against the process",
            f"median error {own['median_error_percent']:.2f} % over {own['rows']} rows",
        ],
        ["seconds to predict a row, scratch measured", f"median {speed['median_seconds']:.1f}"],
        ["rows that could only be extrapolated", str(speed["extrapolated_rows"])],
        ["rows that failed", str(failed["rows"])],
    ]
    return "\n\n".join([table(head, cells), table(["besides", "found"], checked)])


def memory_peers(rows: Rows) -> str:
    """Others and Lowtide on the rows where the others apply."""
    cells = [
        [row["row"], str(row["peer"]["rows"]), *_errors(row["peer"]), *_errors(row["lowtide"])[:2]]
        for row in rows
    ]
    head = [
        "said by",
        "rows",
        "median error",
        "95th percentile",
        "largest",
        "Lowtide's median error",
        "Lowtide's 95th percentile",
    ]
    return table(head, cells)


def budgets(rows: Rows) -> str:
    """For each model one line a budget, then the comparison."""
    head = ["budget", "peak", "within", "expected", "at most", "processor seconds", "plan"]
    parts = []
    for model in dict.fromkeys(row["model"] for row in rows):
        measured = [row for row in rows if row["model"] == model and "budget_bytes" in row]
        cells = [
            [
                format_bytes(row["budget_bytes"]),
                format_bytes(row["peak_bytes"]),
                "yes" if row["within_budget"] else "**no**",
                format_bytes(row["predicted_bytes"]),
                format_bytes(row["upper_bytes"]),
                f"{row['cpu_s']:.1f}",
                row["plan"],
            ]
            for row in measured
        ]
        first, last = measured[0], next(r for r in rows if r["row"] == f"{model}, comparison")
        slowest = last["slowest_against_a_smaller_budget"]
        parts += [
            f"{model} on {first['width']}×{first['height']} pixels. The slowest budget takes"
            f" {slowest:.3f} times as long as a smaller one, {last['each_budget_by_itself']:.3f}"
            " if runs of one plan are not taken together (budgets with one and the same plan lie"
            f" up to {last['spread_within_a_plan']:.3f} apart).",
            table(head, cells),
        ]
    return "\n\n".join(parts)


def budget_kept(rows: Rows) -> str:
    """One line a folder, and one for each first run of a model."""
    folders = [
        [
            row["row"],
            f"{row['done']} of {row['pictures']}",
            str(row["over_budget"]),
            format_bytes(row["peak_bytes"]),
            f"{row['growth_from_20th']:.2f}",
            f"{row['cpu_s']:.0f}",
        ]
        for row in rows
        if "pictures" in row
    ]
    first_runs = [
        [
            row["row"],
            format_bytes(run["budget_bytes"]),
            format_bytes(run["peak_bytes"]),
            "yes" if run["kept"] else "**no**",
            f"{run['cpu_s']:.1f}",
        ]
        for row in rows
        for share, run in row.items()
        if share.startswith("at ")
    ]
    head = ["", "done", "over the budget", "peak", "growth from the 20th on", "processor seconds"]
    parts = [table(head, folders)] if folders else []
    if first_runs:
        head = ["", "budget", "peak", "kept", "processor seconds"]
        parts.append(table(head, first_runs))
    return "\n\n".join(parts)


def orderings(rows: Rows) -> str:
    """In how many pairs of runs the expected one took less."""
    cells = [
        [
            row["row"],
            f"{row['held']} of {row['pairs']}",
            f"{row['median_share']:.2f}",
            f"{row['largest_share']:.2f}",
        ]
        for row in rows
    ]
    return table(["order", "held", "share, median", "share, largest"], cells)


def heap_settings(rows: Rows) -> str:
    """Each model's processor time and peak under every setting."""
    head = ["model and image", "heap", "peak", "processor s", "of glibc's own (range)"]
    cells = [
        [
            row["row"],
            name,
            format_bytes(way["peak_bytes"]),
            f"{statistics.median(way['cpu_s']):.2f}",
            spread(way["ratio"]),
        ]
        for row in rows
        for name, way in row["ways"].items()
    ]
    return table(head, cells)


def planning(rows: Rows) -> str:
    """Processor seconds of traces, and of plans, cold and warm."""
    traces = [row for row in rows if "operators" in row]
    cells = [
        [
            row["row"].removeprefix("trace "),
            f"{row['weights'] / 1e6:.0f} M",
            str(row["operators"]),
            f"{row['cpu_s']:.2f}",
            f"{row['estimate']['cpu_s']:.2f}",
        ]
        for row in traces
    ]
    parts = [table(["trace", "weights", "operators", "seconds", "with a GPU's ledger"], cells)]
    plans = [row for row in rows if "cold_cpu_s" in row]
    if plans:
        cells = [[row["row"], f"{row['cold_cpu_s']:.1f}", f"{row['cpu_s']:.2f}"] for row in plans]
        parts.append(table(["plan", "the first time", "remembered"], cells))
    others = [row for row in rows if row["row"] in ("tracing, median", "first trace of a process")]
    parts.append(table(["", "seconds"], [[row["row"], f"{row['cpu_s']:.2f}"] for row in others]))
    return "\n\n".join(parts)


SHAPES = {
    "memory_grid_summary": memory_grid_summary,
    "memory_peers": memory_peers,
    "budgets": budgets,
    "budget_kept": budget_kept,
    "planning": planning,
    "orderings": orderings,
    "heap_settings": heap_settings,
}
