"""The EAGLE-3 head: its module, its attention over several passes, its folder layouts, and its place in a run."""
