"""Video autoencoders of diffusers: for each family, its encoder and decoder in chunks of frames."""
