"""Measure bandwidth and clock offsets between ranks, and test the run's folders.

Bus bandwidth is the bytes per second that a ring moves over each link, as in nccl-tests. So operations and group sizes can be
compared. With t as the time per call and n as the number of ranks, it is:

    all-reduce         2 (n-1)/n x bytes of the tensor / t
    all-gather         (n-1)/n x bytes of the whole (n shards) / t
    reduce-scatter     (n-1)/n x bytes of the whole / t
    send               bytes / t

Each number is the best of at most `ROUNDS`, because a disturbance only makes a machine slower.
"""

import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from triaxis.engine.comm.backends import Message
from triaxis.engine.comm.collectives import Axis
from triaxis.engine.comm.texts import announce, gather_text
from triaxis.engine.comm.topology import Topology
from triaxis.engine.numerics.precision import AGREEMENT_DTYPE
from triaxis.launch.doctor.records import GroupRate, NodeClock, RootFacts, Size

ROUNDS = 5
ROUND_SECONDS = 0.02
MOST_CALLS = 50
MOST_SECONDS = 0.3
"""Time limit for all rounds of one group or path, unless a single call takes longer."""

PINGS = 8
PURPOSE = "doctor"
PATIENCE_SECONDS = 10.0
"""Time after which a network file system should show another node's files."""


