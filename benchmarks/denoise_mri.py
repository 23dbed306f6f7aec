"""Denoise real MRI: what is kept, and a tensor fit, next to other methods.

``--data`` is a folder with ``small_64D`` (nii, bval, bvec) and ``S0_10slices.nii.gz`` of dipy's
package and ``example4d.nii.gz`` of nibabel's tests. There is no clean volume: methods are compared
by the residual of a tensor fit, which noise raises and blur too, and by the residual's structure.
dipy is run by ``--dipy-python``, an interpreter that has it. Run:

    python benchmarks/denoise_mri.py --data FOLDER --dipy-python PYTHON
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import tempfile
import time
from pathlib import Path

import nibabel
import numpy as np
from common import ResultFile

import lowtide
from lowtide.jobs.denoise.calibration.command import train_noise
from lowtide.jobs.denoise.volumes.scores import ResidualCorrelations
from lowtide.jobs.denoise.volumes.survey import survey_ranges
from lowtide.media.volume_header import inspect_volume

FILES = ("small_64D.nii", "S0_10slices.nii.gz", "example4d.nii.gz")
SERIES = "small_64D"
# Methods of dipy, with the parameters of its tutorials.
METHODS = {
    "noisy": "made = data",
    "non-local means": (
        "from dipy.denoise.nlmeans import nlmeans\n"
        "from dipy.denoise.noise_estimate import estimate_sigma\n"
        "sigma = estimate_sigma(data, N=0)\n"
        "made = np.stack([nlmeans(data[..., v], sigma=float(sigma[v]), patch_radius=1,"
        " block_radius=2, rician=True) for v in range(data.shape[3])], -1)"
    ),
    "MP-PCA": "from dipy.denoise.localpca import mppca\nmade = mppca(data, patch_radius=2)",
    "Patch2Self": (
        "from dipy.denoise.patch2self import patch2self\n"
        "made = patch2self(data, bvals, model='ols', shift_intensity=True,"
        " clip_negative_vals=False, verbose=False)"
    ),
}
SCRIPT = """
import json, sys, time, warnings
warnings.simplefilter("ignore")
import nibabel, numpy as np
from dipy.core.gradients import gradient_table
from dipy.reconst.dti import TensorModel
source, target, method = sys.argv[1:4]
data = nibabel.load(source).get_fdata()
stem = source[: -len(".nii.gz" if source.endswith(".gz") else ".nii")]
bvals = np.loadtxt(stem + ".bval").ravel()
bvecs = np.nan_to_num(np.loadtxt(stem + ".bvec").reshape(-1, 3))
started = time.process_time()
exec(method)
seconds = time.process_time() - started
np.save(target, made)
table = gradient_table(bvals, bvecs=bvecs)
fit = TensorModel(table).fit(np.maximum(made, 1e-3))
b0 = made[..., bvals == 0].mean(-1)
predicted = fit.predict(table, S0=b0)
inside = b0 > np.median(b0) / 4
fa, md = fit.fa, fit.md
print(json.dumps({
    "seconds": seconds,
    "finite": bool(np.isfinite(fa).all() and np.isfinite(md).all()),
    "fit_residual": float(np.sqrt(np.mean((predicted - made)[inside][:, bvals > 0] ** 2))),
    "fa_mean": float(fa[inside].mean()),
    "md_mean": float(md[inside].mean()),
    "fa_roughness": float(np.abs(np.diff(fa, axis=0)).mean()),
}))
"""


def main() -> None:
    """Measure each row that is not there yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--dipy-python", required=True)
    parser.add_argument("--fresh", action="store_true", help="measure all rows again")
    parser.add_argument("--folder", type=Path, help="of the result file")
    given = parser.parse_args()
    packages = ("torch", "numpy", "nibabel")
    results = ResultFile(
        "denoise_mri",
        about="MRI volumes: geometry, steps of the scaling, tensor fits",
        fresh=given.fresh,
        packages=packages,
        folder=given.folder,
    )
    for name in FILES:
        for noise in ("estimated", "table"):
            row = f"{name}, {noise}"
            if not results.has(row) and (noise == "estimated" or "S0" not in name):
                results.add(row, **kept(given.data / name, table=noise == "table"))
    for method in (*METHODS, "lowtide", "lowtide, slices, estimated", "lowtide, slices, table"):
        if not results.has(f"{SERIES}, {method}"):
            figures = series_figures(given.data / f"{SERIES}.nii", method, given.dipy_python)
            results.add(f"{SERIES}, {method}", **figures)


