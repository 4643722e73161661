"""List the tensors that multi-token-prediction (MTP) layers keep besides those of any transformer layer.

inputs [2 s(/t), b, h] --two norms--> [s(/t), b, 2 h] --projection--> a layer --norm--> head
"""

from fractions import Fraction

from triaxis.engine.config.tree import Config
from triaxis.models.predict.terms import INDEX_BYTES, Sizes, Term

INPUTS = "mtp.inputs"
"""Module of an MTP layer's first tensor, from which all others are computed."""
BEHIND_PROJECTION = {"mtp.projection": (INPUTS, "mtp.norms")}
"""Modules whose tensors are freed once the backward of the projection and of the norms before it is done."""


def joining_terms(config: Config, at: Sizes) -> list[Term]:
    """List the tensors that an MTP layer keeps before its transformer layer.

    These are embeddings with hidden states, the statistics of both norms, and the projection's input.
    """
    nothing, kind = Fraction(0), config.model.norm_kind
    both = 2 * at.w * at.h * at.shard
    number = 2 * (at.w if kind.statistics_dtype == "run" else at.acc) * at.shard
    return [
        Term(INPUTS, "input", nothing, both),
        *(Term("mtp.norms", name, nothing, number) for name in kind.statistics),
        Term("mtp.projection", "input", nothing, both, "norm"),
    ]


def embedding_terms(config: Config, at: Sizes) -> list[Term]:
    """List the tensors that a word embedding keeps: row indices, which rows the rank holds, and the dropout mask."""
    dropped, whole = at.h * at.shard, at.w * at.h * at.shard
    return [
        Term("embedding", "rows and which are held", Fraction(0), Fraction(INDEX_BYTES + 1)),
        Term("embedding", "dropout", dropped, whole if config.model.hidden_dropout else Fraction(0)),
    ]
