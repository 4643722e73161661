"""Hold objects that a chunk's modules share, and build their norms and linear layers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import nn

from triaxis.engine.activations.saved_tensors import SavedTensors
from triaxis.engine.comm.collectives import Axis
from triaxis.engine.config.quantities.attention_pattern import softmax_scale
from triaxis.engine.config.schema.layer_kinds import LayerKind, Rotary
from triaxis.engine.config.schema.model import ModelConfig
from triaxis.engine.config.schema.recompute import RecomputeConfig
from triaxis.engine.context_parallel.mixer import Made, Mixer, as_they_are
from triaxis.engine.data.documents import Documents
from triaxis.engine.data.sequence_part import SequencePart
from triaxis.engine.errors import ModelError
from triaxis.engine.expert_parallel.region import ExpertRegion
from triaxis.engine.kernels.norms import NormKernel
from triaxis.engine.kernels.registry import Kernels
from triaxis.engine.layout.shard_spec import cut
from triaxis.engine.linear.layers import ColumnParallelLinear, RowParallelLinear
from triaxis.engine.linear.products import IN_RUN_DTYPE, LinearForm
from triaxis.engine.linear.weight_grads import WeightGradQueue
from triaxis.engine.tensor_parallel.dropout import DropoutKeys, DropoutSites
from triaxis.engine.tensor_parallel.mappings import TensorParallelRegion
from triaxis.engine.tensor_parallel.norm import Norm
from triaxis.engine.tensor_parallel.parameter import ShardedParameter
from triaxis.models.gpt.hidden_dropout import HiddenDropout
from triaxis.models.gpt.own_norm import OwnNorm

MOST_LISTED = 12
"""Maximum number of parameters that an error message lists."""


@dataclass(frozen=True, slots=True)
class BuildContext:
    """Everything that one model chunk's modules need to build themselves.

    Attributes:
        recompute: the parts that the backward recomputes; `auto` is already resolved.
        num_offloaded: number of layers per chunk whose saved tensors are moved to the host.
        cp: axis of the ranks that share a row's tokens; a part of an extension sends its own messages over it.
        mixing: function that builds a layer's mixer (`engine/context_parallel/mixer.py`).
        experts: expert routing and dispatch; None: the model has no experts.
        sites: dropout sites of the rank's chunks.
        parameters: this chunk's parameters by global name.
        queue: queue of the chunk's weight-gradient GEMMs.
        saved: policy for tensors that are saved for the backward; the rank's chunks share one.
        forms: layer number -> way to compute that layer's linear products, such as in FP8; other layers keep `form`.
        form: way to compute the products of linear layers that this context builds; `of_layer` replaces it from `forms`.
        head_tokens: tokens of a piece of the head; None: the head computes all logits at once.
        output_grad: gradient of each of the last stage's outputs, float64 [1 + D] on the device, which a step writes before its
            first forward; None: no forward reads it.
        taken: names of the parameters that modules have asked for.
    """

    model: ModelConfig
    recompute: RecomputeConfig
    num_offloaded: int
    kernels: Kernels
    region: TensorParallelRegion
    cp: Axis
    mixing: Callable[..., Mixer]
    experts: ExpertRegion | None
    dtype: torch.dtype
    sites: DropoutSites
    parameters: Mapping[str, ShardedParameter]
    queue: WeightGradQueue
    saved: SavedTensors
    forms: Mapping[int, LinearForm] = field(default_factory=dict)
    form: LinearForm = IN_RUN_DTYPE
    head_tokens: int | None = None
    output_grad: torch.Tensor | None = None
    taken: set[str] = field(default_factory=set)

    def of_layer(self, layer: int) -> "BuildContext":
        """Derive the context that builds one layer's modules. Its `form` is the layer's entry in `forms`, if any."""
        return replace(self, form=self.forms.get(layer, self.form))

    def form_behind_norm(self, *parts: str) -> LinearForm:
        """Return the product implementation (`LinearForm`) for a linear layer that alone reads a norm's output.

        Nothing else saves this output, unless the norm or one of `parts` is recomputed. If the model has no norms before
        attention and MLP, the result is the context's own `form`.
        """
        return self.form.alone("norm", *parts) if self.model.norms_before else self.form

    def mixer(self, name: str, kind: LayerKind, made: Made = as_they_are) -> Mixer:
        """Build a layer's mixer, which computes attention.

        `made` is a function from per-token rows, such as latents, to keys and values. By default, it returns the rows.
        """
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

    def norm(self, name: str) -> nn.Module:
        """Build a norm over h.

        Called with x and a branch, it returns y = x + `model.residual_multiplier` x branch, and norm(y).
        """
        kind, kernels, own = self.model.norm_kind, self.kernels, self.model.own.norm
        if own is not None:
            return OwnNorm(own(self, name), self.model.residual_multiplier)
        weights = [self.parameter(f"{name}.{parameter}") for parameter in kind.parameters]
        return Norm(NormKernel(kind.name, self.model.norm_eps, kernels.fusion), weights, self.model.residual_multiplier)

    def hidden_dropout(self, site: str) -> HiddenDropout | None:
        """Build the hidden-state dropout named `site`, or None if the model has none."""
        model = self.model
        if not model.hidden_dropout:
            return None
        return HiddenDropout(model.hidden_dropout, site, self.region, self.kernels.fusion, model.residual_multiplier)

    def column(self, *names: str) -> ColumnParallelLinear:
        """Build a column-parallel layer, x [s(/t), b, h] -> [s, b, rows/t].

        The layer reads `NAME.weight` [rows, h], and `NAME.bias` if listed. Several names build one layer with concatenated outputs.
        Every spec but the first must then set `fused_with_previous`.

        Raises:
            ModelError: the specs lack a weight, or do not cut it by rows (`tp_dim`).
        """
        weights = [self._cut_weight(name, by_rows=True) for name in names]
        biases = self.optional_parameters(*(f"{name}.bias" for name in names))
        return ColumnParallelLinear(weights, biases, self.region, self.queue, names[0], self.form)

    def row(self, name: str) -> RowParallelLinear:
        """Build a row-parallel layer, x [s, b, f/t] -> [s(/t), b, h].

        The layer reads `NAME.weight` [h, f], and `NAME.bias` if listed.

        Raises:
            ModelError: the specs lack the weight, or do not cut it by columns (`tp_dim`).
        """
        weight, bias = self._cut_weight(name, by_rows=False), self.optional_parameter(f"{name}.bias")
        return RowParallelLinear(weight, bias, self.region, self.queue, name, self.form)

    def _cut_weight(self, name: str, *, by_rows: bool) -> ShardedParameter:
        weight = self.parameter(f"{name}.weight")
        spec = weight.record.spec
        is_right = spec.tp_dim is not None and (spec.tp_dim < len(spec.shape) - 1 if by_rows else spec.tp_dim > 0)
        if not is_right:
            kind, wanted = ("column", "its rows: tp_dim=0") if by_rows else ("row", "its columns: tp_dim=1")
            raise ModelError(
                f"{spec.name} {list(spec.shape)} has tp_dim={spec.tp_dim} in its specs, and is the weight of a {kind}-parallel "
                f"layer, of which each tp rank has a part of {wanted}. Its products would have the wrong shape."
            )
        return weight

    def parameter(self, name: str) -> ShardedParameter:
        """Return one of the chunk's parameters, and record that a module took it.

        Raises:
            ModelError: the specs do not list it.
        """
        self.taken.add(name)
        if name not in self.parameters:
            part = f"{name.rpartition('.')[0]}."
            listed = [other for other in self.parameters if other.startswith(part)] or list(self.parameters)
            raise ModelError(
                f"a module asks for the parameter {name}, which no specs list: it would have no weights. Listed are "
                f"{', '.join(listed[:MOST_LISTED])}. Mend the name, or yield a ParamSpec of that name."
            )
        return self.parameters[name]

    def optional_parameter(self, name: str) -> ShardedParameter | None:
        """Return a parameter and record it as taken, or return None if the specs do not list it."""
        return self.parameter(name) if name in self.parameters else None

    def optional_parameters(self, *names: str) -> list[ShardedParameter]:
        """Return those of the named parameters that the specs list, in the given order, and record them as taken."""
        return [self.parameter(name) for name in names if name in self.parameters]

    def require_all_taken(self) -> None:
        """Check that modules took all the chunk's parameters.

        Raises:
            ModelError: some parameters were not taken. They would get no gradient; a name may be misspelt.
        """
        left = [name for name in self.parameters if name not in self.taken]
        if left:
            raise ModelError(
                f"no module took {', '.join(left)}, so these parameters would not be trained. "
                "Their names differ between the specs (models/specs.py, or those of an extension) and the modules."
            )


@dataclass(frozen=True, slots=True)
class Positions:
    """Token positions in a microbatch, as a chunk's layers read them.

    Attributes:
        tables: cosines and sines [2, s, b, 1, r] for each rotation in the chunk; r elements of a head rotate (`rope_tables`).
        documents: documents that limit attention; None: each token attends to every earlier token in its row.
        part: positions that this rank holds if context parallelism cuts the rows; None: the rows are whole.
    """

    tables: Mapping[Rotary, torch.Tensor]
    documents: Documents | None
    part: SequencePart | None


class LayerInputs(NamedTuple):
    """Positions and dropout keys, which a chunk's layers read besides hidden states."""

    positions: Positions
    keys: DropoutKeys
