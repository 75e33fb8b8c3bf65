"""Ray's part of weight_sync.py, for a Python that has ray: SIZE_BYTES COUNT TURNS -> seconds of each turn, as JSON.

One `put` of the bytes, one `get` in each actor, and the checksums of what it gets, in tensors of 4 MiB.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
import ray
import xxhash

TENSOR_BYTES = 4 << 20


@ray.remote(num_cpus=0)
class Receiver:
    """Reads the object from shared memory."""

    def take(self, data: np.ndarray) -> list[int]:
        """Compute the checksums of its tensors."""
        return [xxhash.xxh3_64_intdigest(data[at : at + TENSOR_BYTES].data) for at in range(0, len(data), TENSOR_BYTES)]


def main() -> None:
    size_bytes, count, turns = map(int, sys.argv[1:])
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=3 * size_bytes + (256 << 20))
    receivers = [Receiver.remote() for _ in range(count)]
    data = np.random.default_rng(0).integers(0, 255, size_bytes, dtype=np.uint8)
    expected = [
        xxhash.xxh3_64_intdigest(data[at : at + TENSOR_BYTES].data) for at in range(0, size_bytes, TENSOR_BYTES)
    ]
    seconds = []
    for turn in range(turns + 1):
        began = time.perf_counter()
        reference = ray.put(data)
        found = ray.get([receiver.take.remote(reference) for receiver in receivers])
        if turn > 0:
            seconds.append(time.perf_counter() - began)
        assert all(sums == expected for sums in found), "what arrived must be what was sent"
        del reference
    ray.shutdown()
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
