"""Denoiser: a slim U-Net that is told the noise level, and what runs it in steps."""