def group_rates(topology: Topology, sizes: Iterable[Size], dtype: torch.dtype) -> list[GroupRate]:
    """Measure the rates of this rank's groups. All groups on an axis run at the same time.

    Sends are measured path by path (`path_rates`). Groups of one rank are left out.

    Args:
        sizes: messages to time; all ranks pass the same list.
    """
    found = []
    for size in sizes:
        axis = topology.optional_axis(size.axis)
        topology.axis("world").barrier(topology.device, PURPOSE)
        if axis is None or axis.size == 1:
            continue
        if size.op == "send":
            hops = list(range(axis.size - 1))
            pairs = [(hop, hop + 1) if size.axis == "pp_forward" else (hop + 1, hop) for hop in hops]
            found += path_rates(axis, [pairs[::2], pairs[1::2]], size, topology.device)
            continue
        # The tensor divides into one equal part per rank.
        numel = max(1, size.num_bytes // dtype.itemsize // axis.size) * axis.size
        tensor = torch.zeros(numel, dtype=dtype, device=topology.device)
        seconds = _seconds_of_a_call(axis, size.op, tensor)
        rate = _ring_bytes(size.op, axis.size, numel * dtype.itemsize) / seconds
        found.append(GroupRate(size.axis, size.op, size.num_bytes, size.calls, axis.ranks, seconds, rate))
    topology.ledger.reset()
    return found


def _ring_bytes(op: str, size: int, num_bytes: int) -> float:
    """Count the bytes that a rank sends. `num_bytes` is a shard's size for an all-gather, else the whole tensor's."""
    part = (size - 1) / size
    shares = {
        "all_reduce": 2 * part,
        "reduce_scatter": part,
        "all_to_all": part,
        "all_to_all_rows": part,
        "all_gather": size - 1,
    }
    return shares[op] * num_bytes


def _seconds_of_a_call(axis: Axis, op: str, tensor: torch.Tensor) -> float:
    """Return the seconds per call in the fastest round.

    A round makes several calls in a row, and takes as long as its slowest member.
    All-to-all sends equally many rows to each member.
    """
    equal = [tensor.numel() // axis.size] * axis.size
    call: Callable[[], torch.Tensor] = {
        "all_reduce": lambda: axis.all_reduce(tensor, PURPOSE).wait(),
        "all_gather": lambda: axis.all_gather(tensor, PURPOSE).wait(),
        "reduce_scatter": lambda: axis.reduce_scatter(tensor, PURPOSE).wait(),
        "all_to_all": lambda: axis.all_to_all(tensor.view(axis.size, -1), PURPOSE).wait(),
        "all_to_all_rows": lambda: axis.all_to_all_rows(tensor, equal, equal, PURPOSE).wait(),
    }[op]

    def together(num_calls: int) -> float:
        axis.barrier(tensor.device, PURPOSE)
        _settle(tensor.device)
        began = time.perf_counter()
        for _ in range(num_calls):
            call()
        _settle(tensor.device)
        mine = torch.tensor([time.perf_counter() - began], dtype=AGREEMENT_DTYPE, device=tensor.device)
        return float(axis.all_reduce(mine, PURPOSE, op="max").wait().item()) / num_calls

    together(1)
    num_calls, num_rounds = _calls_and_rounds(together(1))
    return min(together(num_calls) for _ in range(num_rounds))


def path_rates(
    axis: Axis, phases: Sequence[Sequence[tuple[int, int]]], size: Size, device: torch.device
) -> list[GroupRate]:
    """Measure the paths on which this rank sends, one direction at a time.

    Args:
        axis: axis that contains all members.
        phases: pairs (sender, receiver), by index on the axis; no member is in two pairs of the same phase.
        size: message size, with its labels.
    """
    found = []
    tensor = torch.zeros(max(1, size.num_bytes), dtype=torch.uint8, device=device)
    for pairs in phases:
        for sender, receiver in pairs:
            if axis.index == sender:
                seconds = _send_and_time(axis, receiver, tensor)
                ranks = (axis.ranks[sender], axis.ranks[receiver])
                found.append(
                    GroupRate(size.axis, "send", size.num_bytes, size.calls, ranks, seconds, len(tensor) / seconds)
                )
            elif axis.index == receiver:
                _receive(axis, sender, tensor)
    return found


def _send_and_time(axis: Axis, peer: int, tensor: torch.Tensor) -> float:
    """Return the seconds per call, in the best round.

    A round begins when the receiver says that it is ready, and ends when it says that it has received everything.
    """

    def round_of(num_calls: int) -> float:
        _number(axis, peer, tensor.device, float(num_calls))
        _number(axis, peer, tensor.device)
        began = time.perf_counter()
        for _ in range(num_calls):
            _one(axis, "send", tensor, peer)
        _number(axis, peer, tensor.device)
        return (time.perf_counter() - began) / num_calls

    round_of(1)
    num_calls, num_rounds = _calls_and_rounds(round_of(1))
    best = min(round_of(num_calls) for _ in range(num_rounds))
    _number(axis, peer, tensor.device, 0.0)
    return best


def _receive(axis: Axis, peer: int, tensor: torch.Tensor) -> None:
    while num_calls := int(_number(axis, peer, tensor.device)):
        _number(axis, peer, tensor.device, 0.0)
        for _ in range(num_calls):
            _one(axis, "recv", tensor, peer)
        _number(axis, peer, tensor.device, 0.0)


def _number(axis: Axis, peer: int, device: torch.device, value: float | None = None) -> float:
    """Send `value` to a member and return it. If `value` is None, receive a number and return that."""
    tensor = torch.tensor([0.0 if value is None else value], dtype=AGREEMENT_DTYPE, device=device)
    _one(axis, "recv" if value is None else "send", tensor, peer)
    return float(tensor.item())


def _one(axis: Axis, kind: str, tensor: torch.Tensor, peer: int) -> None:
    (pending,) = axis.exchange([Message("send" if kind == "send" else "recv", tensor, peer)], PURPOSE)
    pending.wait()
    _settle(tensor.device)


def _calls_and_rounds(seconds: float) -> tuple[int, int]:
    """Choose (calls per round, rounds) for a call that takes this many seconds."""
    num_calls = max(1, min(MOST_CALLS, int(ROUND_SECONDS / max(seconds, 1e-9))))
    return num_calls, max(1, min(ROUNDS, int(MOST_SECONDS / max(num_calls * seconds, 1e-9))))


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_clock(topology: Topology, clock: Callable[[], float] = time.time) -> NodeClock | None:
    """Compare this node's clock with rank 0's; None unless this rank is its node's first.

    Rank 0 assumes that the node answered halfway between rank 0's request and the answer's arrival. The quickest of `PINGS` rounds
    counts. Half its duration is the largest possible error.
    """
    grid, world, device = topology.grid, topology.axis("world"), topology.device
    firsts = range(0, grid.world_size, grid.ranks_per_node)
    found = NodeClock(0.0, 0.0) if topology.rank == 0 else None
    for peer in firsts[1:]:
        if topology.rank == 0:
            tries = []
            for _ in range(PINGS):
                sent = clock()
                _number(world, peer, device, 1.0)
                theirs = _number(world, peer, device)
                received = clock()
                tries.append((received - sent, theirs - (sent + received) / 2))
            trip, offset = min(tries)
            _number(world, peer, device, offset)
            _number(world, peer, device, trip / 2)
        elif topology.rank == peer:
            for _ in range(PINGS):
                _number(world, 0, device)
                _number(world, 0, device, clock())
            found = NodeClock(_number(world, 0, device), _number(world, 0, device))
    return found


def check_folders(
    topology: Topology, roots: Mapping[str, Path], patience_seconds: float = PATIENCE_SECONDS
) -> tuple[RootFacts, ...]:
    """Write a test file into each folder on every node. Rank 0 reads all of them, the others read rank 0's.

    The test files of a missing folder go to its nearest parent that exists on rank 0's node. All test files are removed.

    Args:
        roots: configuration key -> folder; the same on all ranks.
        patience_seconds: time limit for another node's file to appear.
    """
    world, device, grid = topology.axis("world"), topology.device, topology.grid
    is_first = topology.rank % grid.ranks_per_node == 0
    nonce = announce(world, secrets.token_hex(8), device, PURPOSE)
    found = []
    for key, root in roots.items():
        path = Path(announce(world, str(_nearest(root)), device, PURPOSE))
        mine = path / f".triaxis-doctor-{nonce}-{topology.rank}"
        problem = _write(mine, nonce) if is_first else ""
        problems = gather_text(world, problem, device, PURPOSE)
        wrote = [rank for rank in range(0, grid.world_size, grid.ranks_per_node) if not problems[rank]]
        deadline = time.monotonic() + patience_seconds
        seen = {
            rank: _reads(path / f".triaxis-doctor-{nonce}-{rank}", nonce, deadline)
            for rank in wrote
            if rank == 0 or topology.rank == 0  # rank 0 reads the files of all, the others that of rank 0
        }
        writers = json.dumps(sorted(rank for rank in seen if seen[rank]))
        answers = json.loads(gather_text(world, writers, device, PURPOSE, most_bytes=None)[0])
        node_first = topology.rank // grid.ranks_per_node * grid.ranks_per_node
        # All ranks have read by now.
        if is_first and not problem:
            mine.unlink(missing_ok=True)
        free = shutil.disk_usage(path).free if path.exists() else 0
        found.append(RootFacts(key, str(path), bool(seen.get(0)), node_first in answers, problems[node_first], free))
    return tuple(found)


def _nearest(path: Path) -> Path:
    path = path.absolute()
    return next(one for one in (path, *path.parents) if one.is_dir())


def _write(path: Path, content: str) -> str:
    """Write a file. Return the reason for a failure, or ""."""
    try:
        with path.open("w") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return f"{error.strerror}"
    return ""


def _reads(path: Path, content: str, deadline: float) -> bool:
    while True:
        try:
            # Listing the folder makes a network file system ask its server again.
            if path in path.parent.iterdir() and path.read_text() == content:
                return True
        except OSError:
            if not path.parent.is_dir():
                return False
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)


def gather_rates(world: Axis, mine: Sequence[GroupRate], device: torch.device) -> list[GroupRate]:
    """Gather each group's rate from its first rank, and each path's from its sender."""
    texts = gather_text(world, json.dumps([asdict(one) for one in mine]), device, PURPOSE, most_bytes=None)
    found = []
    for rank, text in enumerate(texts):
        found += [one for one in map(GroupRate.from_json, json.loads(text)) if one.ranks[0] == rank]
    return found
