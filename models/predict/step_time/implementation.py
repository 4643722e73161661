"""The software that a predicted step runs on.

An `Implementation` states what training software does, according to its authors' papers and repositories. No field is a fitted
factor. The software of published runs is described in `benchmarks/published/software.py`.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Implementation:
    """Properties of training software that determine its step time.

    Attributes:
        attention: fused kernel (fa1_triton, fa2, cudnn, fa3), or "" for batched GEMMs with a softmax between them.
        fused_elementwise: bias, activation, dropout and residual share passes over memory.
        fused_weight_grad: a weight gradient's GEMM adds to the step's sum; if False, a separate kernel adds it.
        fused_loss: cross-entropy reads bf16 logits; if False, it reads and writes float32 copies of them.
        selective_products: share of a layer's GEMM time that selective recomputation repeats. If it is above 0, elementwise work
            is repeated too, and attention is not. If it is 0, the configured parts are recomputed.
        kernels_per_layer: number of kernels in a layer's forward; a backward has twice as many.
        host_ahead: the host posts calls faster than the device runs them; if False, its time for them is predicted.
        tp_backward_overlap: a column-parallel layer's backward runs its gather at the same time as the input gradient's GEMM,
            and its reduction at the same time as the weight gradient's.
        tp_overlap: all gathers and reductions of layers run in pieces beside their GEMMs; the first piece is exposed.
        dp_overlap: gradients are reduced during the last backward; otherwise after it.
        gather_overlap: parameters are gathered during the first forward; otherwise before it.
        gradient_bytes: bytes per gradient element on the wire.
        shards: what data-parallel ranks shard: "optimizer" (ZeRO-1), "parameters" (FSDP, gathered per layer in each pass), or
            "none" (gradients are all-reduced).
        optimizer_bytes: bytes read and written per parameter whose state a rank holds.
        every_step_bytes: bytes read and written per step and parameter on a rank, such as to zero the gradients.
        exposed_transfers: a rank computes nothing while it sends or receives between stages.
        scatter_gather: messages between stages are cut over tp, and gathered after arrival (2104.04473, section 4.1).
        fp8: linear layers, except the head, multiply fp8 operands that are cast from bf16 each time.
        cast_bytes: bytes per element of a cast to fp8: 2 read, and 1 + 1 written (one copy is transposed). Scaling by the current
            maximum reads 2 more.
        casts_weights: each microbatch casts the weights; if False, each step casts them once, which is not counted.
        copies_parameters: gathered data is copied into each parameter, and gradients into the reduced buffer (FSDP2).
        sequence_parallel: whether a run with tp that does not state sequence parallelism uses it.
        dropout: the recipes' dropout rate on residual branches and attention's probabilities.
        rotations: number of times that the rotation reads or writes queries and keys, in the run's dtype.
        repeats_kv: keys and values are copied once per query head before attention.
        chunks: model chunks per pipeline rank, for a run that states only that there are several; 0: any number.
        source: paper or repository that documents these properties.
    """

    name: str
    source: str
    attention: str = "cudnn"
    fused_elementwise: bool = True
    fused_weight_grad: bool = True
    fused_loss: bool = True
    selective_products: float = 0.0
    kernels_per_layer: int = 12
    host_ahead: bool = True
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


# Of Llama 3 8B (tests/cuda_stub/golden/llama_tp1.txt): 9 in a layer's forward, 14 in its backward.
OURS = Implementation("triaxis", "docs/architecture.md", kernels_per_layer=8, host_ahead=False)
