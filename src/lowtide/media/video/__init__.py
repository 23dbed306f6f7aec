"""Video files: frames in and out, and what else such a file holds."""
