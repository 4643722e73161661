"""Open a rank's batches, given the config, the rank's coordinates and a dataset."""

from triaxis.engine.comm.topology import Topology
from triaxis.engine.config.tree import Config
from triaxis.engine.context_parallel.cut import ContextCut
from triaxis.engine.data.document_statistics import DocumentStatistics, measure_documents
from triaxis.engine.data.loader import Batches
from triaxis.engine.data.sampler import NOTHING_SKIPPED
from triaxis.engine.data.samples import SampleSource
from triaxis.engine.data.skipped import SkippedRanges


def run_documents(config: Config, topology: Topology, source: SampleSource) -> DocumentStatistics | None:
    """Return document lengths in the run's first steps, equal on every rank. None if tokens attend across documents."""
    if config.data.attention == "across":
        return None
    return measure_documents(
        source,
        seq_length=config.model.seq_length,
        global_batch_size=config.train.global_batch_size,
        micro_batch_size=config.train.micro_batch_size,
        dp=topology.sizes.dp,
    )


def open_batches(
    config: Config,
    topology: Topology,
    dataset: SampleSource,
    consumed_samples: int = 0,
    skipped: SkippedRanges = NOTHING_SKIPPED,
    *,
    weighs: bool = True,
) -> Batches:
    """Open this rank's batches at the first sample that is not consumed.

    With `weighs`, an extension's loss may give weights to labels.
    """
    at = topology.coordinates
    return Batches(
        dataset,
        global_batch_size=config.train.global_batch_size,
        micro_batch_size=config.train.micro_batch_size,
        dp=topology.sizes.dp,
        # The cp ranks within a replica read the same samples.
        dp_rank=at.dp,
        consumed_samples=consumed_samples,
        device=topology.device,
        skipped=skipped,
        attention=config.data.attention,
        positions=config.data.positions,
        num_ahead=config.model.num_mtp_layers,
        weigh=config.model.own.weigh if weighs else None,
        cut=ContextCut.of(config, topology.sizes, at.cp),
        drops=config.model.may_drop,
        evens_boundaries=config.kernels.graphs == "on" and config.data.attention == "within",
    )
