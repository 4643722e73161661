"""A rank is slow beside those with the same work, and only when it stays so."""

from statistics import median

from hypothesis import given
from hypothesis import strategies as st

from triaxis.engine.telemetry.timing.slow_ranks import IN_A_ROW, SLOWER_BY, SlowRanks

HOSTS = ["a", "a", "b", "b", "c", "c"]
TWO_STAGES = [0, 0, 0, 1, 1, 1]
EVEN = [1.0, 1.0, 1.0, 5.0, 5.0, 5.0]


def with_(rank: int, seconds: float) -> list[float]:
    return [seconds if place == rank else usual for place, usual in enumerate(EVEN)]


def test_a_rank_that_stays_slow_is_named_once_with_its_host() -> None:
    ranks = SlowRanks(TWO_STAGES, HOSTS)
    reports = [ranks.report(with_(2, 1.5)) for _ in range(IN_A_ROW + 3)]
    assert [len(report) for report in reports] == [0] * (IN_A_ROW - 1) + [1] + [0] * 3
    (slow,) = reports[IN_A_ROW - 1]
    assert (slow.rank, slow.host, slow.seconds, slow.usual_seconds) == (2, "b", 1.5, 1.0)
    assert "rank 2 on b" in str(slow) and "1,500 ms" in str(slow) and "50% more" in str(slow)


def test_one_good_report_starts_the_count_again() -> None:
    ranks = SlowRanks(TWO_STAGES, HOSTS)
    for _ in range(3):
        for _ in range(IN_A_ROW - 1):
            assert ranks.report(with_(4, 9.0)) == []
        assert ranks.report(EVEN) == []
    for _ in range(IN_A_ROW - 1):
        ranks.report(with_(4, 9.0))
    assert [slow.rank for slow in ranks.report(with_(4, 9.0))] == [4], "and it may be named again"


def test_stages_are_not_compared_with_each_other_and_a_little_is_not_slow() -> None:
    ranks = SlowRanks(TWO_STAGES, HOSTS)
    for _ in range(2 * IN_A_ROW):
        assert ranks.report(with_(0, 1.0 + 0.99 * SLOWER_BY)) == []
    alone = SlowRanks([0, 1], ["a", "b"])
    for _ in range(2 * IN_A_ROW):
        assert alone.report([1.0, 50.0]) == [], "nobody has the same work"


def test_of_two_the_slower_one_is_named() -> None:
    ranks = SlowRanks([0, 0], ["a", "b"])
    named = [slow.rank for _ in range(IN_A_ROW) for slow in ranks.report([2.0, 3.0])]
    assert named == [1]


@given(
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from([1.0, 1.2, 1.4, 2.0]) | st.floats(0.1, 5.0)), max_size=12),
)
def test_each_rank_is_compared_with_the_median_of_the_others_of_its_stage(ranks: list[tuple[int, float]]) -> None:
    compare = SlowRanks([stage for stage, _ in ranks], [f"host{rank}" for rank in range(len(ranks))])
    for _ in range(IN_A_ROW):
        named = compare.report([seconds for _, seconds in ranks])
    expected = []
    for rank, (stage, seconds) in enumerate(ranks):
        others = [other for peer, (its, other) in enumerate(ranks) if its == stage and peer != rank]
        if others and seconds > (1 + SLOWER_BY) * median(others):
            expected.append((rank, f"host{rank}", seconds, median(others)))
    assert [(slow.rank, slow.host, slow.seconds, slow.usual_seconds) for slow in named] == expected


class Counted(float):
    """A number that counts how often two of them are compared."""

    num_comparisons = 0

    def __lt__(self, other: float) -> bool:
        Counted.num_comparisons += 1
        return float(self) < float(other)


def test_comparing_takes_one_sort_per_stage_and_not_one_per_rank() -> None:
    num_ranks = 2000
    seconds = [Counted(1 + rank * 7919 % num_ranks) for rank in range(num_ranks)]
    SlowRanks([rank % 2 for rank in range(num_ranks)], ["host"] * num_ranks).report(seconds)
    assert 0 < Counted.num_comparisons < 20 * num_ranks, (
        "a sort of each rank's peers would take a thousand times as many"
    )
