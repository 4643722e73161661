"""A rank is slow beside those with the same work, and only when it stays so."""

from engine.telemetry.slow_ranks import IN_A_ROW, SLOWER_BY, SlowRanks

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
