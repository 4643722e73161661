"""Find the nodes that are out of line, from all ranks' facts and rates.

Values and rates are compared only between nodes. A value is out of line if most nodes have another. A rate is out of line if it is
below half the median over equal groups (`SLOW`). Every rank computes the same findings.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations

from triaxis.engine.errors import counted
from triaxis.engine.telemetry.outlets.format import gigabytes
from triaxis.launch.doctor.compiler import judge_compiler
from triaxis.launch.doctor.limits import judge_limits
from triaxis.launch.doctor.rates import judge_groups, judge_paths
from triaxis.launch.doctor.records import Examination, Finding, Level, hosts_of

CLOCK_WARN_SECONDS = 0.5
"""Clock difference that gives a warning: logs and failures from several nodes are ordered by the nodes' clocks."""

CLOCK_FAIL_SECONDS = 30.0
"""Clock difference that is a failure: one node's files are in another's future, and SLURM's munge, make and object stores fail."""

MOST_NAMED = 6


def judge(seen: Examination) -> list[Finding]:
    """Run all checks in order.

    A check that applies ends with an OK, which counts only if the check has found nothing wrong.
    """
    checks: tuple[Callable[[Examination], Iterable[Finding]], ...] = (
        judge_nodes,
        judge_versions,
        judge_gpus,
        judge_limits,
        judge_compiler,
        judge_interfaces,
        judge_listeners,
        judge_folders,
        judge_disk,
        judge_corpora,
        judge_clocks,
        judge_groups,
        judge_paths,
    )
    findings: list[Finding] = []
    for check in checks:
        found = list(check(seen))
        findings += [one for one in found if one.level is not Level.OK] or found
    return findings


def worst(findings: Iterable[Finding]) -> Level:
    levels = {finding.level for finding in findings}
    return next((level for level in (Level.FAIL, Level.WARN) if level in levels), Level.OK)


def judge_nodes(seen: Examination) -> Iterator[Finding]:
    """Check that each of the layout's nodes is one host. A node on several hosts is FAIL, several nodes on one host are WARN."""
    hosts: dict[int, dict[str, None]] = {}
    for one in seen.facts:
        hosts.setdefault(one.node, {})[one.host] = None
    split = {node: tuple(names) for node, names in hosts.items() if len(names) > 1}
    for node, names in split.items():
        yield Finding(
            Level.FAIL,
            "places",
            f"node {node} of the layout is on {_listed(names)}",
            names,
            "Tensor-parallel groups would cross the network. Number the ranks node by node (srun "
            "--distribution=block), or correct runtime.ranks_per_node.",
        )
    hosts_by_name = Counter(next(iter(names)) for names in hosts.values())
    shared = [name for name, count in hosts_by_name.items() if count > 1]
    if shared and not split:
        yield Finding(
            Level.WARN,
            "places",
            f"several layout nodes are on the same host: {_listed(shared)}",
            tuple(shared),
            "They share its GPUs and its network. If these are machines with equal names, give each its own: doctor "
            "tells machines apart by name.",
        )
    ranks, nodes = counted(len(seen.facts), "rank"), counted(len(hosts), "node")
    yield Finding(Level.OK, "places", f"{ranks} on {nodes}: {_listed(hosts_of(seen.facts))}")


def judge_versions(seen: Examination) -> Iterator[Finding]:
    """Compare the values that must be equal on all ranks (FAIL), and those that seldom should differ (WARN)."""
    for level, facts in (
        (Level.FAIL, {one.rank: one.equal for one in seen.facts}),
        (Level.WARN, {one.rank: one.alike for one in seen.facts}),
    ):
        names = dict.fromkeys(name for values in facts.values() for name in values)
        for name in names:
            # Some equal values come from a node's first rank only; a missing variable is unset.
            values = {rank: own.get(name, "unset") for rank, own in facts.items() if level is Level.WARN or name in own}
            usual = _usual(values)
            odd = [one for one in seen.facts if values.get(one.rank, usual) != usual]
            if odd:
                found = _listed(dict.fromkeys(f"{values[one.rank]} on {one.host}" for one in odd))
                yield Finding(
                    level,
                    "versions",
                    f"{name}: {found}; {usual} elsewhere",
                    hosts_of(odd),
                    f"Make {name} equal on all nodes; otherwise ranks may compute or communicate differently."
                    if level is Level.FAIL
                    else f"Check whether {name} may differ; the slowest node sets the pace.",
                )
    shown = [f"{name} {value}" for name, value in seen.facts[0].equal.items()]
    yield Finding(Level.OK, "versions", _listed(shown, most=12))


