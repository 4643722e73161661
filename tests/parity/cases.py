"""The layouts of the parity tests, and the runs whose results are compared.

Gradients are read where the optimizer reads them, from the owned parts of the reduced main grads.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from tests.oracle import OracleLosses, oracle_losses, oracle_weights
from tests.parity.models import DOCUMENTS, MODELS
from triaxis.engine.checkpoint.shards import having
from triaxis.engine.comm.topology import Topology
from triaxis.engine.config.quantities.plan import parallel_sizes
from triaxis.engine.config.tree import Config
from triaxis.engine.context_parallel.cut import ContextCut
from triaxis.engine.data.loader import Batches
from triaxis.engine.data.synthetic import SyntheticDataset
from triaxis.engine.layout.rank_grid import RankGrid
from triaxis.engine.layout.shard_spec import Box
from triaxis.engine.step import Engine
from triaxis.engine.telemetry.timing.marks import TimeMarks
from triaxis.engine.tensor_parallel.parameter import ShardedParameter
from triaxis.engine.train import build
from triaxis.models.gpt.chunk import build_chunks
from triaxis.models.predict.rank_memory import resolve_recompute
from triaxis.models.specs import model_specs

GROUPS: list[dict[str, Any]] = [
    {"match": "embedding.*", "weight_decay": 0.0},
    {"match": "layers.[0-1].*.weight", "lr_factor": 0.25},
    {"match": "*norm.weight", "lr_factor": 2.0, "weight_decay": 0.3},
]
"""The first match wins where there are several: norms of the first layers do not decay."""


def _words(value: object) -> str:
    return "+".join(map(str, value)) if isinstance(value, tuple) else str(value)


@dataclass(frozen=True)
class Case:
    """One model in one layout."""

    model: str
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    dp: int = 1
    sequence_parallel: bool = False
    schedule: str = "auto"
    """A name, or a file beside this one."""
    global_batch_size: int = 8
    micro_batch_size: int = 1
    recompute: tuple[str, str, int] = ("none", "uniform", 1)
    modules: tuple[str, ...] | None = None
    """Parts of a layer that are recomputed."""
    offload: int = 0
    """Layers of each chunk whose activations are moved to host memory."""
    num_layers: int | None = None
    """Another depth than the model's."""
    layers_per_stage: tuple[int, ...] | str | None = None
    """Or "auto"."""
    dtype: str = "float64"
    bucket_bytes: int = 4096
    device: str = "cpu"
    attention: str | None = None
    """A kernel; None: the one that the model needs, else `auto`."""
    head_tokens: int | str | None = "auto"
    """Tokens whose logits exist at a time."""
    gathered_inputs: str = "auto"
    narrow: bool = False
    """Masters split and moments in bf16."""
    bf16_gradients: bool = False
    compiled: bool = False
    """Elementwise functions and the optimizer by inductor."""
    compiled_update: bool = False
    """The optimizer alone."""
    optimizer: str = "adamw"
    """`extension`: AdamW as the rule of one."""
    groups: bool = False
    """Parameters are in `GROUPS`."""
    ema: float | None = None
    """Decay of the moving average; None: there is none."""
    frozen: tuple[str, ...] = ()
    """Patterns of parameters that keep their values."""
    fp8: str | None = None
    """A recipe of FP8, emulated, with a format behind a dash; None: there is none."""
    apex: bool = False
    """The update is FusedAdam's."""
    linear: str = "torch"
    """The GEMMs of linear layers."""
    fp8_gather: bool = False
    """Sequence parallelism gathers in FP8."""
    """Each step counts the numbers that FP8 loses."""
    documents: bool = False
    """Samples are documents of some three tokens that do not see each other, with positions of their own."""
    staged: bool = False
    """Carry what is sent through other memory (`triaxis.engine.comm.staging`); on GPUs, over gloo, ranks share those that
    there are."""
    cp: int = 1
    """Ranks that share each sample."""
    cp_method: str = "auto"
    gathered_kv: str = "auto"
    cp_gradients: str = "run"
    zero: int = 1
    dp_replicas: int = 1
    offload_state: bool = False
    """What dp x cp ranks share: the optimizer's state, from 2 on main grads too."""
    ep: int = 1
    """Ranks over which experts are cut, and the width of each."""
    etp: int = 1
    dispatch: str = "auto"
    experts: str = "auto"
    backend: str | None = None
    """Of the groups, by its name; None: that of the device."""

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    def __str__(self) -> str:
        """Name the model, and each field that is not as usual."""
        values = {field.name: getattr(self, field.name) for field in fields(self)[1:]}
        unusual = [name for name, value in values.items() if value != getattr(type(self), name)]
        return "-".join([self.model, *(f"{name}={_words(values[name])}" for name in unusual)])

    @property
    def _fp8(self) -> dict[str, Any]:
        recipe, _, form = str(self.fp8).partition("-")
        gather = "fp8" if self.fp8_gather else "bf16"
        return {"recipe": recipe, "format": form or "auto", "backend": "emulated", "gather": gather}

    def device_of(self, rank: int) -> torch.device:
        if self.device != "cuda":
            return torch.device(self.device)
        return torch.device("cuda", rank % torch.cuda.device_count() if self.staged else rank)

    def config(self) -> Config:
        granularity, method, num_layers = self.recompute
        model = MODELS[self.model] | ({"num_layers": self.num_layers} if self.num_layers else {})
        if self.optimizer == "extension":
            model = model | {"extension": str(Path(__file__).with_name("own_rule.py"))}
        return Config.model_validate(
            {
                "model": model,
                "data": {"synthetic": True, **(DOCUMENTS if self.documents else {})},
                "train": {
                    "steps": 5,
                    "global_batch_size": self.global_batch_size,
                    "micro_batch_size": self.micro_batch_size,
                    "seed": 7,
                },
                "parallel": {
                    "tp": self.tp,
                    "pp": self.pp,
                    "vpp": self.vpp,
                    "dp": self.dp,
                    "cp": self.cp,
                    "zero": self.zero,
                    "dp_replicas": self.dp_replicas,
                    "ep": self.ep,
                    "etp": self.etp,
                    "cp_method": self.cp_method,
                    "cp_gradients": self.cp_gradients,
                    "sequence_parallel": self.sequence_parallel,
                    "layers_per_stage": self.layers_per_stage,
                },
                "optimizer": {
                    "name": self.optimizer,
                    "lr": 1e-2,
                    "clip_grad": 0.5,
                    "bucket_bytes": self.bucket_bytes,
                    "offload": "cpu" if self.offload_state else "none",
                    "warmup_steps": 2,
                    "groups": [
                        *({"match": pattern, "freeze": True} for pattern in self.frozen),
                        *(GROUPS if self.groups else []),
                    ],
                    "ema": None if self.ema is None else {"decay": self.ema},
                },
                "schedule": {"file": str(Path(__file__).with_name(self.schedule))}
                if self.schedule.endswith(".txt")
                else {"name": self.schedule},
                "precision": {"dtype": self.dtype, "gradients": "bf16" if self.bf16_gradients else "full"}
                | ({"fp8": self._fp8} if self.fp8 else {})
                | ({"masters": "split", "moments": "bf16"} if self.narrow else {}),
                "recompute": {
                    "granularity": granularity,
                    "method": method,
                    "num_layers": num_layers,
                    "modules": self.modules,
                    "head_tokens": self.head_tokens,
                    "gathered_inputs": self.gathered_inputs,
                    "gathered_kv": self.gathered_kv,
                },
                # Everything is moved, however small.
                "offload": {"num_layers": self.offload, "min_bytes": 1},
                "kernels": {"attention": self.attention or ("explicit" if model.get("attention_dropout") else "auto")}
                | ({"elementwise": "compiled"} if self.compiled else {})
                | ({"optimizer": "compiled"} if self.compiled or self.compiled_update else {})
                | ({"optimizer": "apex"} if self.apex else {})
                | {"dispatch": self.dispatch, "experts": self.experts, "linear": self.linear},
            }
        )


