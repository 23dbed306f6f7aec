"""Datasets of super-resolution training: random patch pairs from image folders.

`PairedImageFolders` reads both sides from files, `HighResolutionFolders` makes the low-resolution
side by `bicubic_downscale`, `PhotoDegradation` or `RealDegradation`. `BatchLoader` returns the
batch of any step; the same step and seed give the same batch, so that training resumes exactly. LQ
is the low-resolution side and GT (ground truth) the high-resolution side, as in BasicSR.
"""
