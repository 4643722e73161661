"""What a run's layers need from an attention kernel, and the factor on their logits."""

import math
from dataclasses import dataclass, fields

from triaxis.engine.config.quantities.context_parallel import gathers_keys
from triaxis.engine.config.schema.layer_kinds import LayerKind
from triaxis.engine.config.schema.model import ModelConfig
from triaxis.engine.config.tree import Config


@dataclass(frozen=True, slots=True)
class AttentionPattern:
    """What a run's layers need from an attention kernel, besides causal attention.

    Attributes:
        windows, documents, sinks, softcap: model and data features that the kernel must support.
        parts: True if queries cover only part of the keys' positions (context parallelism).
    """

    windows: bool = False
    documents: bool = False
    sinks: bool = False
    softcap: bool = False
    parts: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether plain causal attention is enough."""
        return not self.asked

    @property
    def asked(self) -> frozenset[str]:
        """Names of the features that the kernel must support, as in `AttentionKernel.has`."""
        return frozenset(each.name for each in fields(self) if getattr(self, each.name))


PLAIN = AttentionPattern()
"""Causal attention alone."""


def attention_pattern(config: Config) -> AttentionPattern:
    """Collect what a run's attention kernel must support. A window as long as the samples, or longer, counts as none."""
    model = config.model
    kinds = set(model.kinds)
    return AttentionPattern(
        windows=any(kind.window is not None and kind.window < model.seq_length for kind in kinds),
        documents=config.data.attention == "within",
        sinks=any(kind.sinks for kind in kinds),
        softcap=model.attention_softcap is not None,
        parts=gathers_keys(config),
    )


def softmax_scale(model: ModelConfig, kind: LayerKind) -> float | None:
    """Factor on a layer's attention logits; None: 1 / sqrt(query size).

    With latent attention and YaRN's `mscale_all_dim` m, the factor is (0.1 m ln(factor) + 1)^2 / sqrt(query size), as in DeepSeek's
    own code. If `model.attention_scale` is set, it is the factor.
    """
    if model.attention_scale is not None or model.mla is None:
        return model.attention_scale
    scale = float(model.head_size**-0.5)
    scaling = None if kind.rotary is None else kind.rotary.scaling
    if scaling is None or scaling.mscale_all_dim is None or scaling.factor is None or scaling.factor <= 1:
        return scale
    mscale = 0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1.0
    return scale * mscale * mscale
