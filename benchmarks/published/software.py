"""The software of published runs, by its authors' papers and repositories."""

from dataclasses import replace

from triaxis.models.predict.step_time.implementation import OURS, Implementation

MEGATRON_2021 = Implementation(
    "Megatron-LM 2021",
    "2104.04473 sections 4 and 5: fused scale-mask-softmax and bias-gelu, no flash attention, no sequence parallelism",
    attention="",
    fused_weight_grad=False,
    fused_loss=False,
    kernels_per_layer=24,
    tp_backward_overlap=False,
    dp_overlap=False,
    gradient_bytes=2,
    shards="none",
    optimizer_bytes=44,
    exposed_transfers=True,
    scatter_gather=True,
    sequence_parallel=False,
    dropout=0.1,
)
MEGATRON_2022 = replace(
    MEGATRON_2021,
    name="Megatron-LM 2022",
    source="2205.05198: as in 2021, with sequence parallelism and overlap in column-parallel backwards (section 4.2.2)",
    tp_backward_overlap=True,
)
DEEPSPEED_2022 = replace(
    MEGATRON_2021, name="Megatron-DeepSpeed 2022", source="2201.11990 section 2", scatter_gather=False
)
ZERO_BUBBLE = replace(
    MEGATRON_2022,
    name="zero-bubble's Megatron-LM",
    source="2401.10241 section 5: Megatron-LM of 2023 on A100 nodes with RoCE",
    scatter_gather=False,
)
MEGATRON_CORE = Implementation(
    "Megatron-core",
    "Megatron-LM README at r0.8: --overlap-grad-reduce, --overlap-param-gather, --tp-comm-overlap, Transformer Engine",
    fused_loss=False,
    tp_overlap=True,
)
NEMO = replace(
    MEGATRON_CORE, name="NeMo", source="dgxc-benchmarking and Megatron-Bridge recipes; bf16 gradients", gradient_bytes=2
)
BRIDGE_FSDP = replace(NEMO, name="Megatron-Bridge FSDP", shards="parameters")
TITAN = Implementation(
    "torchtitan",
    "torchtitan docs: FSDP2, torch.compile per layer, SDPA's flash kernel, async TP; selective: every second product again",
    attention="fa2",
    fused_weight_grad=False,
    fused_loss=False,
    selective_products=0.5,
    cast_bytes=6,
    casts_weights=True,
    copies_parameters=True,
    kernels_per_layer=12,
    tp_overlap=True,
    gradient_bytes=4,
    shards="parameters",
    optimizer_bytes=96,  # AdamW without its fused kernel: a pass over memory per arithmetic operation
    # model.py, apply_rotary_emb: to float, times complex numbers, back to bf16. Inductor generates no code for complex operators,
    # so these are three kernels of 2 + 4, 4 + 4 and 4 + 2 bytes.
    rotations=10,
    repeats_kv=True,  # model.py: repeat_kv
    chunks=2,  # generate_split_points: two stages per rank where no split is given
)
LLM_FOUNDRY = Implementation(
    "llm-foundry",
    "llm-foundry 2023: torch FSDP, layers not compiled, bf16 reductions; submit_benchmarks.py: attn_impl=triton",
    attention="fa1_triton",
    fused_elementwise=False,
    fused_weight_grad=False,
    fused_loss=False,
    kernels_per_layer=24,
    gradient_bytes=2,
    shards="parameters",
    optimizer_bytes=30,
)
NANOCHAT = Implementation(
    "nanochat",
    "karpathy/nanochat: torch.compile of the model, SDPA's flash kernel, float logits, Muon with ZeRO-2-like shards",
    attention="fa2",
    fused_weight_grad=False,
    fused_loss=False,
    dp_overlap=False,
    gather_overlap=False,
    gradient_bytes=2,
)
NANOTRON = Implementation(
    "nanotron", "huggingface/nanotron: flash attention 2, ZeRO-1", attention="fa2", kernels_per_layer=20
)

_BY_SOURCE: tuple[tuple[str, Implementation], ...] = (
    ("2104.04473", MEGATRON_2021),
    ("SC21", MEGATRON_2021),
    ("2205.05198", MEGATRON_2022),
    ("2201.11990", DEEPSPEED_2022),
    ("2401.10241", ZERO_BUBBLE),
    ("dgxc-benchmarking", NEMO),
    ("Megatron-Bridge", NEMO),
    ("Megatron-LM", MEGATRON_CORE),
    ("llm-foundry", LLM_FOUNDRY),
    ("torchtitan", TITAN),
    ("nanochat", NANOCHAT),
    ("nanotron", NANOTRON),
    ("2407.21783", NEMO),
)


def implementation_of(source: str, note: str = "", dtype: str = "bf16") -> Implementation:
    """Return the software of a published run.

    Args:
        source: of the run; papers and repositories are looked for in it.
        note: of the run; `FSDP` there means sharded parameters, unless it says FSDP=0.
        dtype: of the run; fp8 and its recipes mean fp8 linear layers.
    """
    found = next((record for words, record in _BY_SOURCE if words in source), OURS)
    if found is NEMO and "FSDP" in note and "FSDP=0" not in note:
        found = BRIDGE_FSDP
    if "fp8" not in dtype:
        return found
    # The recipe "cs" scales by the largest value of the moment, delayed scaling by that of steps before.
    return replace(found, fp8=True, cast_bytes=6 if "cs" in dtype else found.cast_bytes)
