"""Computes column- and row-parallel linear layers and the vocab-parallel embedding.

    column parallel   W = [W_1; ..; W_t], cut by output rows       Y_i = f(X) W_i^T                [s, b, out/t]
    row parallel      W = [W_1 | .. | W_t], cut by input columns   Y = g(sum_i X_i W_i^T + bias)   [s(/t), b, out]
    embedding         vocabulary cut by rows                       Y = g(sum_i rows that rank i holds)

Here s is the sequence length, b the microbatch size, t the number of tensor-parallel ranks. With sequence parallelism, (s/t)
replaces s. Weights are [out, in]. `engine/tensor_parallel/mappings.py` defines f and g. Activations are made contiguous and
multiplied as matrices [s * b, in] (`products.py`).

In the column-parallel backward, communication runs under the GEMMs, in this order:
    1. post the all-gather of X, if sequence parallelism has saved only a shard (`recompute.gathered_inputs`)
    2. dX = dY W
    3. post f's backward on dX
    4. dW += dY^T X
    5. wait for dX

If weight gradients are deferred (`WeightGradQueue`), 1 and 4 run later. A row-parallel layer then gathers dY a second time.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from triaxis.engine.comm.backends import Pending
from triaxis.engine.kernels.bias_total import AddTotal
from triaxis.engine.kernels.weight_grad import add
from triaxis.engine.linear.products import (
    IN_RUN_DTYPE,
    FusedWeights,
    LinearForm,
    LinearGemms,
    LinearParts,
    Operand,
)
from triaxis.engine.linear.weight_grads import DeferredGrad, WeightGradQueue
from triaxis.engine.numerics.precision import accumulate, accumulation_dtype
from triaxis.engine.tensor_parallel.mappings import TensorParallelRegion
from triaxis.engine.tensor_parallel.parameter import ShardedParameter


class ColumnParallelLinear(nn.Module):
    """One or several weights that read the same input, each cut by output rows.

    The weights share one gather of X. Each rank computes complete sums for its columns of Y, so a nonlinearity or an attention head
    can use them without communication.

    Args:
        weights: parameters [.., in], in the order of the output's columns.
        biases: one per weight, or none.
        name: label of the layer's calls in the communication ledger (`engine/comm/ledger.py`).
        consumer_sums_biases: whether the module that reads the output Y can sum dY for the bias gradients. It then calls
            `takes_bias_total` once before each backward through this layer.
    """

    def __init__(
        self,
        weights: Sequence[ShardedParameter],
        biases: Sequence[ShardedParameter],
        region: TensorParallelRegion,
        queue: WeightGradQueue,
        name: str,
        form: LinearForm = IN_RUN_DTYPE,
        *,
        consumer_sums_biases: bool = False,
    ) -> None:
        super().__init__()
        self.parameters_held = nn.ModuleList([*weights, *biases])
        self.weights = FusedWeights(weights, in_features=weights[0].record.local_shape[-1])
        self.biases = FusedWeights(biases, in_features=None) if biases else None
        is_cut = weights[0].record.spec.tp_dim is not None
        self.gemms: LinearGemms = form.gemms(
            LinearParts(
                name=name,
                weights=self.weights,
                biases=self.biases,
                kernel=queue.kernel,
                cuts_inputs=region.cuts_entered,
                cuts_outputs=is_cut or region.cuts_entered,
                sums_biases=True,
                consumer_may_sum=consumer_sums_biases,
            )
        )
        self.region = region
        self.queue = queue
        self.name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [s(/t), b, in] to [s, b, rows on this rank]."""
        return _ColumnParallel.apply(x, self)

    @property
    def takes_bias_total(self) -> AddTotal:
        """The function that adds dY's sum over tokens [rows] to the bias gradients.

        The module that reads the output Y calls it. None: this layer needs no call.
        """
        return self.gemms.add_bias_total if self.gemms.biases_are_summed_by_consumer else None


