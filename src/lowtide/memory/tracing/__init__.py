"""Memory tracing of inference and training steps on fake tensors."""
