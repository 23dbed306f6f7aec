"""Graph capture of a model for streaming, with opaque modules where it fails."""
