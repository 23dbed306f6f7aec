"""A device's allocator without the device."""