def judge_gpus(seen: Examination) -> Iterator[Finding]:
    """Check the GPU links inside tensor-parallel groups.

    A pair without NVLink on a node that has NVLink is FAIL. A pair that cannot reach each other's memory is WARN.
    """
    by_rank = {one.rank: one for one in seen.facts}
    links = {one.node: one.links for one in seen.facts if one.links}
    kinds: Counter[str] = Counter()
    for group in seen.tp_groups:
        for one, other in combinations((by_rank[rank] for rank in group), 2):
            if one.node != other.node or one.gpu is None or other.gpu is None or one.node not in links:
                continue
            link = links[one.node].get(one.gpu, {}).get(other.gpu, "unknown")
            kinds[link] += 1
            pair = f"ranks {one.rank} and {other.rank} of a tensor-parallel group"
            if not link.startswith("NV") and _has_nvlink(links[one.node]):
                yield Finding(
                    Level.FAIL,
                    "gpus",
                    f"{pair} talk over {link}, and NVLink joins other GPUs of the node",
                    (one.host,),
                    "Choose a tp, or an order in CUDA_VISIBLE_DEVICES, that keeps each group on NVLink.",
                )
            elif other.gpu not in one.peers:
                yield Finding(
                    Level.WARN,
                    "gpus",
                    f"{pair} cannot reach each other's memory ({link})",
                    (one.host,),
                    "NCCL goes through host memory. Look at PCIe ACS, the IOMMU and the container's rights.",
                )
    if kinds:
        joined = _listed([f"{counted(count, 'pair')} over {kind}" for kind, count in sorted(kinds.items())])
        yield Finding(Level.OK, "gpus", f"inside tensor-parallel groups: {joined}")


def judge_interfaces(seen: Examination) -> Iterator[Finding]:
    """Check the interface that the groups use, if there are several nodes.

    The loopback is FAIL, because it leads to no other node. An interface slower than the node's fastest is WARN.
    """
    used = [one for one in seen.facts if one.network.interface]
    if len({one.node for one in used}) < 2:
        return
    inside = [one for one in used if _is_inside(one.network.address)]
    if inside:
        yield Finding(
            Level.FAIL,
            "interfaces",
            f"{inside[0].network.interface} ({inside[0].network.address}) leads to no other node",
            hosts_of(inside),
            "Set MASTER_ADDR to an address of the cluster's network, or GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME.",
        )
    slower = [one for one in used if one.network.mbits and one.network.fastest[1] > one.network.mbits]
    if slower:
        network = slower[0].network
        yield Finding(
            Level.WARN,
            "interfaces",
            f"sockets use {network.interface} ({network.mbits:,} Mbit/s), but {network.fastest[0]} is faster "
            f"({network.fastest[1]:,} Mbit/s)",
            hosts_of(slower),
            f"If that is the cluster's network, set MASTER_ADDR to an address on it, or NCCL_SOCKET_IFNAME="
            f"{network.fastest[0]}; NCCL over InfiniBand does not use these sockets for data.",
        )
    names = sorted({one.network.interface for one in used})
    yield Finding(Level.OK, "interfaces", f"{_listed(names)}; rank 0 at {seen.facts[0].network.address}")


def judge_listeners(seen: Examination) -> Iterator[Finding]:
    """Check that the run listens only on the cluster's interface or the loopback (else WARN)."""
    outside = {
        one.rank: [
            address for address in one.network.listening if address != one.network.address and not _is_inside(address)
        ]
        for one in seen.facts
    }
    if any(outside.values()):
        yield Finding(
            Level.WARN,
            "listeners",
            f"the run listens on {_listed(sorted({one for addresses in outside.values() for one in addresses}))}",
            hosts_of(one for one in seen.facts if outside[one.rank]),
            "No password protects these ports. Start with `triaxis train` or srun, whose rendezvous "
            "listens on the cluster's interface only; a torchrun that is started by hand listens on all. Or close the ports.",
        )
    elif any(one.network.listening for one in seen.facts):
        yield Finding(Level.OK, "listeners", "every port of the run is on the cluster's interface or the loopback")


def judge_folders(seen: Examination) -> Iterator[Finding]:
    """Check that every node can write to the run's folders (else FAIL).

    In folders that must be shared, all nodes must see the same files.
    """
    for key in dict.fromkeys(root.key for one in seen.facts for root in one.roots):
        held = [(one, root) for one in seen.facts for root in one.roots if root.key == key]
        refused = [(one, root) for one, root in held if root.problem]
        if refused:
            yield Finding(
                Level.FAIL,
                "folders",
                f"{key} = {refused[0][1].path} cannot be written to: {refused[0][1].problem}",
                hosts_of(one for one, _ in refused),
                "Correct its rights or its mount, or name another folder.",
            )
        apart = [one for one, root in held if not root.problem and not (root.sees_rank_0 and root.seen_by_rank_0)]
        if apart and key in seen.needs.shared:
            yield Finding(
                Level.FAIL,
                "folders",
                f"{key} = {held[0][1].path} is not the same folder as on {seen.facts[0].host}",
                hosts_of(apart),
                "Checkpoints would be in pieces on several disks. Name a folder on a file system that all nodes mount.",
            )
    if seen.facts[0].roots:
        yield Finding(Level.OK, "folders", _listed([f"{root.key} {root.path}" for root in seen.facts[0].roots]))


