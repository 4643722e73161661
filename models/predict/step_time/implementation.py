"""What software a predicted step runs on.

A record says what code does, by its authors' papers and repositories. None of its fields is a factor to be fitted. The software of
published runs is in `benchmarks/published/software.py`.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Implementation:
    """Properties of training software that decide about time.

    Attributes:
        attention: fused kernel (fa1_triton, fa2, cudnn, fa3), or "" for batched GEMMs with a softmax between them.
        fused_elementwise: bias, activation, dropout and residual share passes over memory.
        fused_weight_grad: a weight gradient's GEMM adds to the sum of the step; else a pass of its own does.
        fused_loss: cross-entropy reads bf16 logits; else in passes over float copies.
        selective_products: share of a forward's products made again with `selective`, and all that is elementwise, instead of
            attention.
        kernels_per_layer: in a forward; a backward has twice as many.
        tp_backward_overlap: in column-parallel backwards, gathers run beside the input's GEMM and reductions beside the weight's.
        tp_overlap: all gathers and reductions of layers run in pieces beside their GEMMs; the first piece is exposed.
        dp_overlap: gradients are reduced during the last backward; else after it.
        gather_overlap: parameters are gathered during the first forward; else before it.
        gradient_bytes: of an element on the wire.
        shards: "optimizer": ZeRO-1; "parameters": FSDP, gathered per layer in each pass; "none": all-reduce.
        optimizer_bytes: read and written per parameter whose state a rank holds.
        every_step_bytes: read and written per parameter of a rank, such as to fill gradients with zeros.
        exposed_transfers: a rank computes nothing while it sends or receives between stages.
        scatter_gather: messages between stages are cut over tp, and gathered behind (2104.04473, section 4.1).
        fp8: linear layers but the head multiply fp8 operands, cast from bf16 each time.
        cast_bytes: of a cast to fp8 per element: 2 read, 1 + 1 written, also transposed; 2 more for the present largest value.
        casts_weights: in each microbatch; else once a step, which is not counted.
        copies_parameters: what is gathered is copied into each parameter, and gradients into what is reduced (FSDP2).
        sequence_parallel: runs with tp have it unless they say otherwise; else only those that say so.
        dropout: of the recipes, on residual branches and attention's probabilities.
        rotations: times that queries and keys are read or written, in bytes of their dtype, to rotate them.
        repeats_kv: keys and values are copied once per query head before attention.
        chunks: model chunks of a pipeline rank where a run says only that there are several; 0: any number.
        source: of these.
    """

    name: str
    source: str
    attention: str = "cudnn"
    fused_elementwise: bool = True
    fused_weight_grad: bool = True
    fused_loss: bool = True
    selective_products: float = 0.0
    kernels_per_layer: int = 12
    tp_backward_overlap: bool = True
    tp_overlap: bool = False
    dp_overlap: bool = True
    gather_overlap: bool = True
    gradient_bytes: int = 4
    shards: str = "optimizer"
    optimizer_bytes: float = 30
    every_step_bytes: float = 8
    exposed_transfers: bool = False
    scatter_gather: bool = False
    fp8: bool = False
    cast_bytes: int = 4
    casts_weights: bool = False
    copies_parameters: bool = False
    sequence_parallel: bool = True
    dropout: float = 0.0
    rotations: float = 2
    repeats_kv: bool = False
    chunks: int = 0


OURS = Implementation("triaxis", "docs/architecture.md")
