"""Feature maps kept between segments: on the device, in pinned host memory, or on disk."""
