"""Configurations of experts that must be refused, each with the words that its refusal must say."""

from collections.abc import Sequence

MOE = ["model.moe={num_experts: 4, top_k: 2, ffn_hidden_size: 8}", "model.layers=[moe]", "model.bias=none"]
"""Changes that give every layer experts."""

BAD_EXPERTS: dict[str, tuple[Sequence[str], dict[str, int], Sequence[str]]] = {
    # name: changes, what is known of the cluster, words of the message
    "expert parallel without experts": (
        ["parallel.ep=8"],
        {},
        ["parallel.ep = 8", "model has none", "parallel.ep = 1"],
    ),
    "experts that no layer has": (
        ["model.moe={num_experts: 4, top_k: 2, ffn_hidden_size: 8}", "model.bias=none"],
        {},
        ["model.layers", "no layer would have them"],
    ),
    "experts over ranks": (
        [*MOE, "parallel.ep=3", "parallel.dp=3", "train.global_batch_size=18"],
        {},
        ["parallel.ep = 3", "num_experts = 4", "parallel.ep = 1"],
    ),
    "ranks without experts": (
        [*MOE, "parallel.ep=4", "parallel.dp=2"],
        {},
        ["parallel.ep = 4", "must divide the 2 ranks", "parallel.ep = 2 or 1"],
    ),
    "replicas of the state over uneven ranks": (
        ["parallel.dp=8", "parallel.dp_replicas=3"],
        {},
        ["parallel.dp_replicas = 3", "must divide parallel.dp = 8", "parallel.dp_replicas = 2 or 4"],
    ),
    "replicas of the state that share experts": (
        [*MOE, "parallel.ep=4", "parallel.dp=8", "parallel.dp_replicas=4"],
        {},
        ["parallel.dp_replicas = 4", "must divide the 2 ranks that hold the same experts", "parallel.dp_replicas = 2"],
    ),
    "experts cut otherwise": (
        [*MOE, "parallel.tp=4", "parallel.etp=2"],
        {},
        ["parallel.etp = 2", "must be 1 or parallel.tp = 4"],
    ),
    "more experts than there are": ([*MOE, "model.moe.top_k=5"], {}, ["model.moe.top_k = 5", "at most 4"]),
    "groups of experts": ([*MOE, "model.moe.groups=3"], {}, ["model.moe.groups = 3", "model.moe.groups = 2 or 1"]),
    "more groups than there are": ([*MOE, "model.moe.top_groups=2"], {}, ["top_groups = 2", "at most groups = 1"]),
    "a best two of one": (
        [*MOE, "model.moe.groups=4", "model.moe.top_groups=4"],
        {},
        ["model.moe.group_score = top2", "a group has one"],
    ),
    "biases beside experts": ([*MOE, "model.bias=all"], {}, ["model.bias = all", "experts have none"]),
    "an expert's columns over tp": (
        [*MOE, "model.moe.ffn_hidden_size=9", "parallel.tp=2", "parallel.etp=2"],
        {},
        ["model.moe.ffn_hidden_size = 9", "multiple of parallel.etp = 2"],
    ),
    "shared experts over tp": (
        [*MOE, "model.moe.shared_experts=1", "model.moe.ffn_hidden_size=9", "parallel.tp=2"],
        {},
        ["model.moe.shared_experts = 1", "width 9"],
    ),
    "tokens over tp": (
        [*MOE, "model.seq_length=6", "parallel.tp=4"],
        {},
        ["model.seq_length = 6", "deal the tokens out"],
    ),
    "a kind that exists": (
        [*MOE, "model.layers=[moe]", "model.layer_kinds={moe: {window: 2}}"],
        {},
        ["model.layer_kinds = moe", "which of the two"],
    ),
    "a kind without its section": (
        ["model.layers=[wide]", "model.layer_kinds={wide: {mlp: moe}}"],
        {},
        ["model.layer_kinds.wide.mlp = moe", "needs the section model.moe"],
    ),
    "a form of dispatch without experts": (
        ["kernels.dispatch=all_gather"],
        {},
        ["kernels.dispatch", "model.moe is not given"],
    ),
    "a buffer that is not there": (
        [*MOE, "model.moe.row_headroom=1.5", "kernels.dispatch=all_to_all"],
        {},
        ["model.moe.row_headroom = 1.5", "kernels.dispatch = all_gather"],
    ),
}
