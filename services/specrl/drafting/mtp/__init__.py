"""Native heads for multi-token prediction: their module, their folder's tensors, and the checks before a run."""
