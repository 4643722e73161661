"""The mapping between pipeline stages and ranks."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Placement:
    """Stages on ranks: in a loop, stage = chunk x pp + rank, or in a V with two chunks.

        pp 4, vpp 2     rank    0  1  2  3                 rank    0  1  2  3
                     chunk 0    0  1  2  3              chunk 0    0  1  2  3
                     chunk 1    4  5  6  7  a loop      chunk 1    7  6  5  4  a V

    In a loop, a chunk's last rank is followed by the next chunk's first rank. In a V, chunk 1 runs back: the turn stays on the last
    rank, and the first rank holds both ends. The rest of the engine calls these methods and never computes a stage itself.
    """

    pp: int
    vpp: int
    is_v: bool = False

    def __post_init__(self) -> None:
        assert self.vpp == 2 or not self.is_v, "a V has two chunks"

    @property
    def num_stages(self) -> int:
        return self.pp * self.vpp

    def stage_of(self, rank: int, chunk: int) -> int:
        """Compute which stage, counted from 0 along the model, is chunk number `chunk` on pp rank `rank`."""
        if self.is_v and chunk == 1:
            return self.num_stages - 1 - rank
        return chunk * self.pp + rank

    def stages_on(self, rank: int) -> tuple[int, ...]:
        """List a rank's stage numbers in chunk order."""
        return tuple(self.stage_of(rank, chunk) for chunk in range(self.vpp))

    def rank_of(self, stage: int) -> int:
        """Find the pp rank that holds a stage."""
        if self.is_v:
            return min(stage, self.num_stages - 1 - stage)
        return stage % self.pp

    def chunk_of(self, stage: int) -> int:
        """Compute a stage's index, from 0, among the stages on its rank."""
        return stage // self.pp
