"""More bugs that layouts have had in this field, planted at run time: by the axis on which they live (see `planted.py`)."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

import triaxis.engine.data.loader
import triaxis.engine.step
import triaxis.engine.tensor_parallel.initial_weights
from triaxis.engine.comm.backends import Pending
from triaxis.engine.comm.collectives import Axis
from triaxis.engine.config.quantities.update_settings import UpdateRule
from triaxis.engine.config.schema.training import OptimizerConfig
from triaxis.engine.context_parallel.mixer import Mixer
from triaxis.engine.data.sampler import step_sample_ids
from triaxis.engine.head.cross_entropy import LocalTargets
from triaxis.engine.kernels.fusion import Fusion
from triaxis.engine.layout.shard_spec import ParamRecord
from triaxis.engine.linear.layers import RowParallelLinear
from triaxis.engine.optimizer.bucket import Bucket
from triaxis.engine.optimizer.distributed import DistributedOptimizer, OwnedBucket, square_sum
from triaxis.engine.optimizer.grad_buffer import GradBuffers
from triaxis.engine.pipeline.executor import Executor, _Run
from triaxis.engine.tensor_parallel.dropout import DropoutKeys
from triaxis.engine.tensor_parallel.mappings import TensorParallelRegion
from triaxis.engine.tensor_parallel.parameter import ShardedParameter
from triaxis.models.gpt.chunk import GPTChunk

# On tp ------------------------------------------------------------------------------------------------------------------


def parts_of_the_mlp_are_not_added() -> None:
    leave = TensorParallelRegion.leave

    def alone(self: TensorParallelRegion, partial: torch.Tensor, purpose: str) -> Pending:
        return Pending(partial) if "mlp.down" in purpose else leave(self, partial, purpose)

    TensorParallelRegion.leave = alone  # type: ignore[method-assign]


def gradients_of_inputs_are_not_added() -> None:
    def alone(self: TensorParallelRegion, grad: torch.Tensor, purpose: str) -> Pending:
        return Pending(grad)

    TensorParallelRegion.enter_backward = alone  # type: ignore[method-assign]


def row_parallel_bias_is_added_by_every_rank() -> None:
    forward = RowParallelLinear.forward

    def added(self: RowParallelLinear, x: torch.Tensor) -> torch.Tensor:
        assert self.bias is not None
        return forward(self, x) + (self.region.axis.size - 1) * self.bias.value.detach()

    RowParallelLinear.forward = added  # type: ignore[method-assign]


def whole_gradients_of_replicas_are_added() -> None:
    finish = GradBuffers.finish

    def added(self: GradBuffers) -> None:
        finish(self)
        for buffer in self.buffers:
            if buffer.layout.key.replicas == "tp" and buffer.sum_axis is None:
                # What tp ranks with equal gradients make of a sum.
                for bucket in buffer.buckets:
                    bucket.owned_grads *= _tp_size(self)

    GradBuffers.finish = added  # type: ignore[method-assign]


def _tp_size(buffers: GradBuffers) -> int:
    """Return how many ranks share a matrix that tp cuts."""
    sizes = {
        parameter.record.spec.shape[0] // parameter.record.local_shape[0]
        for bucket in buffers.buckets
        for parameter in bucket.expected
        if parameter.record.name.endswith("mlp.up.weight") and parameter.record.spec.tp_dim == 0
    }
    sizes |= {
        parameter.record.spec.shape[1] // parameter.record.local_shape[1]
        for bucket in buffers.buckets
        for parameter in bucket.expected
        if parameter.record.name.endswith("mlp.down.weight")
    }
    return max(sizes)


def every_rank_takes_the_first_part_of_the_sequence() -> None:
    def first(self: TensorParallelRegion, length: int) -> slice:
        return slice(0, length // self.axis.size if self.sequence_parallel else length)

    TensorParallelRegion.shard_of_sequence = first  # type: ignore[method-assign]


def parts_of_weights_start_alike() -> None:
    initial_box = triaxis.engine.tensor_parallel.initial_weights.initial_box

    def alike(record: ParamRecord, seed: int) -> torch.Tensor:
        box = tuple((0, stop - start) for start, stop in record.box)
        return initial_box(replace(record, box=box), seed)

    triaxis.engine.tensor_parallel.initial_weights.initial_box = alike


# On pp ------------------------------------------------------------------------------------------------------------------


def _change_what_is_handed_over(direction: str, change: Callable[[_Run, torch.Tensor], torch.Tensor]) -> None:
    hand_over = _Run._hand_over

    def changed(self: _Run, to: Any, stage: int, microbatch: int, tensor: torch.Tensor) -> None:
        hand_over(self, to, stage, microbatch, change(self, tensor) if to == direction else tensor)

    _Run._hand_over = changed  # type: ignore[method-assign]


def a_stage_gets_the_gradient_of_the_microbatch_before() -> None:
    before: dict[int, torch.Tensor] = {}

    def late(run: _Run, tensor: torch.Tensor) -> torch.Tensor:
        found = before.get(run.rank, tensor)
        before[run.rank] = tensor.clone()
        return found

    _change_what_is_handed_over("backward", late)


def gradients_between_stages_are_halved() -> None:
    _change_what_is_handed_over("backward", lambda run, tensor: tensor / 2)


def activations_between_stages_are_rounded() -> None:
    _change_what_is_handed_over("forward", lambda run, tensor: tensor.bfloat16().to(tensor.dtype))


def the_last_stage_keeps_its_old_embedding() -> None:
    step = DistributedOptimizer.step

    def kept(self: DistributedOptimizer, *args: Any, **kwargs: Any) -> None:
        ends = [one for one in self.owned if one.buffer.layout.key.replicas == "ends" and not one.buffer.is_first]
        masters = [one.state.read("master").clone() for one in ends]
        step(self, *args, **kwargs)
        for one, master in zip(ends, masters, strict=True):
            one.state.write({"master": master})

    DistributedOptimizer.step = kept  # type: ignore[method-assign]


def dropout_counts_layers_of_the_stage() -> None:
    forward, of_site = GPTChunk.forward, DropoutKeys.of_site
    first: list[int] = [0]

    def counted(self: GPTChunk, x: torch.Tensor | None, batch: Any) -> torch.Tensor:
        first[0] = self.stage.layers.start
        return forward(self, x, batch)

    def shifted(self: DropoutKeys, name: str, fusion: Fusion) -> torch.Tensor:
        if name.startswith("layers."):
            _, layer, rest = name.split(".", 2)
            name = f"layers.{int(layer) - first[0]}.{rest}"
        return of_site(self, name, fusion)

    GPTChunk.forward = counted  # type: ignore[method-assign]
    DropoutKeys.of_site = shifted  # type: ignore[method-assign]


def loss_is_divided_by_the_stages() -> None:
    run = Executor.run

    def divided(self: Executor, *args: Any, output_grad: torch.Tensor, **named: Any) -> list[torch.Tensor]:
        return run(self, *args, output_grad=output_grad / self.topology.axis("pp").size, **named)

    Executor.run = divided  # type: ignore[assignment,method-assign]


# On dp ------------------------------------------------------------------------------------------------------------------


def _deal(ids: Callable[[int, int, int, int, int], list[list[int]]]) -> None:
    def dealt(consumed: int, batch: int, micro: int, dp: int, rank: int, *rest: Any) -> list[list[int]]:
        return ids(consumed, batch, micro, dp, rank)

    triaxis.engine.data.loader.step_sample_ids = dealt


def every_dp_rank_reads_the_samples_of_the_first() -> None:
    _deal(lambda consumed, batch, micro, dp, rank: step_sample_ids(consumed, batch, micro, dp, 0))


def dp_ranks_read_from_places_of_their_own() -> None:
    _deal(lambda consumed, batch, micro, dp, rank: step_sample_ids(consumed + rank, batch, micro, dp, rank))


def one_bucket_is_not_reduced() -> None:
    added, finish = Bucket.grad_added, GradBuffers.finish
    own: list[tuple[Bucket, torch.Tensor]] = []

    def before_reduction(self: Bucket, parameter: ShardedParameter) -> None:
        names = [entry.record.name for entry in self.layout.entries]
        if "layers.0.mlp.down.weight" in names and self.num_missing == 1:
            own.append((self, self.own_part.clone()))
        added(self, parameter)

    def unreduced(self: GradBuffers) -> None:
        finish(self)
        while own:
            bucket, values = own.pop()
            bucket.owned_grads[:] = values

    Bucket.grad_added = before_reduction  # type: ignore[method-assign]
    GradBuffers.finish = unreduced  # type: ignore[method-assign]


def a_weight_is_reduced_before_its_last_microbatch() -> None:
    """The owner adds its own last gradient to the sum; those of the other ranks are lost."""
    added = Bucket.grad_added
    kept: dict[str, torch.Tensor] = {}

    def early(self: Bucket, parameter: ShardedParameter) -> None:
        name = parameter.record.name
        if name.endswith("mlp.down.weight"):
            main_grad = parameter.bound_main_grad()
            if self.missing[parameter] == 1:
                entry = next(one for one in self.layout.entries if one.record.name == name)
                numbers = torch.arange(entry.start, entry.stop).view(main_grad.shape)
                start, stop = self.owned
                main_grad.copy_(torch.where((numbers >= start) & (numbers < stop), main_grad, kept[name]))
            kept[name] = main_grad.clone()
        added(self, parameter)

    Bucket.grad_added = early  # type: ignore[method-assign]


def gradient_norm_counts_whole_buckets() -> None:
    def counted(self: DistributedOptimizer) -> torch.Tensor:
        return square_sum([owned.bucket.grads.to(self.wide) for owned in self.owned if owned.buffer.is_first])

    DistributedOptimizer.grad_square_sum = counted  # type: ignore[method-assign]


def later_owners_mix_up_decay() -> None:
    runs = OwnedBucket.runs

    def mixed_up(self: OwnedBucket, config: OptimizerConfig) -> Sequence[tuple[slice, UpdateRule]]:
        is_later = self.bucket.owned[0] > self.bucket.layout.start
        found = runs(self, config)
        if not is_later:
            return found
        return [(where, replace(rule, weight_decay=config.weight_decay - rule.weight_decay)) for where, rule in found]

    OwnedBucket.runs = mixed_up  # type: ignore[method-assign]


def each_dp_rank_divides_by_its_own_tokens() -> None:
    run = Executor.run

    def divided(
        self: Executor,
        program: Any,
        microbatches: Sequence[Any],
        function: Any,
        *,
        output_grad: torch.Tensor,
        **named: Any,
    ) -> list[torch.Tensor]:
        dp = self.topology.axis("dp")
        mine = sum(microbatch.num_tokens for microbatch in microbatches)
        total = float(dp.all_reduce(torch.tensor([float(mine)]), "planted").wait())
        return run(self, program, microbatches, function, output_grad=output_grad * total / (dp.size * mine), **named)

    Executor.run = divided  # type: ignore[assignment,method-assign]


def later_owners_forget_their_moments() -> None:
    step = DistributedOptimizer.step

    def forgotten(self: DistributedOptimizer, *args: Any, **kwargs: Any) -> None:
        for owned in self.owned:
            if owned.bucket.owned[0] > owned.bucket.layout.start:
                owned.state.write({"exp_avg": torch.zeros_like(owned.state.read("exp_avg"))})
        step(self, *args, **kwargs)

    DistributedOptimizer.step = forgotten  # type: ignore[method-assign]


# On no axis -------------------------------------------------------------------------------------------------------------


def gradients_are_not_clipped() -> None:
    triaxis.engine.step.clip_factor = lambda norm, limit: None


def weights_decay_twice() -> None:
    init = DistributedOptimizer.__init__

    def twice(self: DistributedOptimizer, buffers: GradBuffers, config: Any, *args: Any, **kwargs: Any) -> None:
        init(self, buffers, config.model_copy(update={"weight_decay": 2 * config.weight_decay}), *args, **kwargs)

    DistributedOptimizer.__init__ = twice  # type: ignore[method-assign]


def a_microbatch_is_written_over() -> None:
    asked = Bucket.overwrites

    def older(self: Bucket, parameter: ShardedParameter) -> bool:
        overwrites = asked(self, parameter)
        is_second = self.expected[parameter] - self.missing[parameter] == 1
        return overwrites or (is_second and parameter.record.name.endswith("mlp.down.weight"))

    Bucket.overwrites = older  # type: ignore[method-assign]


def masked_labels_are_counted() -> None:
    forward = GPTChunk.forward

    def counted(self: GPTChunk, x: torch.Tensor | None, batch: Any) -> torch.Tensor:
        return forward(self, x, replace(batch, loss_mask=torch.ones_like(batch.loss_mask)))

    GPTChunk.forward = counted  # type: ignore[method-assign]


def recomputed_layers_draw_other_masks() -> None:
    of_site = DropoutKeys.of_site

    def other(self: DropoutKeys, name: str, fusion: Fusion) -> torch.Tensor:
        is_backward = torch._C._current_graph_task_id() != -1
        return of_site(self, f"{name}, again" if is_backward else name, fusion)

    DropoutKeys.of_site = other  # type: ignore[method-assign]


def query_heads_take_keys_in_turn() -> None:
    """repeat in place of repeat_interleave: head 0, 1, 0, 1 instead of 0, 0, 1, 1."""
    core = Mixer.core

    def in_turn(self: Mixer, tensors: Sequence[torch.Tensor], *others: Any) -> torch.Tensor:
        q, k, v = tensors
        order = torch.arange(q.shape[1]).view(-1, k.shape[1]).t().flatten()
        return core(self, (q[:, order], k, v), *others)

    Mixer.core = in_turn  # type: ignore[method-assign]


def bias_correction_is_a_step_ahead() -> None:
    init = DistributedOptimizer.__init__

    def ahead(self: DistributedOptimizer, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self._num_updates += 1

    DistributedOptimizer.__init__ = ahead  # type: ignore[method-assign]


# Only where sizes have a certain relation -------------------------------------------------------------------------------


def a_rank_of_padding_counts_one_column() -> None:
    of = LocalTargets.of

    def at_least_one(targets: torch.Tensor, axis: Axis, columns: int, vocab_size: int) -> LocalTargets:
        return of(targets, axis, columns, max(vocab_size, axis.index * columns + 1))

    LocalTargets.of = at_least_one  # type: ignore[method-assign, assignment]


def a_last_group_of_fewer_layers_runs_first() -> None:
    groups = GPTChunk._groups

    def reordered(self: GPTChunk) -> list[Any]:
        *others, last = groups(self)
        is_short = len(last.blocks) < self.context.recompute.num_layers
        return [last, *others] if is_short else [*others, last]

    GPTChunk._groups = reordered  # type: ignore[method-assign]


def the_third_round_repeats_the_second() -> None:
    run = Executor.run

    def repeated(
        self: Executor, program: Any, microbatches: Sequence[Any], *args: Any, **kwargs: Any
    ) -> list[torch.Tensor]:
        pp = self.topology.axis("pp").size
        third = microbatches[pp : 2 * pp][: len(microbatches[2 * pp : 3 * pp])]
        return run(self, program, [*microbatches[: 2 * pp], *third, *microbatches[3 * pp :]], *args, **kwargs)

    Executor.run = repeated  # type: ignore[method-assign]
