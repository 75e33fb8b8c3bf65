"""What a first hour on a GPU should measure, in one command: `python -m benchmarks.gpu` (docs/gpu.md)."""
