"""Upscale a photograph from Python, watching progress and memory.

python examples/upscale.py examples/coffee.jpg large.png 512MiB
"""

import sys
import threading

import lowtide


def main(source: str, target: str, budget: str) -> None:
    """Plan first, then run; another thread could call ``stop.set()``."""
    planned = lowtide.plan(source, target, budget=budget)
    print(planned.images[0].plan.choice)

    stop = threading.Event()
    report = lowtide.upscale(
        source,
        target,
        budget=budget,
        cancel=stop,
        progress=lambda moment: print(f"\r{moment.done}/{moment.total} rows", end=""),
    )
    image = report.images[0]
    print(f"\n{image.accuracy.execution}, peak {image.memory.peak_bytes >> 20} MiB")


if __name__ == "__main__":
    main(*sys.argv[1:4])