class _ColumnParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: ColumnParallelLinear) -> torch.Tensor:
        inputs, kept = layer.gemms.enter(x.contiguous(), layer.region, f"{layer.name} forward")
        ctx.layer, ctx.scale = layer, inputs.scale
        ctx.save_for_backward(kept)
        return layer.gemms.forward(inputs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        layer: ColumnParallelLinear = ctx.layer
        (kept,), scale, gemms, deferring = ctx.saved_tensors, ctx.scale, layer.gemms, layer.queue.deferring

        def gather(kept: torch.Tensor) -> Pending:
            return gemms.enter_again(Operand(kept, scale), layer.region, f"{layer.name} regather")

        # tp's communicator runs calls in the order they are posted. X goes first, so that 4 never waits for 3.
        # A deferred product gathers when it runs: until then the rank holds its shard of X, not the whole.
        gathered = None if deferring else gather(kept)  # step 1: posted, so that it runs under the product of 2
        of_output = gemms.whole_grad(Operand(grad.contiguous()), defers=deferring)
        # [s, b, in] from this rank's rows of W: one of t partial sums, which 3 reduces to [s(/t), b, in].
        grad_input = gemms.input_grad(of_output)  # 2
        reduced = layer.region.enter_backward(grad_input, f"{layer.name} backward")  # 3: runs under the product of 4
        if gathered is not None:
            gemms.add_weight_grads(of_output, Operand(gathered.wait(), scale))  # 4
        else:
            layer.queue.defer(
                DeferredGrad(
                    kept,
                    gather,
                    of_output.tensor,
                    lambda x, grad: gemms.add_weight_grads(Operand(grad, of_output.scale), Operand(x, scale)),
                )
            )
        return reduced.wait(), None  # 5


class RowParallelLinear(nn.Module):
    """One weight cut by input columns, and a bias that only the first tp rank adds.

    Args:
        weight: parameter whose first dim is the output.
        bias: parameter [out], held by every tp rank, or None.
        name: label of the layer's calls in the communication ledger (`engine/comm/ledger.py`).
    """

    def __init__(
        self,
        weight: ShardedParameter,
        bias: ShardedParameter | None,
        region: TensorParallelRegion,
        queue: WeightGradQueue,
        name: str,
        form: LinearForm = IN_RUN_DTYPE,
    ) -> None:
        super().__init__()
        self.weight = weight
        self.weights = FusedWeights([weight], in_features=math.prod(weight.record.local_shape[1:]))
        # Y is the sum over the ranks' parts, so only one rank may add the bias.
        added = None if bias is None or region.axis.index else FusedWeights([bias], in_features=None)
        self.gemms: LinearGemms = form.gemms(
            LinearParts(name, self.weights, added, queue.kernel, cuts_inputs=True, cuts_outputs=False)
        )
        self.bias = bias
        self.region = region
        self.queue = queue
        self.name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [s, b, in on this rank] to [s(/t), b, out]."""
        return _RowParallel.apply(x, self)


class _RowParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: RowParallelLinear) -> torch.Tensor:
        inputs = layer.gemms.whole_input(x.contiguous())
        ctx.layer, ctx.scale = layer, inputs.scale
        ctx.save_for_backward(inputs.tensor)
        return layer.region.leave(layer.gemms.forward(inputs), f"{layer.name} forward").wait()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        layer: RowParallelLinear = ctx.layer
        (x,), scale, gemms = ctx.saved_tensors, ctx.scale, layer.gemms
        grad = grad.contiguous()
        gathered, kept = gemms.leave_backward(grad, layer.region, f"{layer.name} backward")
        if layer.bias is not None:
            # The bias acts on this rank's part of the sequence, so this sum runs under the gather of dY. With sequence parallelism
            # it is partial: `GradBuffers.finish` sums it over tp.
            layer.bias.add_grad(grad.sum((0, 1), dtype=accumulation_dtype(grad.dtype)))
        of_output = gemms.whole_grad(Operand(gathered.wait(), kept.scale), defers=layer.queue.deferring)
        # dX [s, b, in/t] needs no reduction: each rank computes its own columns from the whole dY.
        grad_input = gemms.input_grad(of_output)
        if layer.queue.deferring:
            # With sequence parallelism the queue keeps this rank's dY shard, and gathers it again when the GEMM runs.
            layer.queue.defer(
                DeferredGrad(
                    kept.tensor,
                    lambda kept: layer.region.leave_backward(kept, f"{layer.name} regather"),
                    x,
                    lambda grad, x: gemms.add_weight_grads(Operand(grad, of_output.scale), Operand(x, scale)),
                )
            )
        else:
            gemms.add_weight_grads(of_output, Operand(x, scale))
        return grad_input, None


class VocabParallelEmbedding(nn.Module):
    """Word embedding whose rows are cut over tp.

    Each rank returns zeros for tokens whose rows it does not hold. g sums the ranks' results.
    """

    def __init__(self, weight: ShardedParameter, region: TensorParallelRegion) -> None:
        super().__init__()
        self.weight = weight
        self.region = region
        self.rows = weight.record.local_shape[0]
        self.first_row = region.axis.index * self.rows

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map tokens int64 [s, b] to [s(/t), b, h]."""
        return _VocabParallelLookup.apply(self.weight.weight(), tokens, self)


class _VocabParallelLookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, tokens: torch.Tensor, layer: VocabParallelEmbedding) -> torch.Tensor:
        local = tokens - layer.first_row
        held = (local >= 0) & (local < layer.rows)
        local = local.where(held, 0)
        ctx.layer = layer
        ctx.save_for_backward(local, held)
        # [s, b, h]. At most one of the t parts of a token is not zero, so the sum over tp is exact in any dtype.
        partial = weight[local] * held.unsqueeze(-1)
        return layer.region.leave(partial, "embedding forward").wait()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None, None]:
        layer: VocabParallelEmbedding = ctx.layer
        local, held = ctx.saved_tensors
        whole = layer.region.leave_backward(grad, "embedding backward").wait()
        # Each rank has the whole dY and adds it for its own tokens; for other tokens it adds zeros to row 0.
        contribution = accumulate(whole) * held.unsqueeze(-1)
        is_first, main_grad = layer.weight.overwrites(), layer.weight.bound_main_grad()
        # Frequent tokens occur thousands of times, so they are summed in the accumulation dtype even if main grads are narrower.
        total = main_grad
        if main_grad.dtype != contribution.dtype:
            total = torch.zeros_like(main_grad, dtype=contribution.dtype)
        # The first gradient replaces the last step's, also in rows without a token in this microbatch.
        elif is_first:
            main_grad.zero_()
        total.index_add_(0, local.flatten(), contribution.flatten(0, 1))
        if total is not main_grad:
            add(main_grad, total, overwrite=is_first)
        layer.weight.grad_was_added()
        return None, None, None
