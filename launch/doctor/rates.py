"""Find slow groups, paths and hosts, by comparing each with similar ones."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from triaxis.launch.doctor.records import Examination, Finding, GroupRate, Level, RankFacts

SLOW = 0.5
"""A group or path is out of line below this fraction of its equals' median."""

BELOW_INTERFACE = 0.1
"""A gloo path below this fraction of its interface's stated rate gives a warning."""

MOST_NAMED = 6


def judge_groups(seen: Examination) -> Iterator[Finding]:
    """Compare the rates of comparable groups (`equal_groups`), and name the slow ones.

    A host in a slow group is blamed, unless another group on the host is fast. If this leaves no host to blame, all hosts in slow
    groups are blamed. A slow gloo group inside one node gives only a warning, because its ranks share the processors.
    """
    by_rank = {one.rank: one for one in seen.facts}
    for equals in equal_groups(seen.groups, by_rank):
        usual = middle([one.bytes_per_second for one in equals])
        slow = [one for one in equals if one.bytes_per_second < SLOW * usual]
        if not slow:
            continue
        is_shared = seen.needs.backend == "gloo" and len({by_rank[rank].node for rank in slow[0].ranks}) == 1
        fine = {by_rank[rank].host for one in equals if one not in slow for rank in one.ranks}
        named = dict.fromkeys(by_rank[rank].host for one in slow for rank in one.ranks)
        yield Finding(
            Level.WARN if is_shared else Level.FAIL,
            "bandwidth",
            f"{slow[0].axis} {slow[0].op.replace('_', '-')} of {_described(slow, by_rank)}; the median of {len(equals)} equal "
            f"groups is {_rate(usual)}",
            tuple(host for host in named if host not in fine) or tuple(named),
            "Every step waits for the slowest group. Leave these hosts out, or look at their links, GPUs and other users.",
        )
    if seen.groups:
        yield Finding(Level.OK, "bandwidth", f"no group is slower than {SLOW:g} of the median of its equals")


def judge_paths(seen: Examination) -> Iterator[Finding]:
    """Compare paths between nodes, one direction at a time.

    A host's sends are blamed if all of them are slow, and one of the receivers receives fast from another host. Receives are judged
    the same way. Between only two hosts the slow end cannot be known.

    A slow path with neither end to blame names both hosts. If no path is slow, the median is compared with the interface's rate.
    """
    if not seen.paths:
        return
    by_rank = {one.rank: one for one in seen.facts}
    ends = _Ends(seen.paths)
    blamed = [("sends", rank) for rank in sorted(ends.blamed_senders)]
    blamed += [("receives", rank) for rank in sorted(ends.blamed_receivers)]
    named: dict[tuple[str, str], float] = {}
    for verb, rank in blamed:
        at = (by_rank[rank].host, verb)
        named[at] = max(named.get(at, 0.0), ends.best[verb][rank])
    for (host, verb), rate in named.items():
        yield Finding(
            Level.FAIL,
            "links",
            f"{host} {verb} {_rate(rate)} at most; the median between nodes is {_rate(ends.usual)}",
            (host,),
            "Leave this host out, or look at its network interface, cable and switch port.",
        )
    unclear = ends.unclear()
    for path in unclear[:MOST_NAMED]:
        sender, receiver = (by_rank[rank].host for rank in path.ranks)
        yield Finding(
            Level.FAIL,
            "links",
            f"{sender} -> {receiver} (rank {path.ranks[0]} to {path.ranks[1]}): {_rate(path.bytes_per_second)}; the median "
            f"between nodes is {_rate(ends.usual)}",
            (sender, receiver),
            f"{sender}'s sends, {receiver}'s receives or the link between them is slow; no other pair isolates it.",
        )
    if not blamed and not unclear:
        yield _against_interface(seen, by_rank, ends.usual)


