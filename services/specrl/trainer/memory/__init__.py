"""The memory of a trainer's rank: how much it needs, and what is reported when it runs out."""
