"""Weight offloading: weights larger than the budget are streamed block by block."""
