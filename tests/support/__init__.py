"""Models, files and runs that several test modules share."""
