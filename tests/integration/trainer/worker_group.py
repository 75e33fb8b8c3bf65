"""What a layout is called, and the weight group that worker and receiver meet in."""

from specrl.records import WeightGroup

GROUP = WeightGroup("epoch-1", "127.0.0.1", 0, 0, 2, 60.0, "gloo")
ALONE = "data=1"


def sizes(layout: str) -> dict[str, int]:
    """Fields of `trainer.parallelism` of a layout that is called as in "tensor=2,data=2"."""
    return {name: int(size) for name, size in (part.split("=") for part in layout.split(","))}
