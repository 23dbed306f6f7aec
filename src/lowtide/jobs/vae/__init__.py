"""Turn videos into latents and back."""
