"""Training of upscalers and forecasters within a memory budget."""
