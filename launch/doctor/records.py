"""Records that the ranks exchange as JSON, and the findings that follow from them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Level(Enum):
    """The severity of a finding; only FAIL changes the exit code."""

    OK = "OK"
    WARN = "WARN"
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True)
class Finding:
    """The answer to one question, or one thing that is out of line.

    Attributes:
        check: the question ("versions", "clocks", ...).
        text: the finding in words.
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
        path: of the test file: the folder, or its nearest parent that exists.
        sees_rank_0: whether the file that rank 0 wrote could be read here, with its content.
        seen_by_rank_0: whether rank 0 could read what this node wrote.
        problem: the reason why a write failed here; empty: it succeeded.
        free_bytes: on the file system.
    """

    key: str
    path: str
    sees_rank_0: bool
    seen_by_rank_0: bool
    problem: str
    free_bytes: int


@dataclass(frozen=True, slots=True)
class NodeClock:
    """A node's clock minus rank 0's, in seconds; the truth is within `precision_seconds` of it."""

    offset_seconds: float
    precision_seconds: float


@dataclass(frozen=True, slots=True)
class NetworkFacts:
    """The network that a rank's sockets use.

    Attributes:
        interface: the one over which this node reaches the others ("" for a lone process).
        address: of that interface.
        mbits: stated megabits per second of the interface; 0: unknown.
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
        locked_bytes: the most that it may lock in memory; None: no limit.
        shared_bytes: size of /dev/shm; 0: there is none.
        has_infiniband: whether the node has an InfiniBand adapter.
    """

    locked_bytes: int | None
    shared_bytes: int
    has_infiniband: bool


@dataclass(frozen=True, slots=True)
class PackageFacts:
    """A package that a run may use.

    Attributes:
        name: as it is installed.
        version: "" where it is not installed.
        use: what a run does with it.
        problem: the reason why it cannot be used here; "" where it can, or is not tried.
    """

    name: str
    version: str
    use: str
    problem: str = ""

    def __str__(self) -> str:
        usable = f", not usable here: {self.problem}" if self.problem else ""
        return f"{self.version}{usable}" if self.version else "not found"


@dataclass(frozen=True, slots=True)
class CompilerFacts:
    """The compiler of kernels at run time, and its headers.

    Attributes:
        path: of a C compiler; "" where there is none.
        headers: folder in which Python.h is looked for.
        has_headers: it is there.
    """

    path: str
    headers: str
    has_headers: bool

    @property
    def lacking(self) -> str:
        """Return what is not there, in words; "" where nothing is missing."""
        words = [] if self.path else ["no C compiler (gcc, clang, or what CC names)"]
        return " and ".join(words if self.has_headers else [*words, f"no Python.h in {self.headers}"])


@dataclass(frozen=True, slots=True)
class RankFacts:
    """One rank, its node and its machine.

    Attributes:
        rank: global.
        node: the layout's number of its node.
        host: the machine's name.
        equal: values that must not differ, such as versions and drivers, by name.
        alike: values that may differ, and seldom should.
        network: its sockets.
        roots: folders of the run.
        corpora: bytes of each data file; None: it is not there.
        gpu: its GPU's UUID; None on the CPU.
        peers: UUIDs of the GPUs whose memory it can reach.
        links: of all pairs of this node's GPUs, by UUID, as `nvidia-smi topo` names them; from the first rank of a node.
        clock: against rank 0's; from the first rank of a node.
        limits: of the process.
        packages: those that the run may use.
        compiler: of kernels.
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
    clock: NodeClock | None = None
    limits: LimitFacts | None = None
    packages: tuple[PackageFacts, ...] = ()
    compiler: CompilerFacts | None = None

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> "RankFacts":
        network, clock, limits, compiler = (tree[name] for name in ("network", "clock", "limits", "compiler"))
        return cls(
            **dict(tree)
            | {
                "network": NetworkFacts(
                    **network | {"fastest": tuple(network["fastest"]), "listening": tuple(network["listening"])}
                ),
                "roots": tuple(RootFacts(**root) for root in tree["roots"]),
                "peers": tuple(tree["peers"]),
                "clock": None if clock is None else NodeClock(**clock),
                "limits": None if limits is None else LimitFacts(**limits),
                "packages": tuple(PackageFacts(**package) for package in tree["packages"]),
                "compiler": None if compiler is None else CompilerFacts(**compiler),
            }
        )


@dataclass(frozen=True, slots=True)
class Size:
    """A message that the run will send.

    Attributes:
        axis, op: its group, and its operation.
        num_bytes: as the ledger counts: the whole tensor, but the shard for an all-gather.
        calls: in a step, per rank.
    """

    axis: str
    op: str
    num_bytes: int
    calls: int


@dataclass(frozen=True, slots=True)
class GroupRate:
    """The rate of one group in one operation.

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
        return cls(**dict(tree) | {"ranks": tuple(tree["ranks"])})


@dataclass(frozen=True, slots=True)
class Needs:
    """The needs of the run, which its nodes must meet.

    Attributes:
        backend: of its collectives.
        save_bytes: of one checkpoint; 0: it saves none.
        kept_saves: number that stays on the disk; None: all that are made.
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
    """All facts and rates. `paths` are between nodes: rank to rank, one direction at a time."""

    needs: Needs
    facts: tuple[RankFacts, ...]
    groups: tuple[GroupRate, ...] = ()
    paths: tuple[GroupRate, ...] = ()
    tp_groups: tuple[tuple[int, ...], ...] = ()
