"""Training tasks: what each kind of training optimizes, and its configuration."""
