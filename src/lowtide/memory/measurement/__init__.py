"""Memory measurement of code regions and whole runs, on the CPU and on CUDA."""
