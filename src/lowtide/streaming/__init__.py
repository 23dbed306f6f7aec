"""Running a model over rows: tiles and their geometry, and the runner that obeys a Plan."""
