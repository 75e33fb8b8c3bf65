"""What a first hour on a GPU should measure, in one command: `make gpu-check` (docs/gpu.md)."""