def judge_disk(seen: Examination) -> Iterator[Finding]:
    """Check that there is room for all checkpoints that are kept, and for one more.

    No room for even one is FAIL. Too little room for the others is WARN, as is a run that keeps every checkpoint.
    """
    needs = seen.needs
    if not needs.save_bytes:
        return
    free = {
        one.rank: root.free_bytes
        for one in seen.facts
        for root in one.roots
        if root.key == needs.saved_to and not root.problem
    }
    if not free:
        return
    least = min(free.values())
    hosts = hosts_of(one for one in seen.facts if free.get(one.rank) == least)
    count = 1 + (needs.kept_saves or 0)
    sizes = f"{gigabytes(least)} free in {needs.saved_to}, a checkpoint is {gigabytes(needs.save_bytes)}"
    advice = "Make room, name another checkpoint.dir, or keep fewer (checkpoint.keep_last)."
    if least < needs.save_bytes:
        yield Finding(Level.FAIL, "disk", f"{sizes}: not even one fits", hosts, advice)
    elif needs.kept_saves is None:
        yield Finding(Level.WARN, "disk", f"{sizes}; every checkpoint is kept", hosts, advice)
    elif least < count * needs.save_bytes:
        yield Finding(Level.WARN, "disk", f"{sizes}; {count} are on disk at once", hosts, advice)
    else:
        yield Finding(Level.OK, "disk", f"{sizes}; {count} are on disk at once")


def judge_corpora(seen: Examination) -> Iterator[Finding]:
    """Check that every node has the data files, with equal sizes (else FAIL)."""
    absent: dict[tuple[str, ...], list[str]] = {}
    for path in dict.fromkeys(path for one in seen.facts for path in one.corpora):
        sizes = {one.rank: one.corpora.get(path) for one in seen.facts}
        if hosts := hosts_of(one for one in seen.facts if sizes[one.rank] is None):
            absent.setdefault(hosts, []).append(path)
        usual = _usual({rank: str(size) for rank, size in sizes.items() if size is not None} or {0: "None"})
        odd = [one for one in seen.facts if sizes[one.rank] is not None and str(sizes[one.rank]) != usual]
        if odd:
            text = f"{path} has {sizes[odd[0].rank]:,} bytes, elsewhere {int(usual):,}"
            yield Finding(
                Level.FAIL, "data", text, hosts_of(odd), "Copy it again: ranks would train on different text."
            )
    for hosts, paths in absent.items():
        advice = "Prepare it, copy it there, or mount its file system."
        yield Finding(Level.FAIL, "data", f"{_listed(paths)}: missing", hosts, advice)
    if seen.facts[0].corpora:
        yield Finding(Level.OK, "data", f"{counted(len(seen.facts[0].corpora), 'file')}, equally long on all nodes")


def judge_clocks(seen: Examination) -> Iterator[Finding]:
    """Compare the nodes' clocks with rank 0's.

    The finding is WARN above CLOCK_WARN_SECONDS and FAIL above CLOCK_FAIL_SECONDS. A clock's precision is first subtracted from
    its offset.
    """
    clocks = [(one, one.clock) for one in seen.facts if one.clock is not None]
    if len(clocks) < 2:
        return
    for level, limit in ((Level.FAIL, CLOCK_FAIL_SECONDS), (Level.WARN, CLOCK_WARN_SECONDS)):
        above = CLOCK_FAIL_SECONDS if level is Level.WARN else float("inf")
        off = [
            (one, clock)
            for one, clock in clocks
            if limit < abs(clock.offset_seconds) - clock.precision_seconds <= above
        ]
        if off:
            listed = [
                f"{one.host} {clock.offset_seconds:+.3f} s (± {clock.precision_seconds:.4f})" for one, clock in off
            ]
            yield Finding(
                level,
                "clocks",
                f"against {seen.facts[0].host}: {_listed(listed)}",
                hosts_of(one for one, _ in off),
                "Synchronise them (chrony, ntpd): logs would show the wrong first cause of a failure.",
            )
    far = max((clock for _, clock in clocks), key=lambda clock: abs(clock.offset_seconds))
    yield Finding(Level.OK, "clocks", f"at most {abs(far.offset_seconds):.4f} s apart (± {far.precision_seconds:.4f})")


def _usual(values: Mapping[int, str]) -> str:
    """Most common value. In a tie, the first rank's value if it is tied, else the alphabetically last."""
    counts = Counter(values.values())
    first = values[min(values)]
    return max(counts, key=lambda value: (counts[value], value == first, value))


def _has_nvlink(links: Mapping[str, Mapping[str, str]]) -> bool:
    return any(link.startswith("NV") for row in links.values() for link in row.values())


def _is_inside(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _listed(words: Iterable[str], most: int = MOST_NAMED) -> str:
    given: Sequence[str] = list(words)
    rest = len(given) - most
    return ", ".join(given[:most]) + (f" and {rest} more" if rest > 0 else "")
