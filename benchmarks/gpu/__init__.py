"""Measures in one command what a first hour on a GPU should tell: `python -m benchmarks.gpu` (docs/gpu.md)."""
