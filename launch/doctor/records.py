"""What the ranks tell each other, and what follows from it (no torch here). All of it is JSON on its way."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Level(Enum):
    """How bad a finding is; only FAIL changes the exit code."""

    OK = "OK"
    WARN = "WARN"
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True)
class Finding:
    """The answer to one question, or one thing that is out of line.

    Attributes:
        check: the question ("versions", "clocks", ...).
        text: what was found.
        hosts: those that are out of line; empty where no host can be named.
        advice: what to do; empty for OK.
    """

    level: Level
    check: str
    text: str
    hosts: tuple[str, ...] = ()
    advice: str = ""


@dataclass(frozen=True, slots=True)
class RootFacts:
    """One folder that the run writes to, as one rank sees it.

    Attributes:
        key: of the configuration ("runtime.runs_dir").
        path: where the test file was: the folder, or what there is of it.
        sees_rank_0: whether the file that rank 0 wrote could be read here, with its content.
        seen_by_rank_0: whether rank 0 could read what this node wrote.
        problem: why nothing could be written here; empty: it could.
        free_bytes: on the file system.
    """

    key: str
    path: str
    sees_rank_0: bool
    seen_by_rank_0: bool
    problem: str
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Clock:
    """A node's clock minus rank 0's, in seconds; the truth is within `precision_seconds` of it."""

    offset_seconds: float
    precision_seconds: float


@dataclass(frozen=True, slots=True)
class NetworkFacts:
    """What a rank's sockets use.

    Attributes:
        interface: over which this node reaches the others ("" for a lone process).
        address: of that interface.
        mbits: megabits per second that the interface says it can do; 0: it says nothing.
        fastest: name and megabits of this node's fastest interface that is up.
        listening: addresses at which this rank, or its launcher, listens.
    """

    interface: str
    address: str
    mbits: int
    fastest: tuple[str, int]
    listening: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LimitFacts:
    """Limits of a rank's process.

    Attributes:
        locked_bytes: that it may lock in memory; None: no limit.
        shared_bytes: size of /dev/shm; 0: there is none.
        has_infiniband: whether the node has an InfiniBand adapter.
    """

    locked_bytes: int | None
    shared_bytes: int
    has_infiniband: bool


@dataclass(frozen=True, slots=True)
class RankFacts:
    """One rank and what it stands on.

    Attributes:
        rank: global.
        node: the layout's number of its node.
        host: the machine's name.
        equal: versions, drivers and whatever else must not differ, by name.
        alike: what may differ, and seldom should.
        network: its sockets.
        roots: folders of the run.
        corpora: bytes of each data file; None: it is not there.
        gpu: its GPU's UUID; None on the CPU.
        peers: UUIDs of the GPUs whose memory it can reach.
        links: of all pairs of this node's GPUs, by UUID, as `nvidia-smi topo` names them; from the first rank of a node.
        clock: against rank 0's; from the first rank of a node.
        limits: of the process.
    """

    rank: int
    node: int
    host: str
    equal: Mapping[str, str]
    alike: Mapping[str, str]
    network: NetworkFacts
    roots: tuple[RootFacts, ...] = ()
    corpora: Mapping[str, int | None] = field(default_factory=dict)
    gpu: str | None = None
    peers: tuple[str, ...] = ()
    links: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    clock: Clock | None = None
    limits: LimitFacts | None = None

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> "RankFacts":
        values = dict(tree)
        network = values["network"]
        clock, limits = values["clock"], values["limits"]
        return cls(
            **values
            | {
                "network": NetworkFacts(
                    **network | {"fastest": tuple(network["fastest"]), "listening": tuple(network["listening"])}
                ),
                "roots": tuple(RootFacts(**root) for root in tree["roots"]),
                "peers": tuple(tree["peers"]),
                "clock": None if clock is None else Clock(**clock),
                "limits": None if limits is None else LimitFacts(**limits),
            }
        )


@dataclass(frozen=True, slots=True)
class Size:
    """A message that the run will send.

    Attributes:
        axis, op: whose, and what with.
        num_bytes: as the ledger counts: the whole tensor, but the shard for an all-gather.
        calls: in a step, per rank.
    """

    axis: str
    op: str
    num_bytes: int
    calls: int


@dataclass(frozen=True, slots=True)
class GroupRate:
    """One group doing one operation, by itself.

    Attributes:
        axis: the group's.
        op: as the ledger names it.
        num_bytes: of one call, as the ledger counts them (the shard for an all-gather).
        calls: in a step of the run, per rank.
        ranks: of the group, or sender and receiver.
        seconds: of one call, in the best of some rounds; the slowest member's.
        bytes_per_second: bus bandwidth: ring bytes of a rank / seconds.
    """

    axis: str
    op: str
    num_bytes: int
    calls: int
    ranks: tuple[int, ...]
    seconds: float
    bytes_per_second: float

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> "GroupRate":
        values = dict(tree)
        return cls(**values | {"ranks": tuple(tree["ranks"])})


@dataclass(frozen=True, slots=True)
class Needs:
    """What the run asks of its nodes.

    Attributes:
        backend: of its collectives.
        save_bytes: of one checkpoint; 0: it saves none.
        kept_saves: as many lie on the disk in the end; None: all that are made.
        shared: keys of the folders that all nodes must share.
        saved_to: key of the folder that checkpoints go to.
    """

    backend: str
    save_bytes: int = 0
    kept_saves: int | None = 0
    shared: tuple[str, ...] = ()
    saved_to: str = ""


@dataclass(frozen=True, slots=True)
class Examination:
    """All that was found out. `paths` are between nodes: rank to rank, one direction at a time."""

    needs: Needs
    facts: tuple[RankFacts, ...]
    groups: tuple[GroupRate, ...] = ()
    paths: tuple[GroupRate, ...] = ()
    tp_groups: tuple[tuple[int, ...], ...] = ()
