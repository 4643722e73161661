"""Report that a rank's peer is gone, in one line with the places and the next action.

    rank 0 (node1, pid 4711, GPU 0) lost rank 2 (node 1) in the recv over pp_forward: Connection closed by peer. ...

Only the log has the traceback. The launcher's or the lost rank's output has the first cause.
"""

import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from triaxis.engine.comm.ledger import NO_PEER
from triaxis.engine.comm.topology import Topology
from triaxis.engine.errors import PeerLostError
from triaxis.engine.resilience.hang.heartbeat import Beat, Heartbeat
from triaxis.launch.start.process.failure import where

_ADDRESS = r"\[[0-9a-fA-F.:]+\](?::\d+)?"
_LOST = re.compile(
    rf"(?:{_ADDRESS}: )?"
    r"(?:connection (?:closed|reset) by (?:remote )?peer|connection closed|broken pipe|connection refused|connection reset"
    r"|ncclRemoteError|remote process exited|socket (?:closed|timeout)|timed out waiting|connection timed out)"
    rf"(?: {_ADDRESS})?",
    re.IGNORECASE,
)
"""Words in gloo's, NCCL's and the torch store's errors about a peer that is gone or does not answer, with the address, if any.

gloo prints the peer's address after the words if the peer closed the connection, and before them if unread bytes led to a reset.
"""

_SHOWN = 4
"""Ranks of a collective to name one by one."""


@contextmanager
def naming_lost_peers(
    topology: Topology, heartbeat: Heartbeat, log: TextIO, next_action: Callable[[], str]
) -> Iterator[None]:
    """Turn a connection failure inside the block into a readable error, and write its traceback to the log.

    Args:
        heartbeat: this rank's heartbeat, which has the call that the rank waits for.
        next_action: function () -> the next action, as a clause.

    Raises:
        PeerLostError: instead of the backend's error.
    """
    try:
        yield
    except RuntimeError as error:
        if (cause := _LOST.search(str(error))) is None:
            raise
        traceback.print_exception(error, file=log)
        log.flush()
        who = f"rank {topology.rank} ({where(topology.device.index)})"
        raise PeerLostError(
            f"{who} lost {lost(heartbeat.read(), topology)}: {cause[0]}. The output of the rank or node that ended first says why; "
            f"the traceback is in this rank's log. Next: {next_action()}."
        ) from error


def lost(beat: Beat, topology: Topology) -> str:
    """Describe the lost peers and the call in which they were lost."""
    if not beat.op:  # a post: nobody waits yet
        return "a peer"
    axis = topology.optional_axis(beat.axis)
    assert axis is not None, "this rank waits on it"
    ranks = [rank for rank in axis.ranks if rank != topology.rank]
    if beat.peer != NO_PEER:
        ranks = [axis.ranks[beat.peer]]
    named = [f"rank {rank} (node {topology.grid.node(rank)})" for rank in ranks[:_SHOWN]]
    more = f" or one of {len(ranks) - _SHOWN:,} more" if len(ranks) > _SHOWN else ""
    return f"{' or '.join(named)}{more} in the {beat.op} over {beat.axis} ({beat.purpose})"
