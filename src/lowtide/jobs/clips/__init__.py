"""What jobs share that read and write videos."""
