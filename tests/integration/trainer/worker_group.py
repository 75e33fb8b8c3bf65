"""The weight group that worker and receiver meet in."""

from specrl.records import WeightGroup

GROUP = WeightGroup("epoch-1", "127.0.0.1", 0, 0, 2, 60.0, "gloo")
