"""The command line: turns words into a job and shows its report. Nothing is decided here."""
