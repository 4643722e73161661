"""The environment that the modules of a GPT share: sizes, the tp region, dtype, kernels, parameters by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from triaxis.engine.activations.saved_tensors import SavedTensors
from triaxis.engine.config.activations import RecomputeConfig
from triaxis.engine.config.attention_kinds import LayerKind, Rotary
from triaxis.engine.config.mla import softmax_scale
from triaxis.engine.config.model import ModelConfig
from triaxis.engine.context_parallel.mixer import Made, Mixer, as_they_are
from triaxis.engine.data.documents import Documents
from triaxis.engine.data.sequence_part import SequencePart
from triaxis.engine.expert_parallel.region import ExpertRegion
from triaxis.engine.kernels.norms import NormKernel
from triaxis.engine.kernels.registry import Kernels
from triaxis.engine.layout.shard_spec import cut
from triaxis.engine.linear.fp8_shares import Fp8Counts
from triaxis.engine.linear.products import IN_RUN_DTYPE, LinearForm
from triaxis.engine.linear.weight_grads import WeightGradQueue
from triaxis.engine.tensor_parallel.dropout import DropoutKeys
from triaxis.engine.tensor_parallel.mappings import TensorParallelRegion
from triaxis.engine.tensor_parallel.norm import Norm
from triaxis.engine.tensor_parallel.parameter import ShardedParameter
from triaxis.models.gpt.hidden_dropout import HiddenDropout


@dataclass(frozen=True, slots=True)
class BuildContext:
    """Environment of the modules of one model chunk.

    Attributes:
        recompute: the recomputed parts; `auto` is already resolved.
        num_offloaded: layers of each chunk whose saved tensors are moved to the host.
        region: how activations enter and leave what is cut over tp.
        mixing: builds the mixer of a layer from the fields that all mixers have: how attention reaches the tokens of a row.
        experts: how tokens reach their experts; None: the model has none.
        parameters: this chunk's parameters by global name.
        saved: policy for tensors that are saved for the backward; one for all chunks of the rank.
        seed: of the run, for dropout.
        forms: how the linear layers of a layer multiply, by its number, where it is not as in the others.
        form: how those of the layer multiply whose modules are built.
        fp8_counts: of numbers that FP8 loses; None: nothing asks for them.
        taken: names that modules have asked for.
    """

    model: ModelConfig
    recompute: RecomputeConfig
    num_offloaded: int
    kernels: Kernels
    region: TensorParallelRegion
    mixing: Callable[..., Mixer]
    experts: ExpertRegion | None
    dtype: torch.dtype
    seed: int
    parameters: Mapping[str, ShardedParameter]
    queue: WeightGradQueue
    saved: SavedTensors
    forms: Mapping[int, LinearForm] = field(default_factory=dict)
    form: LinearForm = IN_RUN_DTYPE
    fp8_counts: Fp8Counts | None = None
    taken: set[str] = field(default_factory=set)

    def of_layer(self, layer: int) -> "BuildContext":
        """Return the environment of one layer's modules."""
        return replace(self, form=self.forms.get(layer, self.form))

    def form_behind_norm(self, *parts: str) -> LinearForm:
        """Return the form of a layer that alone reads a norm's output; `parts` that are recomputed need its input too."""
        return self.form.alone("norm", *parts) if self.model.norms_before else self.form

    def mixer(self, name: str, kind: LayerKind, made: Made = as_they_are) -> Mixer:
        """Build the mixer of a layer's attention; `made` makes keys and values of what a token gives to a row."""
        model, tp = self.model, self.region.axis
        return self.mixing(
            name=name,
            kernels=self.kernels,
            saved=self.saved,
            first_head=cut(model.num_attention_heads, tp.size, tp.index)[0],
            scale=softmax_scale(model, kind),
            softcap=model.attention_softcap,
            dropout=model.attention_dropout,
            sinks=self.optional_parameter(f"{name}.sinks"),
            made=made,
        )

    def norm(self, name: str) -> Norm:
        """Build a norm over h, to which `model.residual_multiplier` times a branch may be added first."""
        kind, kernels = self.model.norm_kind, self.kernels
        weights = [self.parameter(f"{name}.{parameter}") for parameter in kind.parameters]
        return Norm(NormKernel(kind.name, self.model.norm_eps, kernels.fusion), weights, self.model.residual_multiplier)

    def hidden_dropout(self, site: str) -> HiddenDropout | None:
        """Build the dropout of hidden states at a site; None: the model has none."""
        model = self.model
        if not model.hidden_dropout:
            return None
        return HiddenDropout(model.hidden_dropout, site, self.region, self.kernels.fusion, model.residual_multiplier)

    def parameter(self, name: str) -> ShardedParameter:
        """Return the parameter that every model of this kind has."""
        self.taken.add(name)
        return self.parameters[name]

    def optional_parameter(self, name: str) -> ShardedParameter | None:
        """Return the parameter, or None where the model's specs lack it (a bias that is off)."""
        return self.parameter(name) if name in self.parameters else None

    def optional_parameters(self, *names: str) -> list[ShardedParameter]:
        """Return those of the named parameters that the model's specs have, in order."""
        return [self.parameter(name) for name in names if name in self.parameters]

    def require_all_taken(self) -> None:
        """Check that modules took every parameter of the chunk: one that none takes is misspelt in a module or in the specs.

        Raises:
            LookupError: some were left; they would get no gradient.
        """
        left = [name for name in self.parameters if name not in self.taken]
        if left:
            raise LookupError(
                f"no module took {', '.join(left)}, so these parameters would not be trained. "
                "Their names differ between models/specs.py and the modules of models/gpt."
            )


@dataclass(frozen=True, slots=True)
class Positions:
    """The positions of a microbatch's tokens, as the layers of a chunk read them.

    Attributes:
        tables: [2, s, b, 1, r] of `rope_tables` for each record of the chunk's layers that rotate.
        documents: of the rows; None: each row is one.
        part: of the rows that the microbatch has; None: all of them.
    """

    tables: Mapping[Rotary, torch.Tensor]
    documents: Documents | None
    part: SequencePart | None


class LayerInputs(NamedTuple):
    """The inputs of a chunk's layers besides hidden states."""

    positions: Positions
    keys: DropoutKeys