def dataset(config: Config) -> SyntheticDataset:
    return SyntheticDataset(
        11,
        config.model.vocab_size,
        config.model.seq_length,
        mask_fraction=0.3,
        mean_document_length=config.data.synthetic_document_length,
        count_document_starts=config.data.count_document_starts,
    )


def weights_of(model: str, num_layers: int | None = None) -> dict[str, torch.Tensor]:
    """Float64 weights off the initial point, by name."""
    specs = model_specs(Case(model, num_layers=num_layers).config().model)
    return oracle_weights({spec.name: spec.shape for spec in specs}, seed=5)


@dataclass
class Piece:
    """Elements [start, stop) of the row-major box of one parameter, as one rank holds them."""

    name: str
    box: Box
    start: int
    stop: int
    values: torch.Tensor


def assemble(
    shapes: Mapping[str, tuple[int, ...]], pieces: Sequence[Piece], tolerance: float
) -> dict[str, torch.Tensor]:
    """Whole tensors from all ranks' pieces; pieces that overlap (replicas) must agree, and nothing may be missing."""
    dtype = pieces[0].values.dtype
    whole = {name: torch.full(shape, torch.nan, dtype=dtype).flatten() for name, shape in shapes.items()}
    for piece in pieces:
        numbers = torch.arange(whole[piece.name].numel()).view(shapes[piece.name])
        where = numbers[tuple(slice(*bounds) for bounds in piece.box)].flatten()[piece.start : piece.stop]
        old = whole[piece.name][where]
        known = ~old.isnan()
        difference = (old[known] - piece.values[known]).abs().max() if known.any() else torch.tensor(0.0)
        assert difference <= tolerance, f"{piece.name}: replicas differ by {difference}"
        whole[piece.name][where] = piece.values
    for name, tensor in whole.items():
        assert not tensor.isnan().any(), f"{name}: {int(tensor.isnan().sum())} elements are held by no rank"
    return {name: tensor.view(shapes[name]) for name, tensor in whole.items()}