def kept(path: Path, *, table: bool) -> dict[str, object]:
    """Denoise a file, and compare header and voxels with the input."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / path.name
        report = denoised(path, target, table=table)
        before, after = nibabel.load(path), nibabel.load(target)
        facts = inspect_volume(path)
        head = facts.head_bytes
        same_head = content(path)[:head] == content(target)[:head]
        assert same_head and np.array_equal(before.affine, after.affine)
        # The same in floats, of which the integers are to be the nearest steps.
        floats = Path(folder) / f"floats_{path.name}"
        image = nibabel.Nifti1Image(before.get_fdata(dtype=np.float32), before.affine)
        nibabel.save(image, floats)
        exact = Path(folder) / f"exact_{path.name}"
        denoised(floats, exact, table=table, calibrate=path)
        # Clipped results are counted in the row, and are no rounding.
        low, high = sorted(one * facts.slope + facts.inter for one in facts.limits)
        right = nibabel.load(exact).get_fdata().clip(low, high)
        error = np.abs(after.get_fdata() - right) / abs(facts.slope)
    return {
        "shape": list(facts.shape),
        "header_equal": same_head,
        "largest_error_in_steps": float(error.max()),
        "sigma": report.sigma,
        "residual": report.residual and report.residual.model_dump(),
        "clipped": report.clipped,
        "peak_bytes": report.memory.peak_bytes,
        "cpu_seconds": report.cpu_seconds,
    }


def series_figures(path: Path, method: str, python: str) -> dict[str, object]:
    """Denoise the series by a method, and fit tensors to the result."""
    with tempfile.TemporaryDirectory() as folder:
        source, code, seconds = path, METHODS.get(method, METHODS["noisy"]), None
        if method.startswith("lowtide"):
            source = Path(folder) / path.name
            started = time.process_time()
            slices = "slices" in method
            denoised(path, source, table=method.endswith("table"), slices=slices)
            seconds = time.process_time() - started
        made = Path(folder) / "made.npy"
        done = subprocess.run(
            [python, "-c", SCRIPT, source, made, code], check=True, capture_output=True, text=True
        )
        figures = json.loads(done.stdout.splitlines()[-1])
        result = np.load(made)
    if seconds is not None:
        figures["seconds"] = seconds
    before = nibabel.load(path).get_fdata()
    ranges = survey_ranges(inspect_volume(path))
    structure = ResidualCorrelations()
    for volume, one in enumerate(ranges):
        for place in range(before.shape[2]):
            images = before[:, :, place, volume], result[:, :, place, volume]
            structure.add(*images, images[0] > one.threshold)
        structure.end_volume()
    found = structure.result()
    return figures | {"residual": found and found.model_dump()}


def denoised(
    path: Path, target: Path, *, table: bool, calibrate: Path | None = None, slices: bool = True
):
    """Denoise a file, by default slice by slice with the bundled network; returns its report."""
    options: dict[str, object] = {"slices": slices}
    if table:
        options["noise"] = target.with_name("scanner.json")
        train_noise(options["noise"], volumes=calibrate or path, force=True)
    return lowtide.denoise(path, target, budget="1GiB", force=True, **options).images[0]


def content(path: Path) -> bytes:
    """The bytes of a file, decompressed."""
    data = path.read_bytes()
    return gzip.decompress(data) if path.suffix == ".gz" else data


if __name__ == "__main__":
    main()
