"""Names of layouts, and the weight group that worker and receiver join."""

from specrl.records import WeightGroup

GROUP = WeightGroup("epoch-1", "127.0.0.1", 0, 0, 2, 60.0, "gloo")
ALONE = "data=1"


def sizes(layout: str) -> dict[str, int]:
    """Parse the name of a layout, such as "tensor=2,data=2", into fields of `trainer.parallelism`."""
    return {name: int(size) for name, size in (part.split("=") for part in layout.split(","))}
