"""Training of super-resolution models in the memory there is."""
