"""What a microbatch keeps on a rank between its forward and its backward, counted from the configuration alone (no torch here).

The formula of Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models" (2205.05198), section 4,
term by term, beside what these kernels keep. In the paper's block (16 bits per element, 1 byte per dropout mask, MLP width 4 h,
heads x head size = h) the terms add up to its equations, in bytes per token (s b of them; a heads, t tensor-parallel ranks):

    one rank (equation 1)                34 h + 5 a s
    tensor parallel (equation 2)         (10 + 24/t) h + 5 a s / t
    and sequence parallel (equation 4)   (34 h + 5 a s) / t

Kept here otherwise than there:

    dropout            the mask as a factor in the run's dtype, w h instead of h; nothing where p is 0
    fused attention    no scores (5 a s is gone), but the logarithm of each row's sum
    "explicit"         softmax in the accumulation dtype; the causal mask, one for all heads and samples
    RMSNorm            its input and one number per token
    recomputation      selective: nothing inside attention but q, k, v; full: the input of each group of layers
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from engine.config import Config
from engine.rank_grid import ParallelSizes
from models.specs import StageContents

BYTES_PER_ELEMENT = {"bf16": 2, "fp16": 2, "fp32": 4, "float64": 8}
INDEX_BYTES = 8


def accumulation_bytes(element: int) -> int:
    """Bytes of an element in the accumulation dtype of elements of so many bytes."""
    return max(4, element)


HEAD_MODULES = ("final_norm", "head", "losses")
"""Of the last stage, behind its layers."""
LOSS_MASK = "mask"


@dataclass(frozen=True, slots=True)
class Term:
    """One kept tensor.

    Attributes:
        module: of the block or chunk that keeps it.
        tensor: what it is.
        paper: bytes per token on this rank in the paper's count; 0 where the paper has no such tensor.
        ours: bytes per token on this rank with this engine's kernels on the CPU; 0 where nothing is kept.
    """

    module: str
    tensor: str
    paper: Fraction
    ours: Fraction


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Widths on one rank, as fractions: w, acc bytes per element (of the run, of accumulation); `shard`: 1/t of the sequence
    outside of the tensor-parallel region with sequence parallelism, else 1; heads, q, kv, f: on this rank."""

    w: int
    acc: int
    shard: Fraction
    h: int
    heads: Fraction
    kv_heads: Fraction
    q: Fraction
    kv: Fraction
    f: Fraction
    s: int
    b: int

    @classmethod
    def of(cls, config: Config, sizes: ParallelSizes) -> "_Sizes":
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
            f=Fraction(model.ffn_size, t),
            s=model.seq_length,
            b=config.train.micro_batch_size,
        )


def block_terms(config: Config, sizes: ParallelSizes) -> list[Term]:
    """What one transformer layer keeps, if it is not recomputed as a whole."""
    at = _Sizes.of(config, sizes)
    model = config.model
    whole = at.w * at.h * at.shard
    dropped = at.h * at.shard
    nothing = Fraction(0)
    dropout = whole if model.hidden_dropout else nothing
    terms = [
        *_norm_terms(config, at, "attention_norm"),
        Term("attention.qkv", "input", whole, whole),
        *_attention_terms(config, at),
        Term("attention.proj", "input", at.w * at.q, at.w * at.q),
        Term("attention", "residual dropout", dropped, dropout),
        *_norm_terms(config, at, "mlp_norm"),
        Term("mlp.up", "input", whole, whole),
    ]
    if model.activation == "swiglu":
        # Megatron-LM without fusions keeps silu(gate) too; here it is computed again.
        terms += [
            Term("mlp", "gate and up", 2 * at.w * at.f, 2 * at.w * at.f),
            Term("mlp", "silu(gate)", at.w * at.f, nothing),
        ]
    else:
        terms.append(Term("mlp", "activation input", at.w * at.f, at.w * at.f))
    terms += [
        Term("mlp.down", "input", at.w * at.f, at.w * at.f),
        Term("mlp", "residual dropout", dropped, dropout),
    ]
    return terms


def _norm_terms(config: Config, at: _Sizes, module: str) -> list[Term]:
    nothing = Fraction(0)
    whole = at.w * at.h * at.shard
    if config.model.norm == "layernorm":
        return [
            Term(module, "input", whole, whole),
            Term(module, "mean and deviation", nothing, 2 * at.w * at.shard),
        ]
    return [
        Term(module, "input", whole, whole),
        Term(module, "deviation", nothing, at.acc * at.shard),
    ]


