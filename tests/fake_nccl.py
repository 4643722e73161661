"""A process group that treats its host threads as NCCL does, over gloo on CPUs, for what only such a backend shows.

    connections    the first send or receive of a pair of ranks and a direction blocks the host until the peer's host has posted
                   the mirrored one; the messages of one group call connect together
    first call     of a group blocks the host until every member has made one (the communicator is created)
    dead peers     are not noticed: a call that waits for one goes on waiting, for the group's timeout
    shutdown       waits for every call that was posted, and for every member to shut down too, for ever: NCCL's manual says of
                   ncclCommDestroy that all ranks of a node should call it to avoid a hang
    abort          ends all of that at once

`install` registers it in this process; `run_ranks(..., backend=NAME)` of `tests/harness.py` starts ranks with it. Everything else
is gloo's: sums, bytes, order of messages. On the host there are no streams, so `wait` waits for the data, where NCCL's returns and
the host would be stopped later, by the first number that it reads.
"""

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

NAME = "fake_nccl"
POLL_SECONDS = 0.005


class FakeNccl(dist.ProcessGroup):
    """One member's side of a group.

    Args:
        store: of the group.
        rank, size: of this member, of the group.
        timeout: after which a call that has not ended raises.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.timeout = timeout
        self.aborted = threading.Event()
        self._store = store
        # gloo's own timeout comes long after this group's: it would close the connections.
        self._gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout + timedelta(hours=1))
        self._posted: list[Posted] = []
        self._messages: list[Message] | None = None
        self._open: set[str] = set()

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    def _set_group_name(self, name: str) -> None:
        super()._set_group_name(name)
        self._name = name

    @property
    def group_name(self) -> str:
        """torch asks the backend for it, which a group of Python has not."""
        return self._name

    # Collectives -----------------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None) -> "Posted":
        return self._post(lambda: [self._gloo.allreduce(tensors, opts)])

    def broadcast(self, tensors: Any, opts: Any = None) -> "Posted":
        return self._post(lambda: [self._gloo.broadcast(tensors, opts)])

    def all_gather_single(self, output: Any, shard: Any, opts: Any = None) -> "Posted":
        return self._post(lambda: [self._gloo._allgather_base(output, shard, opts)])

    def reduce_scatter_single(self, shard: Any, full: Any, opts: Any = None) -> "Posted":
        return self._post(lambda: [self._gloo._reduce_scatter_base(shard, full, opts)])

    # The names of the two before torch 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single

    def all_to_all_single(
        self, output: Any, sent: Any, rows_received: Any, rows_sent: Any, opts: Any = None
    ) -> "Posted":
        self._connect([(kind, peer) for peer in range(self.size()) for kind in ("send", "recv")])
        return self._post(lambda: [self._gloo.alltoall_base(output, sent, rows_received, rows_sent, opts)])

    # Its name before torch 2.13.
    alltoall_base = all_to_all_single

    # Messages --------------------------------------------------------------------------------------------------------------

    def send(self, tensors: Any, peer: int, tag: int) -> "Posted | None":
        return self._message("send", peer, lambda: self._gloo.send(tensors, peer, tag))

    def recv(self, tensors: Any, peer: int, tag: int) -> "Posted | None":
        return self._message("recv", peer, lambda: self._gloo.recv(tensors, peer, tag))

    def _start_coalescing(self, device: torch.device) -> None:
        self._messages = []

    def _end_coalescing(self, device: torch.device) -> "Posted":
        messages, self._messages = self._messages, None
        assert messages is not None, "a group call has begun"
        return self._post_messages(messages)

    def _message(self, kind: str, peer: int, post: Callable[[], Any]) -> "Posted | None":
        message = (kind, peer, post)
        if self._messages is None:
            return self._post_messages([message])
        self._messages.append(message)
        return None

    def _post_messages(self, messages: "Sequence[Message]") -> "Posted":
        self._connect([(kind, peer) for kind, peer, _ in messages])
        return self._post(lambda: [post() for *_, post in messages])

    def _connect(self, ends: Sequence[tuple[str, int]]) -> None:
        self._meet("first", [str(peer) for peer in range(self.size())], str(self.rank()))
        mine, theirs = [], []
        for kind, peer in ends:
            mirrored = "recv" if kind == "send" else "send"
            mine.append(f"{kind}/{self.rank()}/{peer}")
            theirs.append(f"{mirrored}/{peer}/{self.rank()}")
        self._meet("connect", theirs, *mine)

    @property
    def num_connections(self) -> int:
        """How many ways, each for one peer and direction, are open."""
        return sum(key.startswith("connect/") for key in self._open)

    # What only NCCL does -----------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        self._store.set(f"shutdown/{self.rank()}", "")
        everybody = [f"shutdown/{rank}" for rank in range(self.size())]
        while not self.aborted.wait(POLL_SECONDS):
            if all(posted.has_ended for posted in self._posted) and self._store.check(everybody):
                return

    def abort(self) -> None:
        self.aborted.set()

    def _post(self, post: Callable[[], list[Any]]) -> "Posted":
        self._meet("first", [str(peer) for peer in range(self.size())], str(self.rank()))
        self._posted = [posted for posted in self._posted if not posted.has_ended]
        self._posted.append(Posted(self, post()))
        return self._posted[-1]

    def _meet(self, what: str, theirs: Sequence[str], *mine: str) -> None:
        """Block this host until the others' keys are in the store; writes this member's first.

        Raises:
            DistBackendError: not within the group's timeout, or the group was aborted.
        """
        new = [f"{what}/{key}" for key in theirs if f"{what}/{key}" not in self._open]
        if not new:
            return
        for key in mine:
            self._store.set(f"{what}/{key}", "")
        deadline = time.monotonic() + self.timeout.total_seconds()
        while not self._store.check(new):
            if self.aborted.wait(POLL_SECONDS):
                raise dist.DistBackendError(f"NCCL error in: {', '.join(new)}: aborted")
            if time.monotonic() > deadline:
                raise dist.DistBackendError(f"NCCL error in: {', '.join(new)}: no peer within {self.timeout}")
        self._open.update(new)


Message = tuple[str, int, Callable[[], Any]]
"""send or recv, the peer's rank in the group, how to post it."""


