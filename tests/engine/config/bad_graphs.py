"""Configurations with CUDA graphs that must be refused, each with the words that its refusal must say."""

from collections.abc import Sequence

from tests.engine.config.bad_expert_configs import MOE

ON = "kernels.graphs=true"

BAD_GRAPHS: dict[str, tuple[Sequence[str], dict[str, int], Sequence[str]]] = {
    # name: changes, what is known of the cluster, words of the message
    "graphs of gradients in slots": (
        [ON, "parallel.zero=2", "parallel.dp=2"],
        {},
        ["kernels.graphs = on", "parallel.zero = 2", "other slots", "parallel.zero = 1"],
    ),
    "graphs of sums over replicas": (
        [ON, "parallel.dp=4", "parallel.dp_replicas=2"],
        {},
        ["kernels.graphs = on", "outside of the graph", "parallel.dp_replicas = 1"],
    ),
    "graphs of activations that move": (
        [ON, "offload.num_layers=1"],
        {},
        ["kernels.graphs = on", "other host memory", "offload.num_layers = 0"],
    ),
    "graphs of documents in parts of rows": (
        [ON, "data.attention=within", "parallel.cp=2"],
        {},
        ["kernels.graphs = on", "parts of rows", "parallel.cp = 1"],
    ),
    "graphs of documents that the host reads": (
        [ON, "data.attention=within", "kernels.attention=blocks"],
        {},
        ["kernels.graphs = on", "kernels.attention = blocks", "kernels.attention = auto or varlen"],
    ),
    "graphs of rows that the host counts": (
        [*MOE, ON, "parallel.ep=2", "parallel.dp=2", "kernels.dispatch=all_to_all"],
        {},
        ["kernels.graphs = on", "how many rows each expert gets", "kernels.dispatch = all_gather"],
    ),
    "graphs of experts one by one": (
        [*MOE, ON, "kernels.experts=loop"],
        {},
        ["kernels.graphs = on", "kernels.experts = loop", "kernels.experts = auto"],
    ),
    "graphs of Transformer Engine's layers": (
        [ON, "kernels.linear=te"],
        {},
        ["kernels.graphs = on", "not tried", "kernels.linear = torch"],
    ),
    "graphs of Transformer Engine's FP8": (
        [ON, "precision.fp8={recipe: tensorwise, backend: te}"],
        {},
        ["kernels.graphs = on", "not tried", "precision.fp8.backend = torch"],
    ),
    "graphs of calls through the host": (
        [ON, "runtime.collectives=gloo"],
        {},
        ["kernels.graphs = on", "runtime.collectives = gloo", "runtime.collectives = auto"],
    ),
    "graphs of one microbatch": (
        [ON, "parallel.dp=8"],
        {},
        ["kernels.graphs = on", "replays no microbatch", "train.global_batch_size = 32", "train.micro_batch_size = 1"],
    ),
}