def _attention_terms(config: Config, at: _Sizes) -> list[Term]:
    """Between the projections. Paper: q, k 4 h; v 2 h; softmax 2 a s, its mask a s, its output 2 a s."""
    model, nothing = config.model, Fraction(0)
    is_fused = config.kernels.attention != "explicit"
    is_kept = config.recompute.granularity != "selective"
    q, k = at.w * at.q, at.w * at.kv
    # Rotation and QK-norm make new q and k, while v keeps all three alive: they are parts of one product.
    is_new = model.position == "rope" or model.qk_norm
    if is_fused or not is_kept:
        new = q + k if is_new else nothing
        terms = [Term("attention", "q, k and v", q + 2 * k, q + 2 * k), Term("attention", "new q and k", nothing, new)]
    else:
        # torch copies what it multiplies, with one k and v per query head; of one sample it need not copy q, which then keeps
        # the whole product of which it is a part.
        copied = 3 * q if is_new or at.b > 1 else 3 * q + 2 * k
        terms = [Term("attention", "q, k and v", q + 2 * k, copied)]
    if model.qk_norm:
        terms.append(Term("attention", "deviations of QK-norm", nothing, at.acc * (at.heads + at.kv_heads)))
    scores = at.heads * at.s
    if is_fused:
        terms.append(
            Term("attention", "logarithm of each row's sum", nothing, at.acc * at.heads if is_kept else nothing)
        )
        return terms
    dropout = at.w * scores if model.attention_dropout else nothing
    each = [
        ("softmax", at.w * scores, at.acc * scores),
        ("softmax dropout", scores, dropout),
        ("probabilities", at.w * scores, at.w * scores),
        ("causal mask", nothing, Fraction(at.s, at.b)),
    ]
    if at.acc == at.w and not model.attention_dropout:
        each.remove(("probabilities", at.w * scores, at.w * scores))
        each.append(("probabilities (the softmax itself)", at.w * scores, nothing))
    return terms + [Term("attention", name, paper, ours if is_kept else nothing) for name, paper, ours in each]


def end_terms(config: Config, sizes: ParallelSizes, stage: StageContents) -> list[Term]:
    """What embedding, rotation and head of a stage keep beside its layers (2205.05198, section 4.3)."""
    at = _Sizes.of(config, sizes)
    model = config.model
    whole = at.w * at.h * at.shard
    terms = []
    if stage.has_embedding:
        terms.append(Term("embedding", "rows and which are held", Fraction(0), Fraction(INDEX_BYTES + 1)))
        if model.position == "learned":
            terms.append(Term("embedding", "positions", Fraction(0), INDEX_BYTES * at.shard))
        terms.append(
            Term("embedding", "dropout", at.h * at.shard, whole if model.hidden_dropout else Fraction(0)),
        )
    if model.position == "rope" and stage.layers and config.recompute.granularity != "full":
        terms.append(Term("attention", "tables of rotation", Fraction(0), Fraction(2 * at.acc * model.head_size)))
    if stage.has_head:
        columns = Fraction(model.padded_vocab_size, sizes.tp)
        # The paper keeps the logits in 32 bits; here they stay in the run's dtype and the softmax is computed again.
        terms += [
            *_norm_terms(config, at, "final_norm"),
            Term("head", "input", whole, whole),
            Term("losses", "logits", 4 * columns, at.w * columns),
            Term("losses", "sums, targets and which are held", Fraction(0), Fraction(at.acc + INDEX_BYTES + 1)),
            Term("losses", LOSS_MASK, Fraction(0), Fraction(1)),
        ]
    return terms


def per_token(terms: Sequence[Term]) -> Fraction:
    """Bytes per token that this engine keeps."""
    return sum((term.ours for term in terms), Fraction(0))


def paper_per_token(terms: Sequence[Term]) -> Fraction:
    """Bytes per token in the paper's count."""
    return sum((term.paper for term in terms), Fraction(0))


def kept_bytes(config: Config, sizes: ParallelSizes, stage: StageContents) -> Fraction:
    """Bytes that one microbatch keeps on one stage for its backward."""
    kept = per_token(end_terms(config, sizes, stage))
    kept += sum((group.kept for group in _groups(config, sizes, len(stage.layers))), Fraction(0))
    return _tokens(config) * kept


def backward_bytes(config: Config, sizes: ParallelSizes, stage: StageContents) -> Fraction:
    """The most bytes that one microbatch keeps on one stage while its backward runs, what it computes again included.

    The backward goes from the head to the embedding and frees what it has used.
    """
    ends = end_terms(config, sizes, stage)
    # The mask is the batch's own.
    head = per_token([term for term in ends if term.module in HEAD_MODULES and term.tensor != LOSS_MASK])
    groups = _groups(config, sizes, len(stage.layers))
    most = kept = per_token(ends) + sum((group.kept for group in groups), Fraction(0))
    kept -= head
    for group in reversed(groups):
        most = max(most, kept - group.kept + group.whole)
        kept -= group.kept
    return _tokens(config) * most


@dataclass(frozen=True, slots=True)
class _Group:
    """Layers that are kept or recomputed together, bytes per token: between forward and backward, and in the backward."""

    kept: Fraction
    whole: Fraction


def _groups(config: Config, sizes: ParallelSizes, num_layers: int) -> list[_Group]:
    """The layers of a stage in order, as `GPTChunk` groups them."""
    at, recompute = _Sizes.of(config, sizes), config.recompute
    layer = per_token(block_terms(config, sizes))
    if recompute.granularity != "full":
        return [_Group(num_layers * layer, num_layers * layer)]
    # One for all layers that need them; a group that is recomputed gets them from outside.
    tables = Fraction(2 * at.acc * config.model.head_size if config.model.position == "rope" else 0)
    size = recompute.num_layers if recompute.method == "uniform" else 1
    num_again = num_layers if recompute.method == "uniform" else min(num_layers, recompute.num_layers)
    groups = []
    for start in range(0, num_again, size):
        group_layers = min(size, num_again - start)
        groups.append(_Group(at.w * at.h * at.shard, group_layers * layer + tables))
    if num_layers > num_again:
        rest = (num_layers - num_again) * layer + tables
        groups.append(_Group(rest, rest))
    return groups


def _tokens(config: Config) -> int:
    return config.train.micro_batch_size * config.model.seq_length