def load_weights(engine: Engine, weights: Mapping[str, torch.Tensor]) -> None:
    """Put whole tensors into the engine's parameters and masters."""

    def write(parameters: Sequence[ShardedParameter]) -> None:
        for parameter in parameters:
            record = parameter.record
            box = weights[record.name][tuple(slice(*bounds) for bounds in record.box)].reshape(-1)
            parameter.value.data.view(-1)[: record.box_numel] = box.to(parameter.value.device, parameter.value.dtype)

    engine.buffers.write(engine.parameters, write)
    for owned in engine.optimizer.owned:
        owned.state.write({"master": owned.parameters.to(owned.state.wide)})
        owned.state.restart_average()


def owned_pieces(engine: Engine, which: str) -> list[Piece]:
    """`grads`, or a kind of state, of everything that this rank owns."""
    pieces = []
    for owned in engine.optimizer.trained if which == "grads" else having(engine.optimizer.owned, which):
        values = owned.grads if which == "grads" else owned.state.read(which)
        for segment in owned.segments:
            start = segment.offset - owned.bucket.owned[0]
            part = values[start : start + segment.stop - segment.start].cpu().clone()
            pieces.append(Piece(segment.record.name, segment.record.box, segment.start, segment.stop, part))
    return pieces


@dataclass
class RankResult:
    """Results of one rank: its loss sum, the tokens of all ranks, gradients and losses ahead of the first step; loss, norm by step;
    last masters."""

    loss_sum: float
    num_tokens: int
    grads: list[Piece]
    steps: list[tuple[float, float]]
    masters: list[Piece]
    ahead: tuple[float, ...] = ()


def build_rank(rank: int, case: Case, marks: Sequence[TimeMarks] = ()) -> tuple[Engine, Batches]:
    """One rank of a layout, with the weights that its seed gives, and its part of the batches; `marks` follow it."""
    config = case.config()
    grid = RankGrid(parallel_sizes(config))
    topology = Topology(
        grid,
        rank,
        case.device_of(rank),
        kv_heads=config.model.kv_heads,
        has_experts=config.model.has_experts,
        staged=case.staged,
    )
    engine = build(
        resolve_recompute(config, topology.sizes),
        topology.observed(marks),
        build_chunks,
        observers=[each.instruction for each in marks],
    )
    batches = Batches(
        dataset(config),
        global_batch_size=case.global_batch_size,
        micro_batch_size=case.micro_batch_size,
        dp=case.dp,
        dp_rank=topology.coordinates.dp,
        consumed_samples=0,
        device=topology.device,
        attention=config.data.attention,
        positions=config.data.positions,
        num_ahead=config.model.num_mtp_layers,
        cut=ContextCut.of(config, grid.sizes, topology.coordinates.cp),
    )
    return engine, batches


def run_case(rank: int, case: Case, weights: Mapping[str, torch.Tensor], num_steps: int) -> RankResult:
    """One rank of a layout: gradients of the first global batch, and `num_steps` updates, the first with them."""
    engine, batches = build_rank(rank, case)
    load_weights(engine, {name: weight.detach() for name, weight in weights.items()})
    losses = engine.forward_backward(batches.next_step())
    loss_sum, num_tokens = float(losses.sums[0]), float(losses.labels[0])
    grads = owned_pieces(engine, "grads")
    steps, ahead = [], ()
    for step in range(num_steps):
        if step > 0:
            losses = engine.forward_backward(batches.next_step())
        result = engine.update(losses, lr=1e-2 / (step + 1)).wait()
        steps.append((result.loss, result.grad_norm))
        ahead = ahead or result.ahead
    batches.close()
    engine.buffers.wait_all()
    return RankResult(loss_sum, num_tokens, grads, steps, owned_pieces(engine, "master"), ahead)


def is_decayed(name: str) -> bool:
    """Decide by the documented rule of `optimizer.weight_decay`: matrices decay, norms and biases do not.

    The rule reads the name alone. The engine's own specs are what the parity tests check.
    """
    *_, part, kind = name.split(".")
    return kind == "weight" and not part.endswith("norm")


