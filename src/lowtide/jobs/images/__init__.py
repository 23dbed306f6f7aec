"""What jobs share that run a model on images."""
