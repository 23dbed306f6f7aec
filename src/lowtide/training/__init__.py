"""Training of super-resolution models within a memory budget."""
