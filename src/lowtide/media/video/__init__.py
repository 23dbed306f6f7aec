"""Video files: pictures and their color, encoders, and everything else that a file holds."""
