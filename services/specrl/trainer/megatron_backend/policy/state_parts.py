"""Brings the parts of each tensor of a checkpoint to the rank that writes it.

    plan     the rank that has most of a parameter writes it; other ranks send it what it lacks, and nothing else
    gather   the parts of several parameters travel in one all-to-all, and each writer joins those that it gets

So a rank sends at most what it alone has, once. Where every rank has whole parameters, nothing is sent.

`plan_parameter` is pure. `sharded_policy.py` calls this for snapshots.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import torch
import torch.distributed as dist

from specrl.models.policy_config import PolicyConfig
from specrl.trainer.megatron_backend.model.hf_weights import MappedParameter, WeightMap, unshard_tensors
from specrl.trainer.megatron_backend.parallel.exchange import exchange_tensors
from specrl.trainer.megatron_backend.parallel.groups import GroupPosition, RankGroups

# Of float32 values that all ranks exchange at once. A larger parameter is exchanged by itself.
CHUNK_ELEMENTS = 64 << 20

FindRange = Callable[[torch.Tensor], slice]
ReadRange = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Part:
    """Elements [first, end) of a flattened shard, which the rank `source` has. shard: its number in the parameter."""

    shard: int
    source: int
    first: int
    end: int


@dataclass(frozen=True)
class ParameterPlan:
    """The rank that writes a parameter, and the parts that it consists of. They cover every shard once."""

    writer: int
    parts: tuple[Part, ...]


def plan_parameter(
    shards: Sequence[Mapping[int, tuple[int, int]]], size: int, written: Mapping[int, int]
) -> ParameterPlan:
    """Choose the rank that writes a parameter, and the sources of its parts. Deterministic.

    shards: of each shard, the elements [first, end) that ranks have, by rank. size: elements of a shard. written:
    elements that each rank writes already.

    The writer is the rank that has most, and of several the one that writes least. Of ranks that have the same
    elements the one of the nearest replica sends them. Raises ValueError if no rank has an element.
    """
    held = Counter[int]()
    for ranges in shards:
        held.update({rank: end - first for rank, (first, end) in ranges.items()})
    writer = min(held, key=lambda rank: (-held[rank], written.get(rank, 0), rank))
    parts: list[Part] = []
    for shard, ranges in enumerate(shards):
        first = 0
        while first < size:
            having = [rank for rank, (start, end) in ranges.items() if start <= first < end]
            source = min(having, key=lambda rank: (abs(rank // len(shards) - writer // len(shards)), rank))
            parts.append(Part(shard, source, first, ranges[source][1]))
            first = ranges[source][1]
    return ParameterPlan(writer, tuple(parts))


class PartGatherer:
    """Gathers the parts of a map's parameters. Constructing one is a collective of all ranks.

    find_range: returns the elements of a parameter's flattened shard whose state this rank has.
    """

    def __init__(self, weights: WeightMap, config: PolicyConfig, groups: RankGroups, find_range: FindRange) -> None:
        self._config = config
        self._groups = groups
        world = dist.group.WORLD
        assert world is not None  # it exists while there are `groups`
        self._world = GroupPosition(groups.rank, groups.world_size, world)
        # This rank's first element of each parameter.
        self._first: dict[int, int] = {}
        ends = torch.zeros(len(weights.items), 2, dtype=torch.int64)
        for place, item in enumerate(weights.items):
            if item.parameter is not None:
                mine = find_range(item.parameter)
                self._first[place] = mine.start
                ends[place] = torch.tensor([mine.start, mine.stop])
        ends = ends.to(groups.device)
        of_ranks = [torch.empty_like(ends) for _ in range(groups.world_size)]
        dist.all_gather(of_ranks, ends)
        self._plans = self._plan_parameters(weights.items, [table.tolist() for table in of_ranks])

    def _plan_parameters(
        self, items: Sequence[MappedParameter], ends: Sequence[Sequence[tuple[int, int]]]
    ) -> list[tuple[MappedParameter, ParameterPlan]]:
        """Plan every parameter. ends: by rank and parameter, the elements that the rank has."""
        written = Counter[int]()
        found: list[tuple[MappedParameter, ParameterPlan]] = []
        for place, item in enumerate(items):
            count = self._count_shards(item)
            shards: list[dict[int, tuple[int, int]]] = [{} for _ in range(count)]
            for rank, table in enumerate(ends):
                first, end = table[place]
                if end > first:
                    shards[rank % count][rank] = (first, end)  # ranks are numbered tensor parallel first
            plan = plan_parameter(shards, item.num_elements, written)
            written[plan.writer] += item.num_elements * count
            found.append((item, plan))
        return found

    def _count_shards(self, item: MappedParameter) -> int:
        return 1 if item.is_replicated else self._groups.tensor.size

    @torch.no_grad()
    def gather_tensors(
        self, wanted: AbstractSet[str] | None, read_range: ReadRange
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hugging Face name, full tensor) of the parameters that this rank writes, in map order.

        wanted: names to yield; None: all. read_range: returns what this rank has of a parameter, flat and in float32.

        A collective of all ranks: every rank must exhaust the iterator.
        """
        chunk: list[int] = []
        elements = 0
        for place, (item, _) in enumerate(self._plans):
            if wanted is not None and wanted.isdisjoint(item.names):
                continue
            size = item.num_elements * self._count_shards(item)
            if chunk and elements + size > CHUNK_ELEMENTS:
                yield from self._gather_chunk(chunk, read_range)
                chunk = []
                elements = 0
            chunk.append(place)
            elements += size
        yield from self._gather_chunk(chunk, read_range)

    def _gather_chunk(self, places: Sequence[int], read_range: ReadRange) -> Iterator[tuple[str, torch.Tensor]]:
        device = self._groups.device
        rank = self._world.rank
        sent: list[list[torch.Tensor]] = [[torch.empty(0, device=device)] for _ in range(self._world.size)]
        counts = [0] * self._world.size  # elements that each rank sends to this one
        for place in places:
            item, plan = self._plans[place]
            for part in plan.parts:
                if plan.writer == rank:
                    counts[part.source] += part.end - part.first
                if part.source == rank:
                    assert item.parameter is not None
                    first = self._first[place]
                    sent[plan.writer].append(read_range(item.parameter)[part.first - first : part.end - first])
        received = exchange_tensors([torch.cat(parts) for parts in sent], [(n,) for n in counts], self._world)
        ends = [0] * self._world.size  # elements of each rank that are in place
        for item, plan in (self._plans[place] for place in places):
            if plan.writer != rank:
                continue
            shards = [torch.empty(item.shape, device=device) for _ in range(self._count_shards(item))]
            for part in plan.parts:
                end = ends[part.source] + part.end - part.first
                shards[part.shard].view(-1)[part.first : part.end] = received[part.source][ends[part.source] : end]
                ends[part.source] = end
            yield from zip(item.names, unshard_tensors(self._config, item, shards), strict=True)
