"""Training tasks and their configurations, one kind each."""
