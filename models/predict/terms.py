"""`Term`, one kept tensor's bytes per token, and the widths from which terms are computed."""

from dataclasses import dataclass
from fractions import Fraction

from triaxis.engine.config.quantities.plan import part_length
from triaxis.engine.config.quantities.state_plan import ITEMSIZE
from triaxis.engine.config.tree import Config
from triaxis.engine.layout.rank_grid import ParallelSizes
from triaxis.models.specs import StageContents

BYTES_PER_ELEMENT = ITEMSIZE
INDEX_BYTES = 8


def accumulation_bytes(element: int) -> int:
    """Compute the bytes per element in the accumulation dtype, for a dtype with `element` bytes."""
    return max(4, element)


@dataclass(frozen=True, slots=True)
class Term:
    """One kept tensor.

    Attributes:
        module: name of the module, in a block or chunk, that keeps it.
        paper: bytes per token on this rank in the paper's count; 0 if the paper has no such tensor.
        ours: bytes per token on this rank with this engine's kernels on the CPU; 0 if nothing is kept.
        part: layer part whose recomputation replaces it (`recompute.modules`); "" if there is none.
        moves: the tensor moves to host memory if its layer is offloaded.
    """

    module: str
    tensor: str
    paper: Fraction
    ours: Fraction
    part: str = ""
    moves: bool = True


@dataclass(frozen=True, slots=True)
class Sizes:
    """Widths on one rank, as fractions.

    Attributes:
        w, acc: bytes per element in the run's dtype and in the accumulation dtype.
        shard: share of the sequence held outside the tensor-parallel region: 1/t with sequence parallelism, else 1.
        h: hidden size.
        heads, kv_heads: query heads and key/value heads on this rank.
        q, kv, out, f: widths on this rank: queries, keys, attention's output, MLP.
        s, b: sequence length, and sequences per microbatch.
        c: number of context-parallel ranks, which share a sequence.
    """

    w: int
    acc: int
    shard: Fraction
    h: int
    heads: Fraction
    kv_heads: Fraction
    q: Fraction
    kv: Fraction
    out: Fraction
    f: Fraction
    s: int
    b: int
    c: int

    @classmethod
    def of(cls, config: Config, sizes: ParallelSizes) -> "Sizes":
        model, t = config.model, sizes.tp
        w = BYTES_PER_ELEMENT[config.precision.dtype]
        heads = Fraction(model.num_attention_heads, t)
        kv_heads = max(Fraction(model.kv_heads, t), Fraction(1))
        return cls(
            w=w,
            acc=accumulation_bytes(w),
            shard=Fraction(1, t if config.parallel.sequence_parallel else 1),
            h=model.hidden_size,
            heads=heads,
            kv_heads=kv_heads,
            q=heads * model.head_size,
            kv=kv_heads * model.head_size,
            out=heads * model.value_size,
            f=Fraction(model.ffn_size, t),
            s=model.seq_length,
            b=config.train.micro_batch_size,
            c=sizes.cp,
        )


def tokens_of_microbatch(config: Config) -> int:
    """Count a microbatch's tokens on one context-parallel rank: samples x sequence length / cp."""
    return config.train.micro_batch_size * part_length(config)


def recomputed_layers(config: Config, stage: StageContents) -> int:
    """Count a stage's layers whose whole forward is recomputed."""
    if config.recompute.granularity != "full":
        return 0
    num_layers = len(stage.layers)
    return num_layers if config.recompute.method == "uniform" else min(num_layers, config.recompute.num_layers)


def column_input(config: Config, at: Sizes, module: str, part: str = "") -> Term:
    """Build the term of a column-parallel layer's input.

    If the input is kept as a shard, the part named `part` computed it, and recomputing that part replaces it. If the gathered
    input is kept, no part can recompute it.
    """
    own = at.w * at.h * at.shard
    if keeps_gathered(config, at):
        return Term(module, "input", own, Fraction(at.w * at.h))
    return Term(module, "input", own, own, part)


def keeps_gathered(config: Config, at: Sizes) -> bool:
    """Whether column-parallel layers keep their input as gathered over tp, not a shard of it."""
    return config.recompute.gathered_inputs == "keep" and at.shard != 1
