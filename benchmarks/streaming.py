"""Models streamed in bands, compared with the same models run whole and in tiles.

    LOWTIDE_DATA=... python benchmarks/streaming.py [--only TEXT] [--pairs 3] [--inputs 1]
        [--heap glibc|command-line|to-1GiB] [--fresh]

A row for each model, size and strategy, written as soon as its peak is known and completed by the
rest. Peaks: a fresh process for each row, whose heap returns freed memory, so that its anonymous
memory is what is live; pages in memory count, pages on disk are listed separately. Times: all
strategies of one model and size in one process, one after another and then in reverse order, in
processor seconds, in a heap that keeps freed blocks for all of them. Capture is not in the times
but in its own column. Errors: relative to the whole run, and of both to one in fp64, for
``--inputs`` inputs, unless they are the same; autoencoders are not compared with fp64, which would
take hours. All rows of one model and size come from one machine: if some of them are missing and
the others are from elsewhere, all are measured. With ``--heap`` the times in another heap are added
to rows of this machine: fetching freed blocks again costs a whole run more than a streamed one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from common import (
    HEAP_KEEPS,
    HEAP_OF_COMMAND_LINE,
    HEAP_OF_GLIBC,
    HEAP_TO_1GIB,
    ResultFile,
    ratio_of,
    row_parser,
)
from streaming_runs import DISK, MEMORY, PARTLY, ways
from subprocess_run import measure_in_subprocess


@dataclass(frozen=True)
class Case:
    """A model and a size. The budgets with pages in memory and on disk are parts of what the whole
    run takes at its peak; a tenth of a budget is left for what is not rows."""

    model: str
    height: int
    width: int
    in_memory: float
    on_disk: float

    @property
    def title(self) -> str:
        """What the names of its rows begin with."""
        return f"{self.model} {self.height}×{self.width}"

    @cached_property
    def rows(self) -> dict[str, str]:
        """By way the name of its row."""
        return {way: f"{self.title}, {way}" for way in ways(self.model)}

    def budgets(self, results: ResultFile) -> dict[str, int]:
        """Of the ways in bands, once the whole run was measured."""
        whole = results.row(self.rows["whole"])["peak_bytes"]
        little = int(whole * self.on_disk)
        return {MEMORY: int(whole * self.in_memory), DISK: little, PARTLY: little}


CASES = (
    Case("CRAFT", 384, 512, 0.33, 0.2),
    Case("SwinIR", 384, 512, 0.29, 0.2),
    Case("VAE decode", 512, 512, 0.65, 0.27),
    Case("VAE encode", 512, 512, 0.65, 0.27),
    Case("VAE decode", 768, 768, 0.65, 0.27),
    Case("VAE decode", 1024, 1024, 0.65, 0.27),
    Case("DRCT", 384, 512, 0.19, 0.15),
    Case("HAT", 384, 512, 0.19, 0.15),
    Case("VAE encode", 768, 768, 0.65, 0.27),
    Case("VAE encode", 1024, 1024, 0.65, 0.27),
    Case("RRDB", 384, 512, 0.5, 0.3),
    Case("SPAN", 384, 512, 0.12, 0.12),
    Case("SPAN to 0..1", 384, 512, 0.12, 0.12),
    Case("Compact", 384, 512, 0.8, 0.8),
    Case("PLKSR", 384, 512, 0.5, 0.3),
    Case("VAE decode bf16", 512, 512, 0.65, 0.27),
    Case("CRAFT bf16", 384, 512, 0.33, 0.2),
)


HEAPS = {"glibc": HEAP_OF_GLIBC, "command-line": HEAP_OF_COMMAND_LINE, "to-1GiB": HEAP_TO_1GIB}


def main() -> None:
    """Measure what is missing."""
    parser = row_parser(__doc__, pairs=3)
    parser.add_argument(
        "--heap",
        choices=HEAPS,
        help="add the times in this heap, by as many pairs, to rows measured on this machine",
    )
    parser.add_argument("--inputs", type=int, default=1, help="that are compared with fp64")
    options = parser.parse_args()
    results = ResultFile(
        "streaming",
        fresh=options.fresh,
        packages=("diffusers",),
        about="Models streamed in bands, run whole, and in tiles: processor seconds and memory.",
        environments="any",
    )
    for one in CASES:
        if options.only not in one.title:
            continue
        if options.heap:
            measure_in_heap(results, one, options.heap, options.pairs)
            continue
        if not (has_times(results, one) and has_errors(results, one, options.inputs)):
            results.drop(one.rows.values(), here=False)
        measure_peaks(results, one)
        measure_times(results, one, options.pairs)
        measure_errors(results, one, options.inputs)


def has_times(results: ResultFile, one: Case) -> bool:
    """Whether all ways were run in turns."""
    rows = one.rows.values()
    return all(results.has(row) and "cpu_s" in results.row(row) for row in rows)


def has_errors(results: ResultFile, one: Case, inputs: int) -> bool:
    """Whether both ways were compared with fp64 for as many inputs, if that says anything."""
    if one.model.startswith("VAE") or not results.row(one.rows[MEMORY])["max_abs_error"]:
        return True
    return compared(results, one) >= inputs


def compared(results: ResultFile, one: Case) -> int:
    """For how many inputs both ways were compared with fp64, the tail of their errors too."""
    rows = (results.row(one.rows[way]) for way in ("whole", MEMORY))
    return min(len(row.get("tail_errors_to_fp64", ())) for row in rows)


def measure_peaks(results: ResultFile, one: Case) -> None:
    """A row for each way that has none; the whole run comes first, whose parts the budgets are."""
    for way, row in one.rows.items():
        if not results.has(row):
            budget = one.budgets(results).get(way, 0) if way != "whole" else 0
            usage = measure_in_subprocess(
                "streaming_runs:run_once", one.model, way, one.height, one.width, budget, warmups=1
            )
            results.add(
                row,
                model=one.model,
                height=one.height,
                width=one.width,
                way=way,
                peak_bytes=usage.peak_bytes,
                **({"budget_bytes": budget} if budget else {}),
            )


def measure_times(results: ResultFile, one: Case, pairs: int) -> None:
    """Complete the rows by the times of all strategies, and the errors of their results."""
    if has_times(results, one):
        return
    timed = measure_in_subprocess(
        "streaming_runs:run_times",
        one.model,
        one.height,
        one.width,
        one.budgets(results),
        pairs,
        env=HEAP_KEEPS,
    ).result
    whole = results.row(one.rows["whole"])
    for way, figures in timed.items():
        share = results.row(one.rows[way])["peak_bytes"] / whole["peak_bytes"]
        results.complete(
            one.rows[way],
            share_of_peak=round(share, 3),
            ratio=ratio_of(figures["cpu_s"], timed["whole"]["cpu_s"]),
            **figures,
        )


def measure_errors(results: ResultFile, one: Case, inputs: int) -> None:
    """How far both are from fp64, for as many inputs as are asked for, where that says anything:
    the rows grow by each, so that what was compared before is not compared again."""
    while not has_errors(results, one, inputs):
        known, budget = compared(results, one), one.budgets(results)[MEMORY]
        errors = measure_in_subprocess(
            "streaming_runs:run_errors", one.model, one.height, one.width, budget, known + 1
        ).result
        for way, figures in errors.items():
            before = results.row(one.rows[way])
            results.complete(
                one.rows[way],
                **{what: [*before.get(what, ())[:known], new] for what, new in figures.items()},
            )


def measure_in_heap(results: ResultFile, one: Case, heap: str, pairs: int) -> None:
    """What the same runs take in another heap, if they were measured on this machine."""
    rows = [results.row(row) for row in one.rows.values() if results.has(row)]
    if len(rows) < len(one.rows) or not all(map(results.measured_here, rows)):
        print(f"{one.title}: no rows of this machine; measure them first, without --heap")
        return
    name = heap.replace("-", "_")
    if all(f"{name}_heap_cpu_s" in row for row in rows):
        return
    timed = measure_in_subprocess(
        "streaming_runs:run_times",
        one.model,
        one.height,
        one.width,
        one.budgets(results),
        pairs,
        env=HEAPS[heap],
    ).result
    for way, figures in timed.items():
        ratio = ratio_of(figures["cpu_s"], timed["whole"]["cpu_s"])
        results.complete(
            one.rows[way],
            **{f"{name}_heap_cpu_s": figures["cpu_s"], f"{name}_heap_ratio": ratio},
        )


if __name__ == "__main__":
    main()