class Posted:
    """The handle of a call, or of all messages of a group call."""

    def __init__(self, group: FakeNccl, works: Sequence[Any]) -> None:
        self._group = group
        self._started = time.monotonic()
        self._ended = threading.Event()
        threading.Thread(target=self._follow, args=(works,), daemon=True).start()

    def _follow(self, works: Sequence[Any]) -> None:
        try:
            for work in works:
                work.wait()
        except RuntimeError:
            return  # gloo has noticed that a peer is gone; NCCL does not
        self._ended.set()

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    def is_completed(self) -> bool:
        return self.has_ended

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the data.

        Raises:
            DistBackendError: not within the group's timeout, or the group was aborted.
        """
        timeout = timeout or self._group.timeout
        while not self._ended.wait(POLL_SECONDS):
            if self._group.aborted.is_set():
                raise dist.DistBackendError("NCCL error in: a call that was aborted")
            if time.monotonic() - self._started > timeout.total_seconds():
                raise dist.DistBackendError(f"NCCL error in: a call that has not ended within {timeout}")
        return True


def install() -> None:
    """Register the backend in this process; torch groups the messages of `batch_isend_irecv` for its own classes only."""
    dist.Backend.register_backend(NAME, FakeNccl, devices=["cpu"])
    of_torch = dist.batch_isend_irecv

    def batch_isend_irecv(messages: list[dist.P2POp]) -> list[Any]:
        group = messages[0].group
        if not isinstance(group, FakeNccl):
            return of_torch(messages)
        with _coalescing_manager(group, messages[0].tensor.device, async_ops=True) as manager:
            for one in messages:
                peer = {"group_dst" if one.op is dist.isend else "group_src": one.group_peer}
                one.op(one.tensor, group=group, tag=one.tag, **peer)
        return manager.works

    dist.batch_isend_irecv = batch_isend_irecv
