"""What a step with CUDA graphs must not do (`engine/run/cuda_graphs.py`): a graph keeps its recording's numbers and addresses."""

from collections.abc import Callable, Iterator
from typing import Any

from triaxis.engine.config.quantities.expert_rows import dispatch_of
from triaxis.engine.config.rules.problem import Candidates, Problem, Rule, Subject
from triaxis.engine.config.rules.rows import Need


def _with_graphs(is_met: Callable[[Any], bool], rule: str, others: Candidates) -> Need:
    return Need("kernels.graphs", values=("on",), is_met=is_met, rule=rule, others=others)


def some_microbatch_is_replayed(subject: Subject) -> Iterator[Problem]:
    """Yield a problem if each step has one microbatch, which runs without a graph because weights are gathered under it."""
    train, dp = subject.config.train, subject.dp or 1
    if subject.config.kernels.graphs == "on" and dp > 1 and train.global_batch_size == train.micro_batch_size * dp:
        yield subject.problem(
            "kernels.graphs",
            f"replays no microbatch: with data-parallel ranks ({dp}), the first of a step runs without a graph, because "
            f"weights are gathered under its forward, and a step of {train.global_batch_size} samples has no other",
            {
                "kernels.graphs": ["auto"],
                "train.global_batch_size": [2 * train.global_batch_size],
                "train.micro_batch_size": [train.micro_batch_size // 2],
            },
        )


GRAPH_RULES: tuple[Rule, ...] = (
    _with_graphs(
        lambda c: c.parallel.zero < 2,
        "does not go with parallel.zero = {c.parallel.zero}: each microbatch would reduce its gradients in other slots",
        {"parallel.zero": [1]},
    ),
    _with_graphs(
        lambda c: c.parallel.dp_replicas == 1,
        "does not go with parallel.dp_replicas = {c.parallel.dp_replicas}: a bucket's sum over replicas is posted after the next "
        "bucket's, which may be outside of the graph",
        {"parallel.dp_replicas": [1]},
    ),
    _with_graphs(
        lambda c: not c.offload.num_layers,
        "does not go with offload.num_layers = {c.offload.num_layers}: activations would move to other host memory each time",
        {"offload.num_layers": [0]},
    ),
    _with_graphs(
        lambda c: c.data.attention != "within" or c.parallel.cp == 1,
        "does not go with data.attention = within and parallel.cp = {c.parallel.cp}: the ranks' parts of rows follow from "
        "documents on the host",
        {"parallel.cp": [1], "data.attention": ["across"]},
    ),
    _with_graphs(
        lambda c: c.data.attention != "within" or c.kernels.attention in ("auto", "varlen", "explicit"),
        "does not go with data.attention = within and kernels.attention = {c.kernels.attention}, which reads documents' lengths on "
        "the host",
        {"kernels.attention": ["auto", "varlen"], "data.attention": ["across"]},
    ),
    _with_graphs(
        lambda c: c.model.moe is None or dispatch_of(c) == "all_gather",
        "does not go with dispatch of tokens by all_to_all: the host reads how many rows each expert gets",
        {"kernels.dispatch": ["all_gather"]},
    ),
    _with_graphs(
        lambda c: c.kernels.experts != "loop",
        "does not go with kernels.experts = loop: the host reads how many rows each expert gets",
        {"kernels.experts": ["auto", "grouped"]},
    ),
    *(
        _with_graphs(
            is_met, "is not tried with kernels of Transformer Engine, which keep workspaces of their own", others
        )
        for is_met, others in (
            (
                lambda c: "te" not in (c.kernels.linear, c.kernels.attention),
                {"kernels.linear": ["torch"], "kernels.attention": ["auto"]},
            ),
            (
                lambda c: c.precision.fp8 is None or c.precision.fp8.backend != "te",
                {"precision.fp8.backend": ["torch"]},
            ),
        )
    ),
    _with_graphs(
        lambda c: c.runtime.collectives != "gloo",
        "does not go with runtime.collectives = gloo: the host carries these calls' tensors",
        {"runtime.collectives": ["auto"]},
    ),
    some_microbatch_is_replayed,
)