class _Ends:
    """Senders and receivers whose best path is slow compared with the median over all best paths."""

    def __init__(self, paths: Sequence[GroupRate]) -> None:
        self.paths = paths
        self.best: dict[str, dict[int, float]] = {}
        self._partners: dict[str, dict[int, set[int]]] = {}
        for side, verb in enumerate(("sends", "receives")):
            best, partners = self.best.setdefault(verb, {}), self._partners.setdefault(verb, {})
            for path in paths:
                rank, other = path.ranks[side], path.ranks[1 - side]
                best[rank] = max(best.get(rank, 0.0), path.bytes_per_second)
                partners.setdefault(rank, set()).add(other)
        self.usual = middle([rate for best in self.best.values() for rate in best.values()])
        slow = {
            verb: {rank for rank, rate in best.items() if rate < SLOW * self.usual} for verb, best in self.best.items()
        }
        self.blamed_senders = {rank for rank in slow["sends"] if self._partners["sends"][rank] - slow["receives"]}
        self.blamed_receivers = {rank for rank in slow["receives"] if self._partners["receives"][rank] - slow["sends"]}

    @property
    def any_slow(self) -> bool:
        return bool(self.blamed_senders or self.blamed_receivers or self.unclear())

    def unclear(self) -> list[GroupRate]:
        """List slow paths for which neither end is to blame."""
        return [
            path
            for path in self.paths
            if path.bytes_per_second < SLOW * self.usual
            and path.ranks[0] not in self.blamed_senders
            and path.ranks[1] not in self.blamed_receivers
        ]


def all_equal(seen: Examination) -> bool:
    """Whether no group or path is slow compared with similar ones."""
    return all(finding.level is Level.OK for finding in judge_groups(seen)) and not (
        seen.paths and _Ends(seen.paths).any_slow
    )


def _against_interface(seen: Examination, by_rank: Mapping[int, RankFacts], usual: float) -> Finding:
    """Compare a node's rate with its network interface's stated rate. A node's rate is the median path rate times its ranks.

    Only gloo can get a warning, because NCCL may send over other links.
    """
    stated = min(by_rank[one.ranks[0]].network.mbits for one in seen.paths) * 1e6 / 8
    per_node = max(1, len(seen.facts) // len({one.node for one in seen.facts}))
    if seen.needs.backend == "gloo" and stated and usual * per_node < BELOW_INTERFACE * stated:
        return Finding(
            Level.WARN,
            "links",
            f"a node sends {_rate(usual * per_node)} to the next one, and its interface is rated {_rate(stated)}",
            (),
            "Look at the network between the nodes: no node is out of line, all are slow.",
        )
    return Finding(Level.OK, "links", f"rank to rank between nodes: {_rate(usual)} (median), none below {SLOW:g} of it")


def equal_groups(groups: Iterable[GroupRate], by_rank: Mapping[int, RankFacts]) -> list[list[GroupRate]]:
    """Collect sets of two or more comparable groups.

    Such groups have the same axis, operation, bytes, number of ranks and number of nodes.
    """
    found: dict[tuple[object, ...], list[GroupRate]] = {}
    for one in groups:
        num_nodes = len({by_rank[rank].node for rank in one.ranks})
        found.setdefault((one.axis, one.op, one.num_bytes, len(one.ranks), num_nodes), []).append(one)
    return [equals for equals in found.values() if len(equals) > 1]


def best(first: Sequence[GroupRate], second: Sequence[GroupRate]) -> tuple[GroupRate, ...]:
    """Keep the faster measurement for each group or path."""
    found: dict[tuple[object, ...], GroupRate] = {}
    for one in (*first, *second):
        key = (one.axis, one.op, one.num_bytes, one.ranks)
        if key not in found or one.bytes_per_second > found[key].bytes_per_second:
            found[key] = one
    return tuple(found.values())


def middle(values: Sequence[float]) -> float:
    """Median. For an even count, the larger of the two middle values."""
    return sorted(values)[len(values) // 2]


def _described(groups: Sequence[GroupRate], by_rank: Mapping[int, RankFacts]) -> str:
    words = []
    for one in groups[:MOST_NAMED]:
        hosts = ", ".join(dict.fromkeys(by_rank[rank].host for rank in one.ranks))
        ranks = " ".join(str(rank) for rank in one.ranks[:MOST_NAMED]) + (" ..." if len(one.ranks) > MOST_NAMED else "")
        words.append(f"ranks {ranks} ({hosts}): {_rate(one.bytes_per_second)}")
    rest = len(groups) - MOST_NAMED
    return "; ".join(words) + (f"; and {rest} more groups" if rest > 0 else "")


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.3g} GB/s"
