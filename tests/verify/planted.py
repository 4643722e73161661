"""Bugs that layouts have had in this field, planted at run time in ranks under verification. The verifier knows none of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import models.attention
import models.gpt
from engine.collectives import Axis
from engine.optimizer.distributed import DistributedOptimizer, OwnedBucket
from engine.optimizer.grad_buffer import FlatBuffer, GradBuffers
from engine.pipeline.executor import Executor
from engine.step import Engine
from engine.tensor_parallel.parameter import ShardedParameter
from models.attention import Attention
from models.gpt import GPTChunk
from tests.parity.cases import Case

FULL = Case("gpt", tp=2, pp=2, vpp=2, dp=2, sequence_parallel=True, num_layers=4)


@dataclass(frozen=True)
class Bug:
    """A bug, where it can happen, and what the verdict has to say.

    Attributes:
        plant: called in each rank before anything is built.
        what: the kind of the first difference.
        names: parameters (or the first place) that must be named, and nothing else of that kind.
        axis: that must be given.
    """

    plant: Callable[[], None]
    case: Case
    what: str
    names: Callable[[str], bool]
    axis: str | None
    text: str
    dtype: str = "float64"

    def __str__(self) -> str:
        return self.plant.__name__


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

    def scaled(self: Executor, *args: Any, loss_scale: float = 1.0) -> list[torch.Tensor]:
        return run(self, *args, loss_scale=loss_scale**2)

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
            buffer.main_grads /= self.dp.size

    GradBuffers.finish = mean  # type: ignore[method-assign]


def kv_head_replicas_are_counted_twice() -> None:
    finish = GradBuffers.finish

    def twice(self: GradBuffers) -> None:
        finish(self)
        for buffer in self.buffers:
            if buffer.layout.key.sum_over == "kv_replicas":
                assert buffer.sum_axis is not None
                for bucket in buffer.buckets:
                    buffer.sum_axis.all_reduce(buffer.main_grads[slice(*bucket.owned)], "planted").wait()

    GradBuffers.finish = twice  # type: ignore[method-assign]


def attention_dropout_is_the_same_on_every_tp_rank() -> None:
    init = Attention.__init__

    def shared(self: Attention, *args: Any) -> None:
        init(self, *args)
        self.first_head = 0

    Attention.__init__ = shared  # type: ignore[method-assign]


def masters_do_not_follow_new_weights() -> None:
    import launch.verify_rank as worker

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
            owned.buffer.replica_index = 0
        return square_sum(self)

    DistributedOptimizer.grad_square_sum = counted  # type: ignore[method-assign]


def chunks_run_in_another_order() -> None:
    loss = Engine._loss

    def swapped(self: Engine, chunk: int, x: torch.Tensor | None, microbatch: Any) -> torch.Tensor:
        return loss(self, {1: 2, 2: 1}.get(chunk, chunk), x, microbatch)

    Engine._loss = swapped  # type: ignore[method-assign]


def a_bucket_is_reduced_before_its_last_microbatch() -> None:
    added = GradBuffers.grad_added

    def early(self: GradBuffers, parameter: ShardedParameter) -> None:
        place = self._places[parameter.record.name]
        if parameter.record.name.endswith("mlp.down.weight") and place.missing == 1:
            parameter.bound_main_grad().copy_(parameter.kept)  # type: ignore[arg-type]
        parameter.kept = parameter.bound_main_grad().clone()
        added(self, parameter)

    GradBuffers.grad_added = early  # type: ignore[method-assign]


def padded_vocabulary_is_in_the_softmax() -> None:
    cross_entropy = models.gpt.vocab_parallel_cross_entropy

    def padded(logits: torch.Tensor, labels: torch.Tensor, axis: Axis, vocab_size: int, *rest: Any) -> torch.Tensor:
        return cross_entropy(logits, labels, axis, logits.shape[-1] * axis.size, *rest)

    models.gpt.vocab_parallel_cross_entropy = padded


def rope_counts_from_each_shard() -> None:
    forward = Attention.forward

    def shifted(self: Attention, x: torch.Tensor, rope: torch.Tensor | None, *args: Any, **kwargs: Any) -> torch.Tensor:
        assert rope is not None
        return forward(self, x, rope.roll(self.context.region.axis.index, dims=1), *args, **kwargs)

    Attention.forward = shifted  # type: ignore[method-assign]


def one_all_gather_after_the_step_is_stale() -> None:
    gather = GradBuffers.gather

    def stale(self: GradBuffers) -> None:
        buffer = self.buffers[0]
        bucket = buffer.buckets[0].layout
        before = buffer.parameters[bucket.start : bucket.stop].clone()
        gather(self)
        self.wait_all()
        start, stop = buffer.buckets[0].owned
        before[start - bucket.start : stop - bucket.start] = buffer.parameters[start:stop]
        buffer.parameters[bucket.start : bucket.stop] = before

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
                    start, stop = bucket.owned
                    kept.append((bucket, bucket.owned))
                    length = stop - start
                    where = bucket.layout.start
                    bucket.owned = (where, where + length)
        finish(self)
        for bucket, owned in kept:
            bucket.owned = owned

    GradBuffers.finish = misplaced  # type: ignore[method-assign]


def norms_are_decayed() -> None:
    runs = OwnedBucket.runs

    def decayed(self: OwnedBucket) -> Any:
        return [(where, True) for where, _ in runs(self)]

    OwnedBucket.runs = decayed  # type: ignore[method-assign]


def is_norm(name: str) -> bool:
    return ".norm." in name or name.startswith("final_norm")


def is_summed_over_tp(name: str) -> bool:
    """Under sequence parallelism: what acts on the sequence shards."""
    return is_norm(name) or name.endswith(("proj.bias", "down.bias")) or name == "embedding.position.weight"


def anything(name: str) -> bool:
    return True


DROPOUT = Case("gpt_dropout", tp=2, dp=2, num_layers=2)
KV = Case("llama", tp=4, dp=2, sequence_parallel=True, num_layers=2)
QK = Case("qwen", tp=2, pp=2, dp=2, sequence_parallel=True, num_layers=2)
DEEP = Case("gpt", pp=2, vpp=4, dp=2, global_batch_size=6)

BUGS = (
    Bug(
        norm_gradients_are_not_summed_under_sequence_parallelism,
        FULL,
        "gradient",
        is_summed_over_tp,
        "tp",
        "not added over tp",
    ),
    Bug(
        tied_embedding_is_not_summed_over_its_two_stages,
        FULL,
        "gradient",
        lambda name: name == "embedding.word.weight",
        "pp",
        "not added over ends",
    ),
    Bug(loss_is_scaled_twice, FULL, "gradient", anything, None, "the loss is scaled twice"),
    Bug(
        last_stage_takes_microbatches_in_another_order,
        Case("gpt", pp=4, num_layers=4),
        "output",
        lambda name: name == "layers.3.attention",
        "pp",
        "another order",
    ),
    Bug(dp_takes_the_mean, FULL, "gradient", anything, "dp", "0.5 times"),
    Bug(
        kv_head_replicas_are_counted_twice,
        KV,
        "gradient",
        lambda name: ".kv." in name,
        "tp",
        "added twice",
    ),
    Bug(
        attention_dropout_is_the_same_on_every_tp_rank,
        DROPOUT,
        "output",
        lambda name: name == "layers.0.attention",
        "tp",
        "dropout",
    ),
    Bug(masters_do_not_follow_new_weights, FULL, "master", anything, "dp", "masters that do not follow", "bf16"),
    Bug(gradient_norm_counts_replicas, FULL, "gradient norm", lambda name: name == "", "tp", "replicas"),
    Bug(chunks_run_in_another_order, DEEP, "output", lambda name: name == "layers.2.attention", "pp", "chunks"),
    Bug(
        a_bucket_is_reduced_before_its_last_microbatch,
        FULL,
        "gradient",
        lambda name: name.endswith("mlp.down.weight"),
        "dp",
        "before the last microbatch",
    ),
    Bug(padded_vocabulary_is_in_the_softmax, FULL, "output", lambda name: name == "token_losses", "tp", "padded rows"),
    Bug(rope_counts_from_each_shard, QK, "output", lambda name: name == "layers.0.attention", "tp", "RoPE"),
    Bug(
        one_all_gather_after_the_step_is_stale,
        Case("gpt", tp=2, dp=2, bucket_bytes=2**20, num_layers=2),
        "parameter",
        anything,
        "dp",
        "all-gather",
    ),
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
    Bug(second_sum_runs_over_another_ranks_part, FULL, "gradient", is_summed_over_tp, "tp", "not added over tp"),
    Bug(
        norms_are_decayed,
        FULL,
        "master",
        lambda name: not name.endswith(".weight") or is_norm(name),
        None,
        "decay on norms",
    ),
)
