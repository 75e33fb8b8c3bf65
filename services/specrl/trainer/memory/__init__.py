"""The memory of a trainer's rank: what is reported when it runs out."""
