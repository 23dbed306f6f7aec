"""Denoiser: a slim U-Net that is given the noise level, and what runs it in steps."""
