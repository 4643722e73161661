"""Define the records that ranks exchange as JSON, and the findings that follow from them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Level(Enum):
    """The severity of a finding. Only FAIL changes the exit code."""

    OK = "OK"
    WARN = "WARN"
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True)
class Finding:
    """A result of one check, either that all is well or one thing that is out of line.

    Attributes:
        check: name of the check ("versions", "clocks", ...).
        text: finding in words.
        hosts: hosts that are out of line; empty if none can be named.
        advice: remedy; empty for OK.
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
        key: configuration key ("runtime.runs_dir").
        path: folder with the test file, either the folder itself or its nearest parent that exists.
        sees_rank_0: whether this rank could read rank 0's file, with its content.
        seen_by_rank_0: whether rank 0 could read this node's file.
        problem: reason why a write failed here; empty: it succeeded.
        free_bytes: free space on the file system.
    """

    key: str
    path: str
    sees_rank_0: bool
    seen_by_rank_0: bool
    problem: str
    free_bytes: int


@dataclass(frozen=True, slots=True)
class NodeClock:
    """A node's clock minus rank 0's, in seconds. The true offset is within `precision_seconds`."""

    offset_seconds: float
    precision_seconds: float


@dataclass(frozen=True, slots=True)
class NetworkFacts:
    """The network that a rank's sockets use.

    Attributes:
        interface: interface that reaches the other nodes ("" for a lone process).
        address: the interface's address.
        mbits: the interface's stated megabits per second; 0: unknown.
        fastest: name and megabits per second of this node's fastest active interface.
        listening: addresses at which this rank, or its launcher, listens.
    """

    interface: str
    address: str
    mbits: int
    fastest: tuple[str, int]
    listening: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LimitFacts:
    """Limits on a rank's process.

    Attributes:
        locked_bytes: limit on locked memory; None: no limit.
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
        name: installed name.
        version: installed version; "" if it is not installed.
        use: use of the package in a run.
        problem: reason why the package cannot be used here; "" if it can, or was not tried.
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
    """The compiler for kernels at run time, and its headers.

    Attributes:
        path: C compiler; "" if there is none.
        headers: folder that should contain Python.h.
        has_headers: whether Python.h is there.
    """

    path: str
    headers: str
    has_headers: bool

    @property
    def lacking(self) -> str:
        """What compiling kernels lacks here (C compiler, Python.h), in words; "" if nothing."""
        words = [] if self.path else ["no C compiler (gcc, clang, or what CC names)"]
        return " and ".join(words if self.has_headers else [*words, f"no Python.h in {self.headers}"])


@dataclass(frozen=True, slots=True)
class RankFacts:
    """One rank, its node and its machine.

    Attributes:
        rank: global rank.
        node: the node's number in the layout.
        host: machine name.
        equal: values that must not differ, such as versions and drivers, by name.
        alike: values whose difference gives only a warning, such as the machine's memory, by name.
        network: network used by the rank's sockets.
        roots: folders that the run writes to.
        corpora: size of each data file in bytes; None: it does not exist.
        gpu: UUID of the rank's GPU; None on the CPU.
        peers: UUIDs of GPUs whose memory the rank's GPU can reach.
        links: links between all pairs of the node's GPUs, by UUID, as `nvidia-smi topo` names them; from a node's first rank.
        clock: clock compared with rank 0's; from a node's first rank.
        limits: limits on the process.
        packages: packages that the run may use.
        compiler: compiler for kernels.
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


def hosts_of(facts: Iterable[RankFacts]) -> tuple[str, ...]:
    """List the ranks' hosts, each once, in the order of the ranks."""
    return tuple(dict.fromkeys(one.host for one in facts))


@dataclass(frozen=True, slots=True)
class Size:
    """A message that the run will send.

    Attributes:
        axis, op: axis of the group, and the operation.
        num_bytes: bytes of the whole tensor, or of the shard for an all-gather.
        calls: calls per step and rank.
    """

    axis: str
    op: str
    num_bytes: int
    calls: int


@dataclass(frozen=True, slots=True)
class GroupRate:
    """The rate of one group in one operation.

    Attributes:
        axis: the group's axis.
        op: operation, such as `all_reduce` or `send`.
        num_bytes: bytes per call, for the whole tensor, or for the shard in an all-gather.
        calls: calls per step of the run, per rank.
        ranks: members, or sender and receiver.
        seconds: slowest member's time per call, in the fastest of several rounds of calls.
        bytes_per_second: bus bandwidth, as ring bytes per rank / seconds.
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
    """Requirements of a run, which its nodes must meet.

    Attributes:
        backend: backend for collectives.
        save_bytes: size of one checkpoint; 0: the run saves none.
        kept_saves: number of checkpoints kept on disk; None: all.
        shared: configuration keys of the folders that all nodes must share, such as `runtime.runs_dir`.
        saved_to: configuration key of the folder for checkpoints.
    """

    backend: str
    save_bytes: int = 0
    kept_saves: int | None = 0
    shared: tuple[str, ...] = ()
    saved_to: str = ""


@dataclass(frozen=True, slots=True)
class Examination:
    """All ranks' facts and all measured rates.

    `groups` has rates of groups on the layout's axes. `paths` has rates from a rank to a rank on another node. `tp_groups` lists
    the ranks of each tensor-parallel group.
    """

    needs: Needs
    facts: tuple[RankFacts, ...]
    groups: tuple[GroupRate, ...] = ()
    paths: tuple[GroupRate, ...] = ()
    tp_groups: tuple[tuple[int, ...], ...] = ()
