"""Networks specialized for one input shape: compiled, or replayed as a CUDA graph."""
