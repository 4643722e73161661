"""Detects silent corruption: ranks that hold the same weights compare fingerprints.

    weights                                           compared over
    non-expert weights                                dp (dp_shard, if the state has replicas)
    expert weights                                    expert_dp (expert_dp_shard, if the state has replicas)
    all weights, if the state has replicas            dp_replicas
    norms, row-parallel biases, learned positions     tp
    key/value weights, if kv heads < tp               kv_replicas
    tied embedding                                    ends (first and last stage)

The check runs every K steps, on the weights that the step has used. It must come before the update, which overwrites all copies
with their owners' values. A fingerprint is the sum of a weight's bits as integers, modulo 2^64. One flipped bit always changes it.
All ranks on an axis compute the maximum of [sums, ~sums] in one small all-reduce. Its halves are each other's complement only if
all ranks have equal sums.

With ZeRO-3 each rank compares the weights that it has gathered. Each part's owner is among the compared ranks and uses its
own copy of the part. So a rank that received other bits is named.

Not covered are activations, main grads, master weights and moments. (In fp32 and float64 the owner's weights are the master
weights.) With ZeRO-1 only one rank computes each part of the update, so a fault there reaches all replicas alike. It shows only
where several owners hold the same state, as for norms over tp.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from triaxis.engine.comm.collectives import Axis
from triaxis.engine.comm.texts import gather_text
from triaxis.engine.device.host_copy import HostCopy, to_device
from triaxis.engine.layout.shard_spec import REDUCE_AXES
from triaxis.engine.numerics.hashing import SAME_SIZE_INTEGERS
from triaxis.engine.step import Engine

PURPOSE = "replicas"

_SHOWN = 8
"""Largest number of weights named per rank group, to keep texts between ranks short."""


@dataclass(frozen=True, slots=True)
class Group:
    """Weights on this rank that must equal the copies on all ranks on one axis."""

    axis: Axis
    names: tuple[str, ...]
    places: torch.Tensor
    """int64 [weights]: indices of the group's weights among all weights of this rank."""


class ReplicaCheck:
    """The comparison of this rank's weights with their replicas; every rank makes the same calls.

    Args:
        engine: engine whose weights are compared.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._groups = list(_groups(engine))
        self._posted: dict[int, tuple[torch.Tensor, HostCopy]] = {}

    def post(self, step: int) -> None:
        """Start to compare step `step`'s weights with other ranks' copies. The host does not wait for the device."""
        engine = self._engine
        engine.buffers.wait_all()
        differing = torch.zeros(1, dtype=torch.int64, device=engine.topology.device)
        # The empty part comes first, because a rank in a stage without layers has no weights.
        sums = torch.cat([differing[:0], *(_sum_of_bits(one.weight()).view(1) for one in engine.parameters.values())])
        for group in self._groups:
            mine = sums[group.places]
            highest = group.axis.all_reduce(torch.cat((mine, ~mine)), PURPOSE, op="max").wait()
            differing += (highest[: len(mine)] != ~highest[len(mine) :]).sum()
        self._posted[step] = sums, HostCopy(engine.topology.axis("world").all_reduce(differing, PURPOSE).wait())

    def read(self, step: int) -> list[str] | None:
        """Read the comparison of step `step`, as sentences that are the same on every rank.

        Each sentence names an axis, ranks on the axis that differ, and their differing weights. The list is empty if the replicas
        are equal.
        None: no comparison was posted for the step, or it was read before.
        """
        if step not in self._posted:
            return None
        sums, differing = self._posted.pop(step)
        (num_differing,) = differing.wait()
        if not num_differing:
            return []
        world, device = self._engine.topology.axis("world"), self._engine.topology.device
        found = [sentence for group in self._groups for sentence in _differences(group, sums)]
        told = gather_text(world, "\n".join(found), device, PURPOSE)
        # If one fault has several findings, those that name the wrong rank come first.
        return sorted({line for text in told for line in text.splitlines()}, key=lambda line: ("differ" in line, line))


def _groups(engine: Engine) -> Iterator[Group]:
    topology, names = engine.topology, list(engine.parameters)
    owners = {name: topology.sizes.owner_axis(name) for name in REDUCE_AXES}
    for name in (*owners.values(), "dp_replicas", "tp", "kv_replicas", "ends"):
        axis = topology.optional_axis(name)
        if axis is None:
            continue
        held = [
            place
            for place, parameter in enumerate(engine.parameters.values())
            if name in (owners[parameter.record.reduce_over], "dp_replicas", parameter.record.replicas)
        ]
        if held:
            places = to_device(held, torch.int64, topology.device)
            yield Group(axis, tuple(names[place] for place in held), places)


def _sum_of_bits(weight: torch.Tensor) -> torch.Tensor:
    """Sum a weight's bits as int64: over 64-bit words if the weight's size and offset are multiples of 8 bytes, else over elements.

    Replicas have the same offset in equal buffers, so all ranks choose the same words or elements.
    """
    flat = weight.detach().view(-1)
    per_word = 8 // flat.element_size()
    if flat.numel() % per_word == 0 and flat.storage_offset() % per_word == 0:
        return flat.view(torch.int64).sum()
    return flat.view(SAME_SIZE_INTEGERS[flat.element_size()]).sum(dtype=torch.int64)


def _differences(group: Group, sums: torch.Tensor) -> list[str]:
    """Name the weights in a group whose sums of bits differ between ranks, in sentences.

    The first rank on the group's axis gets the sentences, the others []. All must call it.
    """
    axis = group.axis
    by_rank = axis.all_gather(sums[group.places].view(1, -1), PURPOSE).wait().tolist()
    if axis.index:
        return []
    odd: dict[tuple[int, ...], list[str]] = {}
    for name, *values in zip(group.names, *by_rank, strict=True):
        if len(set(values)) > 1:
            odd.setdefault(_odd_ranks(axis.ranks, values), []).append(name)
    return [_sentence(axis, ranks, names) for ranks, names in odd.items()]


def _odd_ranks(ranks: Sequence[int], values: Sequence[int]) -> tuple[int, ...]:
    """Find the ranks whose value is not the majority's; () if there is no majority."""
    value, count = Counter(values).most_common(1)[0]
    return (
        tuple(rank for rank, one in zip(ranks, values, strict=True) if one != value) if 2 * count > len(ranks) else ()
    )


def _sentence(axis: Axis, odd: Sequence[int], names: Sequence[str]) -> str:
    weights = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    if not odd:
        return f"ranks {_list(axis.ranks)} ({axis.name} replicas) differ in {weights}, and no majority shows which one is wrong"
    others = [rank for rank in axis.ranks if rank not in odd]
    who = f"rank {odd[0]} holds" if len(odd) == 1 else f"ranks {_list(odd)} hold"
    return f"{who} a different {weights} than ranks {_list(others)} ({axis.name} replicas)"


def _list(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_SHOWN]))
    return shown + (f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else "")
