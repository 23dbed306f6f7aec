"""Models as graphs of operators, and modules inside them that run as they are."""
