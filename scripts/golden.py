"""Results, memory and time of every job, compared with those of an earlier revision.

    python scripts/golden.py REVISION            # what the checkout makes, against the revision's
    python scripts/golden.py REVISION --only video
    LOWTIDE_DATA=... python scripts/golden.py REVISION --large    # networks of full depth

Each run of `golden_runs.py` is made by both, in processes of its own with an empty cache; what the
revision made is kept in ``build/golden`` and not made again on the same machine. Where the plan is
the same, results must be the same bytes. Where it is another, at most 1e-5 of the samples of a
picture may differ, by one level of 8 bits, and numbers by 1e-5 of the largest. Exit code 1 names
what differs by more. Memory is the largest resident size of a process, time is processor seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from golden_compare import difference, same
from golden_runs import ROOT, Run, large_runs, runs

BUILD = ROOT / "build" / "golden"
RATIO = 1.08  # peaks and times above this are marked, never failed
REPORT = "report.json"
RESULTS = set(".png .jpg .webp .tif .csv .mkv .mp4 .gz .npy .safetensors .onnx".split())


def make(run: Run, folder: Path, source: Path) -> dict[str, Any]:
    """Make one run in ``folder`` by the package in ``source``, and return its row."""
    cache = folder.with_name("cache")
    for old in (folder, cache):
        shutil.rmtree(old, ignore_errors=True)
    folder.mkdir(parents=True)
    environment = {
        **os.environ,
        "PYTHONPATH": str(source),
        "LOWTIDE_CACHE": str(cache),
        "OMP_NUM_THREADS": "1",
    }
    row: dict[str, Any] = {"seconds": 0.0, "peak_bytes": 0, "plan": [], "exit": []}
    for command in run.commands:
        words = _words(command)
        if run.killed:
            _kill_at_first_result(words, folder, environment)
        with (folder / REPORT).open("wb") as out, (folder / "stderr.txt").open("wb") as error:
            child = subprocess.Popen(words, cwd=folder, env=environment, stdout=out, stderr=error)
            _, status, used = os.wait4(child.pid, 0)
        row["exit"].append(os.waitstatus_to_exitcode(status))
        row["seconds"] += used.ru_utime + used.ru_stime
        row["peak_bytes"] = max(row["peak_bytes"], used.ru_maxrss << 10)
        row["plan"].append(_plan((folder / REPORT).read_text(encoding="utf-8")))
    return row


def _words(command: str) -> list[str]:
    filled = re.sub(r"\{([\w.]+)\}", lambda name: str(BUILD / "inputs" / name[1]), command)
    if filled.startswith("python:"):
        return [sys.executable, "-c", filled.removeprefix("python:")]
    return [sys.executable, "-m", "lowtide", *shlex.split(filled)]


def _kill_at_first_result(words: list[str], folder: Path, environment: dict[str, str]) -> None:
    """Start a command and kill it without warning as soon as it has written a picture."""
    child = subprocess.Popen(
        words, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while child.poll() is None and not list(folder.rglob("*.png")):
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()


def _plan(text: str) -> Any:
    """The strategies in a report, or None where there is none."""
    try:
        report = json.loads(text)
    except ValueError:
        return None
    found: list[Any] = []

    def search(value: Any) -> None:
        if isinstance(value, dict):
            if isinstance(value.get("strategy"), dict):
                found.append(value["strategy"])
            for one in value.values():
                search(one)
        elif isinstance(value, list):
            for one in value:
                search(one)

    search(report)
    return found


def kept(name: str, source: Path, chosen: list[Run], *, again: bool) -> dict[str, Any]:
    """Rows of the runs by the package in ``source``, from ``build/golden/NAME`` where they are."""
    folder = BUILD / name
    table = folder / "rows.json"
    rows = json.loads(table.read_text()) if table.is_file() and not again else {}
    for run in chosen:
        if run.name in rows:
            continue
        print(f"{name}: {run.name}", file=sys.stderr, flush=True)
        rows[run.name] = make(run, folder / _slug(run.name), source)
        table.write_text(json.dumps(rows, indent=1))
    return rows


def _slug(name: str) -> str:
    return re.sub(r"\W+", "-", name)


def compare(run: Run, before: dict[str, Any], now: dict[str, Any], revision: str) -> str:
    """One line about a run; it begins with FAILED where the results are too far apart."""
    folders = [BUILD / name / _slug(run.name) for name in (revision, "now")]
    files = [
        {str(path.relative_to(one)) for path in one.rglob("*") if _is_result(path)}
        for one in folders
    ]
    problems = [f"exit codes {now['exit']}, not {before['exit']}"] * (now["exit"] != before["exit"])
    problems += [f"only once: {name}" for name in sorted(files[0] ^ files[1])]
    same_plan, changed = _same_plan(before["plan"], now["plan"]), []
    for name in sorted(files[0] & files[1]):
        one, other = (folder / name for folder in folders)
        if same(one, other):
            continue
        text, is_close = difference(one, other)
        changed.append(f"{name}: {text}")
        if same_plan or not is_close:
            problems.append(f"{name}: {text}" + ", by the same plan" * same_plan)
    said = "same bytes" if not changed else "; ".join(changed)
    if problems:
        said = "; ".join(problems)
    plan = "" if same_plan else ", another plan"
    figures = []
    for key in ("seconds", "peak_bytes"):
        ratio = now[key] / before[key]
        figures.append(f"{ratio:.2f}" + "!" * (ratio > RATIO))
    head = "FAILED" if problems else "ok    "
    return f"{head} {run.name:28} time ×{figures[0]} memory ×{figures[1]}  {said}{plan}"


def _same_plan(before: Any, now: Any) -> bool:
    """Whether two plans agree in all that both have: a revision may have facts of its own."""
    if isinstance(before, dict) and isinstance(now, dict):
        return all(_same_plan(before[key], now[key]) for key in before.keys() & now.keys())
    if isinstance(before, list) and isinstance(now, list):
        return len(before) == len(now) and all(map(_same_plan, before, now))
    return before == now


def _is_result(path: Path) -> bool:
    return path.is_file() and path.suffix in RESULTS


def main() -> None:
    """Make what is missing of both, and compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("revision")
    parser.add_argument("--only", default="", help="runs whose name contains this")
    parser.add_argument("--large", action="store_true", help="networks of full depth instead")
    parser.add_argument("--fresh", action="store_true", help="make those of the revision again")
    options = parser.parse_args()
    git = ["git", "-C", str(ROOT)]
    found = subprocess.run(
        [*git, "rev-parse", "--short=12", options.revision], check=True, stdout=subprocess.PIPE
    )
    name = found.stdout.decode().strip()
    known = large_runs() if options.large else runs()
    chosen = [run for run in known if options.only in run.name]
    if not (BUILD / "inputs" / "table.csv").is_file():
        # In another process: a child's peak begins with what its parent holds.
        makes = [sys.executable, ROOT / "scripts" / "golden_runs.py", BUILD / "inputs"]
        subprocess.run(makes, check=True)
    tree = BUILD / f"tree-{name}"
    if not tree.is_dir():
        subprocess.run([*git, "worktree", "prune"], check=True)
        subprocess.run(
            [*git, "worktree", "add", "--quiet", "--detach", str(tree), name], check=True
        )
    before = kept(name, tree / "src", chosen, again=options.fresh)
    now = kept("now", ROOT / "src", chosen, again=True)
    lines = [compare(run, before[run.name], now[run.name], name) for run in chosen]
    print("\n".join(lines))
    failed = sum(line.startswith("FAILED") for line in lines)
    print(f"{len(lines) - failed} ok, {failed} failed")
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
