"""Following the memory of a step on tensors without bytes."""
