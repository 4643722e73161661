"""A training run in which one process is one rank of thousands: torch's fake backend, everything else as it is.

    launch.pretrain_gpt.main     config, run directory, engine, telemetry, heartbeat, hang watch, steps, end
      start                      a fake default group over a store that counts; a real `Topology`
      what rank 0 would say      there is no checkpoint: begin with initial weights

Collectives return at once and leave this rank's own values, so numbers are wrong and calls, files and requests are right.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the fake backend

from tests.counting_store import CountingStore
from triaxis.engine.checkpoint import resume
from triaxis.engine.comm.backends import Message
from triaxis.engine.comm.collectives import Axis
from triaxis.engine.comm.ledger import Event, Ledger
from triaxis.engine.comm.runtime import RankEnvironment, Runtime
from triaxis.engine.config.schema.run import RuntimeConfig
from triaxis.launch import pretrain_gpt
from triaxis.launch.rank import join

RANKS_PER_NODE = 8
CODE = (".py", ".pyc", ".so", ".zip")
"""Endings of files that Python opens when something is imported for the first time."""


@dataclass
class Seen:
    """What a rank did.

    Attributes:
        files: paths that it opened, in order, code left out.
        listings: folders that it listed.
        requests: to the store, by name.
        groups: sizes of the process groups that it made.
        calls: of all collectives and messages, in order.
        received_bytes: by purpose, of all-gathers: what the other members' shards take on this rank.
    """

    files: list[str] = field(default_factory=list)
    listings: list[str] = field(default_factory=list)
    requests: Counter[str] = field(default_factory=Counter)
    groups: list[int] = field(default_factory=list)
    calls: list[Event] = field(default_factory=list)

    @property
    def received_bytes(self) -> Mapping[str, int]:
        received: Counter[str] = Counter()
        for call in self.calls:
            if call.op == "all_gather" and call.dtype is not None:
                received[call.purpose] += (call.group_size - 1) * call.numel * call.dtype.itemsize
        return received

    def hear(self, event: str, arguments: Any) -> None:
        if event == "open" and isinstance(arguments[0], str) and not arguments[0].endswith(CODE):
            self.files.append(arguments[0])
        elif event in ("os.listdir", "os.scandir"):
            self.listings.append(str(arguments[0]))


def run_on_paper(config: Path, overrides: Sequence[str], rank: int, world_size: int) -> Seen:
    """Run all of a training run as one rank; its log goes where a rank's log goes."""
    seen = Seen()

    def start(environment: RankEnvironment, config: RuntimeConfig) -> Runtime:
        dist.init_process_group(
            "fake", rank=rank, world_size=world_size, store=CountingStore(dist.HashStore(), seen.requests)
        )
        return Runtime(torch.device("cpu"))

    post, new_group = Ledger.post, dist.new_group

    def post_and_note(ledger: Ledger, *arguments: Any, **named: Any) -> Event:
        event = post(ledger, *arguments, **named)
        seen.calls.append(event)
        return event

    def new_group_and_note(ranks: Sequence[int], **named: Any) -> Any:
        seen.groups.append(len(ranks))
        return new_group(ranks, **named)

    exchange = Axis.exchange

    def exchange_zeros(axis: Axis, messages: Sequence[Message], purpose: str) -> Any:
        for message in messages:
            if message.kind == "recv":
                message.tensor.zero_()  # what nobody has sent may be no number
        return exchange(axis, messages, purpose)

    variables = {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": rank % RANKS_PER_NODE,
        "LOCAL_WORLD_SIZE": RANKS_PER_NODE,
        "MASTER_PORT": 1,
    }
    with (
        patch.dict("os.environ", {name: str(value) for name, value in variables.items()}),
        patch.object(join, "start", start),
        patch.object(resume, "_rank_0_decides", lambda engine, decide: None),
        patch.object(Axis, "exchange", exchange_zeros),
        patch.object(Ledger, "post", post_and_note),
        patch.object(dist, "new_group", new_group_and_note),
        _hearing(seen),
    ):
        code = pretrain_gpt.main([str(config), *overrides])
    assert code == 0, f"rank {rank} of {world_size} ended with {code}"
    return seen


@contextmanager
def _hearing(seen: Seen) -> Iterator[None]:
    """Let it hear of Python's audit events. A hook stays for the life of the process, so afterwards it does nothing."""
    listeners = [seen]

    def hook(event: str, arguments: Any) -> None:
        for listener in listeners:
            listener.hear(event, arguments)

    sys.addaudithook(hook)
    try:
        yield
    finally:
        listeners.clear()
