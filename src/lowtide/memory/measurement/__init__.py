"""What a region of code used: one meter for both devices."""
