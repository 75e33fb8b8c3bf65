"""Means, intervals and rounding of measured figures. Pure."""
