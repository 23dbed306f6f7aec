"""The tables about predicted memory, for ``render_results.py``."""

from __future__ import annotations

from tables import Rows, filled, joined, table, tabled

_ERRORS = "{median_error_percent:.2f %} | {p95_error_percent:.2f %}"
_LARGEST = " | {largest_error_percent:.2f %}"


def memory_grid_summary(rows: Rows) -> str:
    """Errors and bounds over all rows and over parts of them, then what was checked besides."""
    judged = tabled(
        [row for row in rows if "median_bound_to_measured" in row],
        "rows of | count | median error | 95th percentile | largest | over the bound"
        " | bound / measured, median",
        f"{{row}} | {{rows}} | {_ERRORS}{_LARGEST}"
        " | {over_the_bound} ({over_the_bound_percent:.1f %}) | {median_bound_to_measured:.3f}",
    )
    found = {row["row"]: row for row in rows}
    count, own = found["bytes of tensors"], found["PyTorch's own count of a real run"]
    speed, failed = found["predicting"], found["failed"]
    besides = [
        f"bytes of tensors equal to a real run, to the byte | {count['equal_to_the_byte']} of"
        f" {count['rows']} rows checked",
        "PyTorch's own count of a real run against the process"
        f" | median error {own['median_error_percent']:.2f} % over {own['rows']} rows",
        f"seconds to predict a row, scratch measured | median {speed['median_seconds']:.1f}",
        f"rows that could only be extrapolated | {speed['extrapolated_rows']}",
        f"rows that failed | {failed['rows']}",
    ]
    return joined(judged, table("besides | found", besides))


def memory_peers(rows: Rows) -> str:
    """Others and Lowtide on the rows where the others apply."""
    return table(
        "said by | rows | median error | 95th percentile | largest | Lowtide's median error"
        " | Lowtide's 95th percentile",
        [
            f"{row['row']} | {filled(row['peer'], '{rows} | ' + _ERRORS + _LARGEST)}"
            f" | {filled(row['lowtide'], _ERRORS)}"
            for row in rows
        ],
    )


def budgets(rows: Rows) -> str:
    """For each model one line a budget, then the comparison."""
    parts = []
    for model in dict.fromkeys(row["model"] for row in rows):
        measured = [row for row in rows if row["model"] == model and "budget_bytes" in row]
        first, last = measured[0], next(r for r in rows if r["row"] == f"{model}, comparison")
        slowest = last["slowest_against_a_smaller_budget"]
        parts += [
            f"{model} on {first['width']}×{first['height']} pixels. The slowest budget takes"
            f" {slowest:.3f} times as long as a smaller one, {last['each_budget_by_itself']:.3f}"
            " if runs of one plan are not taken together (budgets with one and the same plan lie"
            f" up to {last['spread_within_a_plan']:.3f} apart).",
            tabled(
                measured,
                "budget | peak | within | expected | at most | processor seconds | plan",
                "{budget_bytes:bytes} | {peak_bytes:bytes} | {within_budget:yes!}"
                " | {predicted_bytes:bytes} | {upper_bytes:bytes} | {cpu_s:.1f} | {plan}",
            ),
        ]
    return joined(*parts)


def budget_kept(rows: Rows) -> str:
    """One line a folder, and one for each first run of a model."""
    folders = tabled(
        [row for row in rows if "pictures" in row],
        " | done | over the budget | peak | growth from the 20th on | processor seconds",
        "{row} | {done} of {pictures} | {over_budget} | {peak_bytes:bytes}"
        " | {growth_from_20th:.2f} | {cpu_s:.0f}",
    )
    first_runs = tabled(
        [
            {"row": row["row"], **run}
            for row in rows
            for share, run in row.items()
            if share.startswith("at ")
        ],
        " | budget | peak | kept | processor seconds",
        "{row} | {budget_bytes:bytes} | {peak_bytes:bytes} | {kept:yes!} | {cpu_s:.1f}",
    )
    return joined(folders, first_runs)


def orderings(rows: Rows) -> str:
    """In how many pairs of runs the expected one took less."""
    return tabled(
        rows,
        "order | held | share, median | share, largest",
        "{row} | {held} of {pairs} | {median_share:.2f} | {largest_share:.2f}",
    )


def heap_settings(rows: Rows) -> str:
    """Each model's processor time and peak under every setting."""
    return tabled(
        [
            {"row": row["row"], "heap": name, **way}
            for row in rows
            for name, way in row["ways"].items()
        ],
        "model and image | heap | peak | processor s | of glibc's own (range)",
        "{row} | {heap} | {peak_bytes:bytes} | {cpu_s:median.2f} | {ratio:spread}",
    )


def planning(rows: Rows) -> str:
    """Processor seconds of traces, and of plans, cold and warm."""
    traces = tabled(
        [row for row in rows if "operators" in row],
        "trace | weights | operators | seconds | with a GPU's ledger",
        "{what} | {millions:.0f M} | {operators} | {cpu_s:.2f} | {estimate[cpu_s]:.2f}",
        what=lambda row: row["row"].removeprefix("trace "),
        millions=lambda row: row["weights"] / 1e6,
    )
    plans = tabled(
        [row for row in rows if "cold_cpu_s" in row],
        "plan | the first time | remembered",
        "{row} | {cold_cpu_s:.1f} | {cpu_s:.2f}",
    )
    others = tabled(
        [row for row in rows if row["row"] in ("tracing, median", "first trace of a process")],
        " | seconds",
        "{row} | {cpu_s:.2f}",
    )
    return joined(traces, plans, others)


SHAPES = {
    "memory_grid_summary": memory_grid_summary,
    "memory_peers": memory_peers,
    "budgets": budgets,
    "budget_kept": budget_kept,
    "planning": planning,
    "orderings": orderings,
    "heap_settings": heap_settings,
}
