"""A rank resolves its recomputation once, before it connects, and its engine and checkpoints have what came out."""

from pathlib import Path

import pytest
import torch

import triaxis.launch.rank.join
from tests.parity.cases import Case
from triaxis.engine.comm.runtime import RankEnvironment, Runtime
from triaxis.engine.config.schema.dotted import with_value
from triaxis.engine.config.schema.recompute import RecomputeConfig
from triaxis.engine.config.schema.run import RuntimeConfig
from triaxis.engine.config.tree import Config
from triaxis.engine.errors import ConfigError
from triaxis.launch.commands.doctor import ONE_PROCESS
from triaxis.launch.rank.join import join, join_run
from triaxis.models.predict import rank_memory

ALONE = RankEnvironment(rank=0, local_rank=0, world_size=1, local_world_size=1)


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[RankEnvironment]:
    """Ranks that connect, in one process without a process group."""
    found: list[RankEnvironment] = []

    def start(environment: RankEnvironment, config: RuntimeConfig) -> Runtime:
        found.append(environment)
        return Runtime(torch.device("cpu"))

    monkeypatch.setattr(triaxis.launch.rank.join, "start", start)
    return found


def asking(recompute: RecomputeConfig) -> Config:
    return with_value(Case("llama", num_layers=2).config(), "recompute", recompute)


def test_what_cannot_fit_is_refused_before_a_rank_connects(starts: list[RankEnvironment]) -> None:
    too_little = asking(RecomputeConfig(granularity="auto", memory_gb=1e-9))
    with pytest.raises(ConfigError, match=r"recompute\.memory_gb"), join(too_little, ALONE):
        pass
    assert not starts


def test_the_choice_is_made_once_and_the_config_stays_as_it_was_read(
    starts: list[RankEnvironment], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asking(RecomputeConfig(granularity="auto", memory_gb=1))
    with join(asked, ALONE) as rank:
        assert starts == [ALONE]
        assert rank.config is asked
        assert rank.resolved.recompute == RecomputeConfig(
            gathered_inputs="regather", gathered_kv="regather", head_tokens=None
        )
        monkeypatch.setattr(rank_memory, "candidates", lambda *args: pytest.fail("it is resolved already"))
        assert rank_memory.resolve_recompute(rank.resolved, rank.topology.sizes) is rank.resolved


def test_a_worker_reads_its_words_for_the_world_of_its_rank(
    starts: list[RankEnvironment], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    tiny = Path(__file__).resolve().parents[3] / "configs/gpt_tiny.yaml"
    words = [str(tiny), *ONE_PROCESS]
    with join_run(words) as rank:
        assert (rank.number, rank.topology.sizes.world_size) == (0, 1) and len(starts) == 1
    with pytest.raises(ConfigError, match=r"parallel\.tp"), join_run([*words, "parallel.tp=3"]):
        pass
    assert len(starts) == 1
