"""Bugs that layouts have had in this field, planted at run time in ranks under verification. The verifier knows none of them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

import triaxis.models.gpt.attention
import triaxis.models.gpt.losses
from tests.parity.cases import Case
from tests.verify import (
    planted_ahead,
    planted_axes,
    planted_blocks,
    planted_context,
    planted_documents,
    planted_experts,
    planted_fp8,
    planted_latents,
    planted_schedules,
    planted_zero,
)
from tests.verify.bug import Bug, anything, is_attention
from triaxis.engine.comm.collectives import Axis
from triaxis.engine.config.schema.training import OptimizerConfig
from triaxis.engine.optimizer.distributed import DistributedOptimizer, OwnedBucket
from triaxis.engine.optimizer.grad_buffer import FlatBuffer, GradBuffers
from triaxis.engine.pipeline.executor import Executor
from triaxis.engine.step import Engine
from triaxis.models.gpt.attention import Attention
from triaxis.models.gpt.chunk import GPTChunk
from triaxis.models.gpt.context import Positions

REPLICAS = Case("gpt", dp=2, num_layers=2)
FULL = Case("gpt", tp=2, pp=2, vpp=2, dp=2, sequence_parallel=True, num_layers=4)


def _lose_sums(which: Callable[[FlatBuffer], bool]) -> None:
    made = GradBuffers.__init__

    def init(self: GradBuffers, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        for buffer in self.buffers:
            if which(buffer):
                buffer.sum_axis = None

    GradBuffers.__init__ = init  # type: ignore[method-assign]


def _of(buffer: FlatBuffer) -> list[str]:
    return [entry.record.name for bucket in buffer.buckets for entry in bucket.layout.entries]


def norm_gradients_are_not_summed_under_sequence_parallelism() -> None:
    _lose_sums(lambda buffer: buffer.layout.key.sum_over == "tp")


def tied_embedding_is_not_summed_over_its_two_stages() -> None:
    _lose_sums(lambda buffer: buffer.layout.key.sum_over == "ends")


def qk_norm_gradients_are_not_summed() -> None:
    _lose_sums(lambda buffer: any("q_norm" in name for name in _of(buffer)))


def loss_is_scaled_twice() -> None:
    run = Executor.run

    def scaled(self: Executor, *args: Any, output_grad: torch.Tensor, **named: Any) -> list[torch.Tensor]:
        return run(self, *args, output_grad=output_grad**2, **named)

    Executor.run = scaled  # type: ignore[assignment,method-assign]


def last_stage_takes_microbatches_in_another_order() -> None:
    run = Executor.run

    def reordered(
        self: Executor, program: Any, microbatches: Sequence[Any], *args: Any, **kwargs: Any
    ) -> list[torch.Tensor]:
        pp = self.topology.axis("pp")
        if pp.index == pp.size - 1:
            microbatches = [microbatches[1], microbatches[0], *microbatches[2:]]
        return run(self, program, microbatches, *args, **kwargs)

    Executor.run = reordered  # type: ignore[method-assign]


def dp_takes_the_mean() -> None:
    finish = GradBuffers.finish

    def mean(self: GradBuffers) -> None:
        finish(self)
        for buffer in self.buffers:
            for bucket in buffer.buckets:
                bucket.owned_grads /= buffer.reduce_axis.size

    GradBuffers.finish = mean  # type: ignore[method-assign]


def kv_head_replicas_are_counted_twice() -> None:
    finish = GradBuffers.finish

    def twice(self: GradBuffers) -> None:
        finish(self)
        for buffer in self.buffers:
            if buffer.layout.key.sum_over == "kv_replicas":
                assert buffer.sum_axis is not None
                for bucket in buffer.buckets:
                    buffer.sum_axis.all_reduce(bucket.owned_grads, "planted").wait()

    GradBuffers.finish = twice  # type: ignore[method-assign]


def attention_dropout_is_the_same_on_every_tp_rank() -> None:
    init = Attention.__init__

    def shared(self: Attention, *args: Any) -> None:
        init(self, *args)
        self.mixer.first_head = 0

    Attention.__init__ = shared  # type: ignore[method-assign]


def masters_do_not_follow_new_weights() -> None:
    import triaxis.launch.verify.rank as worker

    leave = worker.leave_the_initial_point

    def stale(engine: Engine, seed: int) -> None:
        masters = [owned.state.read("master").clone() for owned in engine.optimizer.owned]
        leave(engine, seed)
        for owned, master in zip(engine.optimizer.owned, masters, strict=True):
            owned.state.read("master").copy_(master)

    worker.leave_the_initial_point = stale


def gradient_norm_counts_replicas() -> None:
    square_sum = DistributedOptimizer.grad_square_sum

    def counted(self: DistributedOptimizer) -> torch.Tensor:
        for owned in self.owned:
            owned.buffer.is_first = True
        return square_sum(self)

    DistributedOptimizer.grad_square_sum = counted  # type: ignore[method-assign]


def chunks_run_in_another_order() -> None:
    loss = Engine._loss

    def swapped(self: Engine, chunk: int, x: torch.Tensor | None, microbatch: Any) -> torch.Tensor:
        return loss(self, {1: 2, 2: 1}.get(chunk, chunk), x, microbatch)

    Engine._loss = swapped  # type: ignore[method-assign]


def padded_vocabulary_is_in_the_softmax() -> None:
    cross_entropy = triaxis.models.gpt.losses.vocab_parallel_cross_entropy

    def padded(logits: torch.Tensor, labels: torch.Tensor, axis: Axis, vocab_size: int, *rest: Any) -> torch.Tensor:
        return cross_entropy(logits, labels, axis, logits.shape[-1] * axis.size, *rest)

    triaxis.models.gpt.losses.vocab_parallel_cross_entropy = padded


def rope_counts_from_each_shard() -> None:
    forward = Attention.forward

    def shifted(self: Attention, x: torch.Tensor, positions: Positions, *args: Any, **kwargs: Any) -> torch.Tensor:
        shard = self.context.region.axis.index
        tables = {rotary: table.roll(shard, dims=1) for rotary, table in positions.tables.items()}
        return forward(self, x, replace(positions, tables=tables), *args, **kwargs)

    Attention.forward = shifted  # type: ignore[method-assign]


def one_all_gather_after_the_step_is_stale() -> None:
    gather = GradBuffers.gather

    def stale(self: GradBuffers) -> None:
        buffer = self.buffers[0]
        bucket = buffer.buckets[0]
        before = bucket.weights.clone()
        gather(self)
        self.wait_all()
        start, stop = (each - bucket.layout.start for each in bucket.owned)
        before[start:stop] = bucket.owned_weights
        bucket.weights.copy_(before)

    GradBuffers.gather = stale  # type: ignore[method-assign]


def each_microbatch_is_averaged_over_its_own_tokens() -> None:
    forward = GPTChunk.forward

    def averaged(self: GPTChunk, x: torch.Tensor | None, batch: Any) -> torch.Tensor:
        output = forward(self, x, batch)
        return output if self.head is None else output * batch.loss_mask.numel() / batch.loss_mask.sum()

    GPTChunk.forward = averaged  # type: ignore[method-assign]


def second_sum_runs_over_another_ranks_part() -> None:
    finish = GradBuffers.finish

    def misplaced(self: GradBuffers) -> None:
        kept = []
        for buffer in self.buffers:
            if buffer.layout.key.sum_over == "tp":
                for bucket in buffer.buckets:
                    kept.append((bucket, bucket.owned_grads))
                    bucket.owned_grads = bucket.grads[: len(bucket.owned_grads)]
        finish(self)
        for bucket, owned in kept:
            bucket.owned_grads = owned

    GradBuffers.finish = misplaced  # type: ignore[method-assign]


def norms_are_decayed() -> None:
    runs = OwnedBucket.runs

    def decayed(self: OwnedBucket, config: OptimizerConfig) -> Any:
        return [(where, replace(rule, weight_decay=config.weight_decay)) for where, rule in runs(self, config)]

    OwnedBucket.runs = decayed  # type: ignore[method-assign]


def is_norm(name: str) -> bool:
    return ".norm." in name or name.startswith("final_norm")


def is_summed_over_tp(name: str) -> bool:
    """Under sequence parallelism: what acts on the sequence shards."""
    return is_norm(name) or name.endswith(("proj.bias", "down.bias")) or name == "embedding.position.weight"


DROPOUT = Case("gpt_dropout", tp=2, dp=2, num_layers=2)
KV = Case("llama", tp=4, dp=2, sequence_parallel=True, num_layers=2)
QK = Case("qwen", tp=2, pp=2, dp=2, sequence_parallel=True, num_layers=2)
DEEP = Case("gpt", pp=2, vpp=4, dp=2, global_batch_size=6)

DOWN = Case("gpt", tp=2, dp=2, num_layers=2)
PIPE = Case("gpt", pp=2, dp=2, num_layers=4)
SMALL_PIPE = Case("gpt", pp=2, num_layers=2)


def is_down(name: str) -> bool:
    return name.endswith("mlp.down.weight")


def is_embedding(name: str) -> bool:
    return name == "embedding.word.weight"


BUGS = (
    Bug(
        planted_axes.whole_gradients_of_replicas_are_added,
        DOWN,
        "gradient",
        lambda name: is_norm(name) or name.endswith(("proj.bias", "down.bias")) or "position" in name,
        "tp",
        "2 times what it should be",
    ),
    Bug(
        planted_axes.row_parallel_bias_is_added_by_every_rank,
        DOWN,
        "output",
        is_attention(0),
        "tp",
        "vanishes with tp=1",
    ),
    Bug(
        planted_axes.the_last_stage_keeps_its_old_embedding, SMALL_PIPE, "master", is_embedding, "pp", "pp 1 are wrong"
    ),
    Bug(
        planted_axes.gradient_norm_counts_whole_buckets, REPLICAS, "gradient norm", anything, "dp", "vanishes with dp=1"
    ),
    Bug(
        one_all_gather_after_the_step_is_stale,
        Case("gpt", dp=2, bucket_bytes=2**20, num_layers=2),
        "parameter",
        anything,
        "dp",
        "all-gather",
    ),
    Bug(
        planted_axes.every_dp_rank_reads_the_samples_of_the_first,
        REPLICAS,
        "samples",
        lambda name: name.startswith("sample "),
        "dp",
        "samples are distributed",
    ),
    Bug(
        planted_axes.parts_of_weights_start_alike,
        Case("gpt", tp=2, num_layers=2),
        "start",
        lambda name: "weight" in name and not is_norm(name) and "position" not in name,
        "tp",
        "initial weights depend on the layout",
    ),
    Bug(
        norm_gradients_are_not_summed_under_sequence_parallelism,
        FULL,
        "gradient",
        is_summed_over_tp,
        "tp",
        "not added over tp",
    ),
    Bug(tied_embedding_is_not_summed_over_its_two_stages, FULL, "gradient", is_embedding, "pp", "not added over pp"),
    Bug(loss_is_scaled_twice, FULL, "gradient", anything, None, "the loss is scaled twice"),
    Bug(
        last_stage_takes_microbatches_in_another_order,
        Case("gpt", pp=4, num_layers=4),
        "output",
        is_attention(3),
        "pp",
        "another order",
    ),
    Bug(dp_takes_the_mean, FULL, "gradient", anything, "dp", "0.5 times"),
    Bug(kv_head_replicas_are_counted_twice, KV, "gradient", lambda name: ".kv." in name, "tp", "added twice"),
    Bug(attention_dropout_is_the_same_on_every_tp_rank, DROPOUT, "output", is_attention(0), "tp", "dropout"),
    Bug(masters_do_not_follow_new_weights, FULL, "master", anything, None, "masters that do not follow", "bf16"),
    Bug(
        gradient_norm_counts_replicas,
        FULL,
        "gradient norm",
        anything,
        None,
        "replicas",
        lives_on=frozenset({"tp", "pp"}),
    ),
    Bug(chunks_run_in_another_order, DEEP, "output", is_attention(2), "pp", "chunks"),
    Bug(padded_vocabulary_is_in_the_softmax, FULL, "output", lambda name: name == "token_losses", None, "padded rows"),
    Bug(rope_counts_from_each_shard, QK, "output", is_attention(0), "tp", "RoPE"),
    Bug(
        qk_norm_gradients_are_not_summed,
        Case("qwen", tp=2, dp=2, num_layers=2),
        "gradient",
        lambda name: name.endswith(("q_norm.weight", "k_norm.weight")),
        "tp",
        "not added over tp",
    ),
    Bug(
        each_microbatch_is_averaged_over_its_own_tokens,
        FULL,
        "output",
        lambda name: name == "loss",
        None,
        "a mean over the counted tokens",
    ),
    Bug(
        second_sum_runs_over_another_ranks_part,
        FULL,
        "gradient",
        is_summed_over_tp,
        "tp",
        "not added over tp",
        lives_on=frozenset({"tp", "dp"}),
    ),
    Bug(
        norms_are_decayed,
        FULL,
        "master",
        lambda name: not name.endswith(".weight") or is_norm(name),
        None,
        "decay on norms",
    ),
    Bug(planted_axes.parts_of_the_mlp_are_not_added, DOWN, "output", lambda name: name == "layers.0.mlp", "tp", "tp=1"),
    Bug(planted_axes.gradients_of_inputs_are_not_added, DOWN, "gradient", anything, "tp", "vanishes with tp=1"),
    Bug(
        planted_axes.every_rank_takes_the_first_part_of_the_sequence,
        Case("gpt", tp=2, dp=2, sequence_parallel=True, num_layers=2),
        "output",
        lambda name: name == "embedding",
        "tp",
        "with sp=false",
    ),
    Bug(planted_axes.a_stage_gets_the_gradient_of_the_microbatch_before, PIPE, "gradient", anything, "pp", "with pp=1"),
    Bug(planted_axes.gradients_between_stages_are_halved, PIPE, "gradient", anything, "pp", "vanishes with pp=1"),
    Bug(
        planted_axes.activations_between_stages_are_rounded,
        PIPE,
        "output",
        is_attention(2),
        "pp",
        "output of layers.1 is right",
    ),
    Bug(
        planted_axes.dropout_counts_layers_of_the_stage,
        Case("gpt_dropout", pp=2, dp=2, num_layers=4),
        "output",
        is_attention(2),
        "pp",
        "vanishes with pp=1",
    ),
    Bug(
        planted_axes.loss_is_divided_by_the_stages,
        Case("gpt", pp=4, num_layers=4),
        "gradient",
        anything,
        "pp",
        "0.25 times",
    ),
    Bug(
        planted_axes.dp_ranks_read_from_places_of_their_own,
        Case("gpt", tp=2, dp=2, num_layers=2),
        "samples",
        anything,
        "dp",
        "samples are distributed",
    ),
    Bug(planted_axes.one_bucket_is_not_reduced, DOWN, "gradient", anything, "dp", "vanishes with dp=1"),
    Bug(
        planted_axes.a_weight_is_reduced_before_its_last_microbatch, FULL, "gradient", is_down, "dp", "every microbatch"
    ),
    Bug(planted_axes.later_owners_mix_up_decay, DOWN, "master", anything, "dp", "dp 1 are wrong"),
    Bug(planted_axes.each_dp_rank_divides_by_its_own_tokens, DOWN, "gradient", anything, "dp", "vanishes with dp=1"),
    Bug(planted_axes.later_owners_forget_their_moments, DOWN, "master", anything, "dp", "dp 1 are wrong"),
    Bug(planted_axes.gradients_are_not_clipped, DOWN, "master", anything, None, "stays with tp=1"),
    Bug(planted_axes.weights_decay_twice, PIPE, "master", anything, None, "decay on the wrong weights"),
    Bug(planted_axes.a_microbatch_is_written_over, DOWN, "gradient", is_down, None, "stays with tp=1, with dp=1"),
    Bug(planted_axes.masked_labels_are_counted, PIPE, "output", lambda name: name == "loss", None, "mask"),
    Bug(
        planted_axes.recomputed_layers_draw_other_masks,
        Case("gpt_dropout", tp=2, dp=2, num_layers=2, recompute=("full", "uniform", 1)),
        "gradient",
        anything,
        None,
        "vanishes with recompute.granularity=none",
    ),
    Bug(
        planted_axes.query_heads_take_keys_in_turn,
        Case("llama", pp=2, dp=2, num_layers=2),
        "output",
        is_attention(0),
        None,
        "stays with pp=1",
    ),
    Bug(planted_axes.bias_correction_is_a_step_ahead, PIPE, "master", anything, None, "bias correction"),
    *planted_documents.BUGS,
    *planted_blocks.BUGS,
    *planted_context.BUGS,
    *planted_latents.BUGS,
    *planted_schedules.BUGS,
    *planted_experts.BUGS,
    *planted_ahead.BUGS,
    *planted_fp8.BUGS,
    *planted_zero.BUGS,
)
