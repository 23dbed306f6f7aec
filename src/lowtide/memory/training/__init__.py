"""What makes a training step fit: the ladder, the plot, the usual call."""
