"""Band-by-band execution of a captured graph, exact to rounding."""
