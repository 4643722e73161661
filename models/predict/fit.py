"""State whether a run fits its devices' memory, and reject one that does not with changes after which it does.

    predict (models/predict/rank_memory.py)  ->  memory_line    "56.9 GB predicted on the fullest rank (...) of 85.5 GB"
                                ->  memory_rule    one more rule for `engine/config/rules/check.py`, if the device is known
                                                       |
                                       the other rules run first: without a legal layout there is no prediction

The changes come from `models/predict/changes.py`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from triaxis.engine.config.quantities.plan import parallel_sizes
from triaxis.engine.config.rules.check import RULES, broken_keys
from triaxis.engine.config.rules.problem import Problem, Rule, Subject
from triaxis.engine.config.tree import Config, is_whole
from triaxis.engine.errors import ConfigError, counted
from triaxis.engine.telemetry.outlets.format import gigabyte_decimals, gigabytes
from triaxis.models.predict.changes import fitting_changes
from triaxis.models.predict.rank_memory import GB, Prediction, predict

READ_BY_PREDICTION = (
    "model",
    "parallel",
    "train.global_batch_size",
    "train.micro_batch_size",
    "optimizer.bucket_bytes",
    "optimizer.offload",
    "schedule",
    "precision",
    "recompute",
    "offload",
    "kernels",
)
"""Sections and fields that a prediction reads: if a rule about one of them is broken, there is no prediction."""


@dataclass(frozen=True, slots=True)
class Devices:
    """The GPUs of a node.

    Attributes:
        memory_bytes: memory of the smallest GPU.
        count: number of GPUs; None: one per rank on the node.
    """

    memory_bytes: int
    count: int | None = None

    def for_each_rank(self, config: Config, ranks_per_node: int | None) -> int:
        """Compute the bytes of GPU memory that one rank may use.

        With gloo, ranks on a node that has fewer GPUs share them, and each gets an equal part. With NCCL each rank has a GPU.
        """
        if config.runtime.collectives != "gloo" or self.count is None or ranks_per_node is None:
            return self.memory_bytes
        return self.memory_bytes // max(1, -(-ranks_per_node // self.count))


def memory_line(prediction: Prediction, device_bytes: int | None = None, *, by_kind: bool = True) -> str:
    """Format a prediction as one line, in 10^9 bytes.

    Args:
        device_bytes: memory that a rank may use, in bytes; None: unknown.
        by_kind: include the parts of the sum.
    """
    held = prediction.fullest
    decimals = gigabyte_decimals(held.total)
    kinds = [
        ("parameters", held.parameters),
        ("gradients", held.gradients),
        ("optimizer", held.optimizer),
        ("activations", held.activations),
        ("messages", held.messages),
        ("communicators", held.communicators),
        ("temporaries", held.temporaries),
    ]
    shown = [(name, f"{num_bytes / GB:,.{decimals}f}") for name, num_bytes in kinds]
    parts = ", ".join(f"{name} {number}" for name, number in shown if number.strip("0."))
    where = f", pp {prediction.pp}" if len(prediction.ranks) > 1 else ""
    text = f"{gigabytes(held.total)} predicted on the fullest rank{where}{f' ({parts})' if by_kind else ''}"
    if device_bytes is not None:
        text += f" of {gigabytes(device_bytes)}" + (": it does not fit" if held.total > device_bytes else "")
    if held.host:
        text += f"; {gigabytes(held.host)} in host memory"
    return text


def uses_gpu(config: Config) -> bool:
    """Whether the configuration lets ranks use GPUs."""
    return config.runtime.device != "cpu"


def uses_nccl(config: Config) -> bool:
    """Whether ranks that run on GPUs communicate through NCCL."""
    return uses_gpu(config) and config.runtime.collectives != "gloo"


def memory_rule(devices: Devices) -> Rule:
    """Build the rule that rejects a run if a rank is predicted to exceed its device's memory.

    The rule reports nothing if the run uses CPUs, or if there is no prediction (`_prediction`).
    """

    def fits_devices(subject: Subject) -> Iterator[Problem]:
        config = subject.config
        prediction = _prediction(subject) if uses_gpu(config) else None
        if prediction is None:
            return
        most = devices.for_each_rank(config, subject.ranks_per_node)
        if prediction.fullest.total > most:
            yield Problem(
                "memory",
                memory_line(prediction),
                f"must be at most the {gigabytes(most)} of a GPU: a rank would run out of memory",
                advice=lambda: _advice(subject, most),
            )

    return fits_devices


def host_rule(host_bytes: int) -> Rule:
    """Build the rule that rejects a run if the state in host memory exceeds a node's.

    The rule reports nothing without `optimizer.offload`, or if there is no prediction (`_prediction`).

    Args:
        host_bytes: memory of a node, or its container's limit.
    """

    def fits_hosts(subject: Subject) -> Iterator[Problem]:
        config = subject.config
        prediction = _prediction(subject) if config.optimizer.offload == "cpu" else None
        if prediction is None:
            return
        world_size = parallel_sizes(config, subject.world_size).world_size
        ranks = min(subject.ranks_per_node or world_size, world_size)
        held = ranks * max(rank.host for rank in prediction.ranks)
        if held > host_bytes:
            yield subject.problem(
                "optimizer.offload",
                f"needs {gigabytes(held)} of host memory for {counted(ranks, 'rank')} on a node, and the node has "
                f"{gigabytes(host_bytes)}: the kernel would end a rank",
                {"optimizer.offload": ["none"]},
                "More data-parallel ranks hold less each. runtime.memory=warn starts the run all the same.",
            )

    return fits_hosts


def _prediction(subject: Subject) -> Prediction | None:
    """Predict a run's memory.

    Returns None if `runtime.memory` is warn, the number of replicas is not known yet, or the configuration breaks a rule about a
    field that the prediction reads.
    """
    config = subject.config
    if not is_whole(config) or config.runtime.memory == "warn" or subject.dp is None:
        return None
    if any(map(_is_read, (key for _, key in broken_keys(subject, RULES)))):
        return None
    try:
        return predict(config, parallel_sizes(config, subject.world_size), nccl=uses_nccl(config))
    except ConfigError:  # `recompute: auto` finds nothing within its budget, which is an error of its own
        return None


def _is_read(key: str) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in READ_BY_PREDICTION)


def _advice(subject: Subject, most: int) -> str:
    found = [
        f"{one} ({gigabytes(one.memory.fullest.total)})"
        for one in fitting_changes(subject, most, nccl=uses_nccl(subject.config))
    ]
    warn = "runtime.memory=warn starts the run all the same."
    if not found:
        return (
            "No legal layout of these ranks fits: use more ranks, a shorter sequence, narrower state (precision.moments=bf16, "
            f"precision.gradients=bf16) or a smaller model. {warn}"
        )
    return f"These fit: {'; '.join(found)}. {warn}"
