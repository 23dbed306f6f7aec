"""One file for each thing a person asks for."""
