"""A rank's batches: what the config and the rank's place make of a dataset."""

from engine.data.loader import Batches
from engine.data.sampler import NOTHING_SKIPPED
from engine.data.samples import SampleSource
from engine.data.skipped import SkippedRanges
from engine.step import Engine


def open_batches(
    engine: Engine, dataset: SampleSource, consumed_samples: int = 0, skipped: SkippedRanges = NOTHING_SKIPPED
) -> Batches:
    """This rank's batches of a dataset, from the first sample that is not consumed on."""
    train_config, dp = engine.config.train, engine.topology.axis("dp")
    return Batches(
        dataset,
        global_batch_size=train_config.global_batch_size,
        micro_batch_size=train_config.micro_batch_size,
        dp=dp.size,
        dp_rank=dp.index,
        consumed_samples=consumed_samples,
        device=engine.topology.device,
        skipped=skipped,
    )
