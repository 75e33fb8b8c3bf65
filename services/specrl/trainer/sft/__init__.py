"""Supervised warm-up of a policy: examples, training, and the program of a rank (`__main__.py`)."""