def is_trained(name: str, case: Case | None = None) -> bool:
    """Decide by name whether a parameter has a gradient: the bias of a router's choice has none, and what the case freezes."""
    frozen = () if case is None else case.frozen
    return not name.endswith("router.bias") and not any(fnmatchcase(name, pattern) for pattern in frozen)


@dataclass
class OracleResult:
    loss: float
    grads: dict[str, torch.Tensor]
    steps: list[tuple[float, float]]
    weights: dict[str, torch.Tensor]
    ahead: tuple[float, ...]


def trained_loss(config: Config, found: OracleLosses, tokens: int, nominal: int) -> torch.Tensor:
    """The loss whose gradient is trained, by the documented formula: each part over a divisor of its own.

    The next tokens over their counted labels, each token ahead over its own x s / (s - k), the routers' losses over all tokens.
    """
    total, s = found.of_next / tokens + found.on_load / nominal, config.model.seq_length
    for k, (summed, count) in enumerate(found.ahead, start=1):
        assert config.model.mtp is not None
        mean = summed / max(count, 1) * (s - k) / s
        total = total + config.model.mtp.loss_weight / config.model.mtp.num_layers * mean
    return total


def run_oracle(
    case: Case,
    weights: Mapping[str, torch.Tensor],
    num_steps: int,
    on_step: Callable[[Mapping[str, torch.Tensor]], None] = lambda weights: None,
) -> OracleResult:
    """Train on the same batches with the oracle and torch's own optimizer and clipping; `on_step` reads each step's weights."""
    config = case.config()
    weights = {name: weight.detach().clone().requires_grad_(is_trained(name, case)) for name, weight in weights.items()}
    batches = Batches(
        dataset(config),
        global_batch_size=case.global_batch_size,
        micro_batch_size=case.global_batch_size,
        dp=1,
        dp_rank=0,
        consumed_samples=0,
        device="cpu",
        attention=config.data.attention,
        positions=config.data.positions,
    )
    asked = config.optimizer
    groups = []
    for name in (name for name, weight in weights.items() if weight.requires_grad):
        fields = next((one for one in GROUPS if case.groups and fnmatchcase(name, one["match"])), {})
        decay = fields.get("weight_decay", asked.weight_decay * is_decayed(name))
        groups.append({"params": [weights[name]], "weight_decay": decay, "factor": fields.get("lr_factor", 1.0)})
    optimizer = (
        torch.optim.SGD(groups, momentum=asked.momentum)
        if asked.name == "sgd"
        else torch.optim.AdamW(groups, betas=(asked.beta1, asked.beta2), eps=asked.eps)
    )
    nominal = case.global_batch_size * config.model.seq_length
    grads: dict[str, torch.Tensor] = {}
    first_loss, first_ahead = 0.0, ()
    steps = []
    for step in range(max(num_steps, 1)):
        (batch,) = batches.next_step()
        load: dict[int, torch.Tensor] = {}
        found = oracle_losses(
            config.model,
            weights,
            batch.tokens,
            batch.labels,
            batch.loss_mask,
            batch.position_ids,
            batch.sample_ids,
            seed=config.train.seed,
            documents=None if batch.documents is None else batch.documents.numbers,
            load=load,
        )
        tokens = int(batch.loss_mask.sum())
        optimizer.zero_grad()
        trained_loss(config, found, tokens, nominal).backward()
        loss = float(found.of_next.detach()) / tokens
        if step == 0:
            first_loss = loss
            first_ahead = tuple(float(total.detach()) / max(count, 1) for total, count in found.ahead)
            grads = {name: weight.grad.clone() for name, weight in weights.items() if weight.grad is not None}
        trained = [weight for weight in weights.values() if weight.requires_grad]
        norm = torch.nn.utils.clip_grad_norm_(trained, config.optimizer.clip_grad or torch.inf)
        steps.append((loss, float(norm)))
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (step + 1) * group["factor"]
        optimizer.step()
        for layer, counts in load.items():
            bias = weights.get(f"layers.{layer}.mlp.router.bias")
            frozen = any(fnmatchcase(f"layers.{layer}.mlp.router.bias", pattern) for pattern in case.frozen)
            if bias is not None and config.model.moe is not None and not frozen:
                bias += config.model.moe.balance.bias_rate * torch.sign(counts.double().mean() - counts)
        with torch.no_grad():
            on_step(weights)
    batches.close()
    final = {name: weight.detach() for name, weight in weights.items()}
    return OracleResult(first_loss, grads, steps, final, first_ahead)
