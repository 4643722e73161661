"""Bugs that issues of other engines report, planted in ours at run time; each says where it happened.

The engine, the verifier and the oracle know none of them. Those that `planted.py` has already are taken from there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tests.parity.cases import Case
from tests.verify import planted
from tests.verify.planted import DROPOUT, FULL, KV, QK
from triaxis.engine.optimizer.bucket import Bucket
from triaxis.engine.optimizer.grad_buffer import GradBuffers
from triaxis.engine.pipeline.executor import Executor
from triaxis.engine.tensor_parallel.parameter import ShardedParameter

PP = Case("gpt", pp=2, num_layers=2, global_batch_size=4)
DP = Case("gpt", dp=2, num_layers=2, global_batch_size=4)
TIED = Case("gpt", pp=2, dp=2, num_layers=2, global_batch_size=4)


@dataclass(frozen=True)
class FieldBug:
    """A bug of the field.

    Attributes:
        plant: called in each rank before anything is built.
        reported: repository and number of the issue or pull request.
        case: layout that is verified.
        what: the kind of the first difference.
        names: parameters or places that must differ, and nothing else of that kind.
        step: of the first difference, from 0.
        dtype: of both runs.
    """

    plant: Callable[[], None]
    reported: str
    case: Case
    what: str
    names: Callable[[str], bool]
    step: int = 0
    dtype: str = "float64"

    def __str__(self) -> str:
        return self.plant.__name__


def kv_gradients_stay_partial_on_each_replica() -> None:
    """Plant key/value weights that tp ranks share and whose gradients are never added."""
    planted._lose_sums(lambda buffer: buffer.layout.key.sum_over == "kv_replicas")


def tied_gradients_are_added_before_they_are_whole() -> None:
    """Plant a sum over the two stages of parts that belong to other data-parallel ranks."""
    finish = GradBuffers.finish

    def too_early(self: GradBuffers) -> None:
        kept = []
        for buffer in self.buffers:
            if buffer.layout.key.sum_over == "ends":
                for bucket in buffer.buckets:
                    kept.append((bucket, bucket.owned_grads))
                    bucket.owned_grads = bucket.grads[: len(bucket.owned_grads)]
        finish(self)
        for bucket, owned in kept:
            bucket.owned_grads = owned

    GradBuffers.finish = too_early  # type: ignore[method-assign]


def gradients_are_scaled_by_dp() -> None:
    """Plant a factor that would cancel a mean over data-parallel ranks, where a sum is taken."""
    finish = GradBuffers.finish

    def scaled(self: GradBuffers) -> None:
        finish(self)
        for buffer in self.buffers:
            for bucket in buffer.buckets:
                bucket.owned_grads *= buffer.reduce_axis.size

    GradBuffers.finish = scaled  # type: ignore[method-assign]


def each_rank_averages_over_its_own_tokens() -> None:
    """Plant a mean over a data-parallel rank's own token count in place of the global batch's."""
    run = Executor.run

    def averaged(
        self: Executor, program: Any, microbatches: Sequence[Any], *args: Any, output_grad: torch.Tensor, **named: Any
    ) -> list[torch.Tensor]:
        own = self.topology.axis("dp").size * sum(one.num_tokens for one in microbatches)
        return run(self, program, microbatches, *args, output_grad=torch.full_like(output_grad, 1 / own), **named)

    Executor.run = averaged  # type: ignore[assignment,method-assign]


def only_the_last_microbatch_trains() -> None:
    """Plant main grads that each microbatch writes over."""
    _always(overwrites=True)


def gradients_are_added_to_what_was_there() -> None:
    """Plant a buffer that is never written over, so that a step begins with the gradients of the one before."""
    _always(overwrites=False)


def _always(*, overwrites: bool) -> None:
    asked = Bucket.overwrites

    def answer(self: Bucket, parameter: ShardedParameter) -> bool:
        asked(self, parameter)
        return overwrites

    Bucket.overwrites = answer  # type: ignore[method-assign]


def _is_kv(name: str) -> bool:
    return ".kv." in name


def _is_word(name: str) -> bool:
    return name == "embedding.word.weight"


def _is_qk_norm(name: str) -> bool:
    return name.endswith(("q_norm.weight", "k_norm.weight"))


def _is_undecayed(name: str) -> bool:
    return not name.endswith(".weight") or planted.is_norm(name)


ANY, MEGATRON = planted.anything, "NVIDIA/Megatron-LM"

FIELD_BUGS = (
    FieldBug(
        planted.norm_gradients_are_not_summed_under_sequence_parallelism,
        f"{MEGATRON}#1446",
        FULL,
        "gradient",
        planted.is_summed_over_tp,
    ),
    FieldBug(
        planted.qk_norm_gradients_are_not_summed,
        "NVIDIA-NeMo/RL#3716",
        Case("qwen", tp=2, dp=2, num_layers=2),
        "gradient",
        _is_qk_norm,
    ),
    FieldBug(tied_gradients_are_added_before_they_are_whole, f"{MEGATRON}#844", TIED, "gradient", _is_word),
    FieldBug(planted.tied_embedding_is_not_summed_over_its_two_stages, "uw-syfi/piper#13", PP, "gradient", _is_word),
    FieldBug(kv_gradients_stay_partial_on_each_replica, "bigcode-project/Megatron-LM#37", KV, "gradient", _is_kv),
    FieldBug(
        planted.gradient_norm_counts_replicas, "NVIDIA-NeMo/RL#3788", FULL, "gradient norm", lambda name: name == ""
    ),
    FieldBug(
        planted.each_microbatch_is_averaged_over_its_own_tokens,
        "pytorch/torchtitan#2206",
        FULL,
        "output",
        lambda name: name == "loss",
    ),
    FieldBug(each_rank_averages_over_its_own_tokens, "PrimeIntellect-ai/prime-rl#1957", DP, "gradient", ANY),
    FieldBug(gradients_are_scaled_by_dp, "NVIDIA-NeMo/Automodel#3846", DP, "gradient", ANY),
    FieldBug(only_the_last_microbatch_trains, "NVIDIA-NeMo/Automodel#3530", PP, "gradient", ANY),
    FieldBug(gradients_are_added_to_what_was_there, f"{MEGATRON}#4609", PP, "gradient", ANY, step=1),
    FieldBug(
        planted.one_all_gather_after_the_step_is_stale,
        f"{MEGATRON}#950",
        Case("gpt", tp=2, dp=2, bucket_bytes=2**20, num_layers=2),
        "parameter",
        ANY,
    ),
    FieldBug(planted.masters_do_not_follow_new_weights, f"{MEGATRON}#174", FULL, "master", ANY, dtype="bf16"),
    FieldBug(planted.norms_are_decayed, "ServiceNow/Fast-LLM#542", FULL, "master", _is_undecayed),
    FieldBug(
        planted.attention_dropout_is_the_same_on_every_tp_rank,
        "InternLM/InternLM#405",
        DROPOUT,
        "output",
        lambda name: name.startswith("layers."),
    ),
    FieldBug(
        planted.rope_counts_from_each_shard,
        "NVIDIA-NeMo/Speech#6153",
        QK,
        "output",
        lambda name: name.startswith("layers."),
    ),
)
"""Bugs that `triaxis verify` names. `docs/verify.md` lists these and those that other checks name."""

IN_CI = ("tied_gradients_are_added_before_they_are_whole", "each_rank_averages_over_its_own_tokens")
