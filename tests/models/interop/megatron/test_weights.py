"""Checkpoints of Megatron-Core become ours and the reverse: the same model, the same next updates, the same bits.

Megatron-Core itself writes and reads them here (`tests/megatron.py`).
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import run_ranks
from triaxis.engine.checkpoint.directory import find
from triaxis.engine.checkpoint.format.manifest import LossScaleRecord, TrainingState
from triaxis.engine.checkpoint.import_weights import read_tensor, write_checkpoint
from triaxis.engine.checkpoint.shards import restore
from triaxis.engine.comm.topology import Topology
from triaxis.engine.config.schema.loss_scale import LossScaleConfig
from triaxis.engine.config.schema.model import ModelConfig
from triaxis.engine.config.tree import Config
from triaxis.engine.data.loader import MicroBatch
from triaxis.engine.errors import CheckpointError
from triaxis.engine.layout.rank_grid import ParallelSizes, RankGrid
from triaxis.engine.optimizer.loss_scale import LossScale, ScaleState
from triaxis.engine.train import build
from triaxis.models.gpt.chunk import build_chunks
from triaxis.models.interop.megatron import weights as megatron
from triaxis.models.interop.megatron import writer as megatron_writer
from triaxis.models.interop.megatron.config import megatron_args, model_section
from triaxis.models.interop.megatron.files import open_checkpoint
from triaxis.models.interop.megatron.state import common_state, training_args, training_state
from triaxis.models.interop.megatron.weights import TRAINING, WEIGHTS, check, check_optimizer, import_shards
from triaxis.models.predict.rank_memory import resolve_recompute

pytestmark = pytest.mark.distributed

RESHARDABLE = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
LR = 1e-2
SCALE = LossScaleRecord(scale=512.0, updates=5, hysteresis=1)
"""The loss scale of exported runs; that of an imported one is what Megatron-Core's own updates have left."""
EXPORTED = ("gpt", "llama", "ahead")
"""Models that Megatron-Core loads again."""


@dataclass
class Trained:
    """The outputs of a model: its logits on one batch, then the losses of two further updates on two others.

    Attributes:
        ahead: the losses of tokens ahead, added up over these updates.
    """

    logits: torch.Tensor
    losses: tuple[float, float, float]
    ahead: tuple[float, ...] = ()


# Ranks of Megatron-Core ------------------------------------------------------------------------------------------------


def train_and_save(rank: int, folder: Path) -> dict[str, Trained]:
    """Every model after two updates, each in a folder of its name; then what it says and how it goes on."""
    from tests import megatron as their

    said = {}
    with their.patched():
        for name, fields in their.MODELS.items():
            model = ModelConfig(**fields)
            gpt = their.build(model)
            their.fill(dict(gpt.named_parameters()))
            wrapped, optimizer = their.optimizer_of(gpt)
            for seed in (1, 2):
                their.step(wrapped, optimizer, model, seed)
            their.save(folder / name, their.state_dict(gpt, optimizer, model, RESHARDABLE))
            said[name] = go_on(wrapped, optimizer, model)
        save_variants(folder)
    return said


def go_on(wrapped: Any, optimizer: Any, model: ModelConfig) -> Trained:
    from tests import megatron as their

    with torch.no_grad(), their.next_token_alone(wrapped.module):
        logits = their.logits(wrapped.module, their.tokens_of(model, 3)[:, :-1])[..., : model.vocab_size]
    their.losses_ahead()
    losses = tuple(their.step(wrapped, optimizer, model, seed) for seed in (3, 4, 5))
    return Trained(logits, losses, their.losses_ahead())


def save_variants(folder: Path) -> None:
    """One model in the other ways in which it may be stored."""
    from tests import megatron as their

    model = ModelConfig(**their.MODELS["llama"])
    gpt = their.build(model, dtype=torch.bfloat16)
    their.fill(dict(gpt.named_parameters()))
    for name, metadata in {
        "plain": {},
        "numbered": {"non_homogeneous_layers": True},
        "halves": {"singleton_local_shards": True},
    }.items():
        their.save(folder / name, their.state_dict(gpt, None, model, metadata))
    wrapped, optimizer = their.optimizer_of(gpt)
    their.step(wrapped, optimizer, model, 1)
    their.save(folder / "bf16", their.state_dict(gpt, optimizer, model, RESHARDABLE, bf16=True))
    (inner,) = optimizer.chained_optimizers
    inner.grad_scaler = their.grad_scaler()
    for overflows in their.OVERFLOWS:
        inner.grad_scaler.update(overflows)
    their.save(folder / "fp16", their.state_dict(gpt, optimizer, model, RESHARDABLE, fp16=True))
    scales = []
    for overflows in their.NEXT_OVERFLOWS:
        inner.grad_scaler.update(overflows)
        scales.append(float(inner.grad_scaler.scale))
    torch.save(scales, folder / "scales.pt")
    inner.grad_scaler = None
    buckets = {"distrib_optim_sharding_type": "dp_reshardable", "chained_optim_avoid_prefix": True}
    their.save(folder / "buckets", their.state_dict(gpt, optimizer, model, buckets))


def load(
    rank: int, loads: list[tuple[str, Path, Path | None]], tp: int, pp: int
) -> list[tuple[dict[str, torch.Tensor], Trained | None, dict[str, Any]]]:
    """Per (model, folder, where to save again): every tensor that this rank loads, how one rank alone goes on, and the state
    of the loss scale that it loads."""
    from tests import megatron as their

    results = []
    with their.patched(tp, pp):
        for name, folder, resaved in loads:
            model = ModelConfig(**their.MODELS[name])
            wrapped, optimizer = their.optimizer_of(their.build(model))
            (inner,) = optimizer.chained_optimizers
            inner.grad_scaler = their.grad_scaler()
            tensors = their.load(folder, wrapped.module, their.expecting(optimizer), RESHARDABLE)
            scaler, inner.grad_scaler = inner.grad_scaler.state_dict(), None
            if resaved is not None:
                their.save(resaved, their.state_dict(wrapped.module, optimizer, model, RESHARDABLE))
            scaler["scale"] = scaler["scale"].tolist()
            results.append((tensors, go_on(wrapped, optimizer, model) if tp == pp == 1 else None, scaler))
    return results


# Ranks of ours ---------------------------------------------------------------------------------------------------------


def config_of(model: ModelConfig, dtype: str = "fp32") -> Config:
    train = {"steps": 100, "global_batch_size": 2, "micro_batch_size": 2}
    optimizer = {"lr": LR, "weight_decay": 0.1, "beta2": 0.95, "clip_grad": 1.0}
    tree = {"model": model, "train": train, "optimizer": optimizer, "precision": {"dtype": dtype}}
    return Config.model_validate({**tree, "model": model.model_dump()})


def ours(rank: int, folder: Path, model: ModelConfig) -> Trained:
    """What our model says and how it goes on, from a checkpoint of ours."""
    from tests.megatron import tokens_of

    topology = Topology(RankGrid(ParallelSizes()), rank, torch.device("cpu"), kv_heads=model.kv_heads)
    engine = build(resolve_recompute(config_of(model), topology.sizes), topology, build_chunks)
    restore(engine, find(folder), "all")

    def batch(seed: int) -> MicroBatch:
        tokens = tokens_of(model, seed)
        positions = torch.arange(model.seq_length).expand(2, -1)
        mask, distances = torch.ones(2, model.seq_length, dtype=torch.bool), range(1, model.num_mtp_layers + 1)
        batch = MicroBatch(tokens[:, :-1], tokens[:, 1:], mask, positions, [0, 1], mask.numel())
        if not distances:
            return batch
        masks = torch.stack([positions < model.seq_length - distance for distance in distances])
        ahead = torch.stack([tokens[:, 1:].roll(-distance, 1) for distance in distances])
        counts = tuple(masks.sum((1, 2)).tolist())
        return replace(batch, ahead=ahead * masks, mask_ahead=masks, num_ahead=counts)

    with torch.no_grad():
        logits = engine.chunks[0].logits(None, batch(3)).transpose(0, 1)[..., : model.vocab_size]
    steps = [engine.train_step([batch(seed)], LR) for seed in (3, 4, 5)]
    ahead = tuple(map(sum, zip(*(step.ahead for step in steps), strict=True)))
    return Trained(logits, tuple(step.loss for step in steps), ahead)


# The checkpoints -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Trained]]:
    folder = tmp_path_factory.mktemp("megatron")
    return folder, run_ranks(train_and_save, 1, folder, timeout_seconds=240)[0]


def model_of(name: str) -> ModelConfig:
    from tests.megatron import MODELS

    return ModelConfig(**MODELS[name])


def bring(source: Path, out: Path, model: ModelConfig, *, has_moments: bool = True) -> Path:
    """Import; returns the checkpoint of ours."""
    opened = open_checkpoint(source)
    prefixes = TRAINING if has_moments else WEIGHTS
    check(opened, model, prefixes)
    return write_checkpoint(
        out,
        import_shards(opened, model, prefixes),
        training_state(opened) if has_moments else TrainingState.at_start(),
        config=config_of(model).model_dump(mode="json"),
        source="a test",
        has_moments=has_moments,
    )


def take(source: Path, out: Path, model: ModelConfig) -> Path:
    """Export, weights and optimizer."""
    candidate = find(source)
    state, config = candidate.manifest.state.model_copy(update={"loss_scale": SCALE}), config_of(model)
    return megatron_writer.write_checkpoint(
        out,
        state.step,
        megatron.export_chunks(
            lambda name, kind: read_tensor(candidate.folder, candidate.manifest, name, kind),
            model,
            dtype=None,
            has_moments=True,
        ),
        megatron.empty_objects(model),
        common_state(state, config),
        megatron_args(model) | training_args(state, config),
    )


def fingerprint(folder: Path) -> dict[str, str]:
    return dict(find(folder).manifest.fingerprint)


# Import ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt", "llama", "qwen", "gpt_tanh", "kinds", "sinks", "ahead"])
def test_an_imported_run_goes_on_as_megatrons_does(saved, tmp_path, name):
    """Logits, and the losses of the next updates, which depend on both moments, Adam's step and what is decayed."""
    folder, said = saved
    bring(folder / name, tmp_path, model_of(name))
    (mine,) = run_ranks(ours, 1, tmp_path, model_of(name))
    torch.testing.assert_close(mine.logits, said[name].logits, rtol=1e-5, atol=2e-6)
    assert mine.losses == pytest.approx(said[name].losses, rel=2e-6)
    assert mine.ahead == pytest.approx(said[name].ahead, rel=2e-6) and len(mine.ahead) == model_of(name).num_mtp_layers
    assert len({round(loss, 3) for loss in mine.losses}) == 3, "the updates must matter"


def test_where_the_run_stands_is_imported(saved):
    state = training_state(open_checkpoint(saved[0] / "gpt"))
    assert (state.step, state.consumed_samples, state.consumed_tokens, state.num_updates) == (3, 24, 288, 2)
    assert state.lr == LR


def test_arguments_of_tokens_ahead_are_imported(saved):
    section = model_section(open_checkpoint(saved[0] / "ahead").args, None, "args")
    assert section["mtp"] == model_of("ahead").mtp.model_dump() == {"num_layers": 2, "loss_weight": 0.7}


def test_the_master_of_a_bf16_run_is_its_fp32_weight(saved, tmp_path):
    folder, _ = saved
    bring(folder / "bf16", tmp_path, model_of("llama"))
    candidate = find(tmp_path)
    master = read_tensor(candidate.folder, candidate.manifest, "layers.1.mlp.down.weight")
    stored = open_checkpoint(folder / "bf16").read("decoder.layers.mlp.linear_fc2.weight")[1]
    assert (master.dtype, stored.dtype) == (torch.get_default_dtype(), torch.bfloat16)
    assert not torch.equal(master, stored.to(master.dtype)), "an update smaller than bf16 can say is lost"
    assert torch.equal(master.to(torch.bfloat16), stored)


def test_the_loss_scale_of_an_fp16_run_goes_on_as_megatrons_does(saved, tmp_path):
    from tests.megatron import NEXT_OVERFLOWS, OVERFLOWS, SCALER

    record = training_state(open_checkpoint(saved[0] / "fp16")).loss_scale
    assert record is not None
    # Three overflows at hysteresis 2 halve twice; the tracker is below zero by then.
    assert record == LossScaleRecord(scale=1024.0, updates=1, hysteresis=0) and OVERFLOWS.count(True) == 3
    config = LossScaleConfig(initial=1.0, window=SCALER["growth_interval"], hysteresis=2, minimum=SCALER["min_scale"])
    scale = LossScale(config, torch.device("cpu"))
    scale.restore(ScaleState(**record.model_dump()))
    scales = []
    for overflows in NEXT_OVERFLOWS:
        scale.update(torch.tensor(overflows), torch.tensor(False))
        scales.append(float(scale.scale))
    assert scales == [1024.0, 2048.0, 2048.0, 1024.0, 512.0]
    assert torch.load(saved[0] / "scales.pt") == scales, "those of DynamicGradScaler"
    assert training_state(open_checkpoint(saved[0] / "bf16")).loss_scale is None


@pytest.mark.parametrize("name", ["numbered", "halves"])
def test_layers_and_halves_may_stand_in_tensors_of_their_own(saved, tmp_path, name):
    folder, _ = saved
    opened = open_checkpoint(folder / name)
    assert "decoder.layers.2.self_attention.linear_qkv.weight" in opened.tensors
    assert ("decoder.layers.2.mlp.linear_fc1.weight_v" in opened.tensors) == (name == "halves")
    for source in ("plain", name):
        bring(folder / source, tmp_path / source, model_of("llama"), has_moments=False)
    assert fingerprint(tmp_path / name) == fingerprint(tmp_path / "plain")


def renamed(source: Path, out: Path, change: Any) -> Path:
    """The same checkpoint with other keys or shapes: `change(key, tensor)` gives what to write in place of one."""
    opened = open_checkpoint(source)
    chunks = []
    for old in opened.tensors:
        key, tensor = change(old, opened.read(old))
        chunks.append(megatron_writer.OutgoingChunk(key, tuple(tensor.shape), (0,) * tensor.ndim, tensor))
    common = {key: value for key, value in opened.common.items() if key != "args"}
    return megatron_writer.write_checkpoint(
        out, 3, chunks, [], common, {"seq_length": 12, "consumed_train_samples": 24}
    )


def test_norms_may_stand_beside_the_linear_layers(saved, tmp_path):
    """As versions wrote them that had no fused norm: input_layernorm, pre_mlp_layernorm."""
    folder, _ = saved

    def apart(key: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
        for fused, plain in (("self_attention.linear_qkv", "input"), ("mlp.linear_fc1", "pre_mlp")):
            key = key.replace(f"{fused}.layer_norm_", f"{plain}_layernorm.")
        return key, tensor

    renamed(folder / "gpt", tmp_path / "apart", apart)
    assert "decoder.layers.input_layernorm.bias" in open_checkpoint(tmp_path / "apart").tensors
    for source in (folder / "gpt", tmp_path / "apart"):
        bring(source, tmp_path / "ours" / source.name, model_of("gpt"))
    assert fingerprint(tmp_path / "ours" / "apart") == fingerprint(tmp_path / "ours" / "gpt")


def test_the_optimizer_state_of_old_versions_is_flattened(saved, tmp_path):
    """fully_sharded_model_space of tp=2: [cuts of each dim, elements of a part], which Megatron-Core 0.16 no longer writes."""
    folder, _ = saved
    cuts_of = {"linear_qkv.weight": 0, "linear_fc1.weight": 0, "word_embeddings": 0, "output_layer": 0}
    cuts_of |= {"linear_proj.weight": 1, "linear_fc2.weight": 1}

    def flattened(key: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
        if not key.startswith("optimizer."):
            return key, tensor
        key = key.replace(".param.", ".fp32_param.")
        dim = next((dim for word, dim in cuts_of.items() if word in key), None)
        lead = 1 if ".layers." in key else 0
        cuts = [1] * tensor.ndim
        cuts[:lead] = tensor.shape[:lead]
        if dim is not None:
            # Gate and up are cut apart, so that each half has two parts.
            cuts[lead + dim] = 4 if "linear_fc1" in key else 2
        split = tensor.view(
            [size for pair in zip(cuts, tensor.shape, strict=True) for size in (pair[0], pair[1] // pair[0])]
        )
        order = [*range(0, 2 * tensor.ndim, 2), *range(1, 2 * tensor.ndim, 2)]
        return key, split.permute(order).reshape(*cuts, -1)

    renamed(folder / "llama", tmp_path / "flat", flattened)
    stored = open_checkpoint(tmp_path / "flat").tensors[
        "optimizer.state.exp_avg.decoder.layers.self_attention.linear_proj.weight"
    ]
    assert stored.shape == (4, 1, 2, 64 * 32)
    for source in (folder / "llama", tmp_path / "flat"):
        bring(source, tmp_path / "ours" / source.name, model_of("llama"))
    assert fingerprint(tmp_path / "ours" / "flat") == fingerprint(tmp_path / "ours" / "llama")


# Export ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exported(saved, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Imported and exported again, by name."""
    folder, out = saved[0], tmp_path_factory.mktemp("exported")
    for name in EXPORTED:
        bring(folder / name, out / "ours" / name, model_of(name))
        take(out / "ours" / name, out / name, model_of(name))
    return out


def same_but_for_padding(
    one: dict[str, Any], other: dict[str, Any], first_rows: int, vocab_size: int, rows: int
) -> None:
    """Bit for bit; tables of the vocabulary as far as tokens go, and zero beyond."""
    assert one.keys() == other.keys()
    for key, tensor in one.items():
        mine, kept = other[key], len(tensor) if tensor.ndim else 0
        if tensor.ndim and tensor.shape[0] == rows:
            kept = max(0, min(rows, vocab_size - first_rows))
            assert not mine[kept:].any(), key
        assert torch.equal(tensor[:kept] if tensor.ndim else tensor, mine[:kept] if tensor.ndim else mine), key


def test_megatron_loads_an_export_bit_for_bit_and_goes_on(saved, exported):
    folder, said = saved
    loads = [(name, where / name, None) for name in EXPORTED for where in (folder, exported)]
    (loaded,) = run_ranks(load, 1, loads, 1, 1)
    for name, (theirs, first, _), (mine, second, scaler) in zip(EXPORTED, loaded[::2], loaded[1::2], strict=True):
        assert scaler == {"scale": [512.0], "growth_tracker": 5, "hysteresis_tracker": 1}
        same_but_for_padding(theirs, mine, 0, model_of(name).vocab_size, 44)
        assert (first.losses, first.ahead) == (second.losses, second.ahead) == (said[name].losses, said[name].ahead)


@pytest.mark.slow
def test_megatron_loads_an_export_in_another_layout_and_we_load_that(saved, exported, tmp_path):
    """tp=2, pp=2 load what one process wrote, and save; the import of that is what we had exported."""
    folder, _ = saved
    loads = [
        (name, where / name, tmp_path / name if where is exported else None)
        for name in EXPORTED
        for where in (folder, exported)
    ]
    for rank, loaded in enumerate(run_ranks(load, 4, loads, 2, 2)):
        for name, (theirs, *_), (mine, *_) in zip(EXPORTED, loaded[::2], loaded[1::2], strict=True):
            same_but_for_padding(theirs, mine, 22 * (rank % 2), model_of(name).vocab_size, 22)
    for name in EXPORTED:
        bring(tmp_path / name, tmp_path / "ours" / name, model_of(name))
        assert fingerprint(tmp_path / "ours" / name) == fingerprint(exported / "ours" / name)


# What is refused -------------------------------------------------------------------------------------------------------


def test_a_state_by_buckets_is_refused_and_its_weights_are_not(saved, tmp_path):
    folder, _ = saved
    with pytest.raises(CheckpointError, match=r"dp_reshardable.*--dist-ckpt-optim-fully-reshardable.*--weights-only"):
        check_optimizer(open_checkpoint(folder / "buckets"))
    bring(folder / "buckets", tmp_path, model_of("llama"), has_moments=False)
    with pytest.raises(CheckpointError, match="no optimizer state"):
        check_optimizer(open_checkpoint(folder / "plain"))


def test_another_model_is_refused_by_its_tensors(saved):
    folder, _ = saved
    wider = model_of("llama").model_copy(update={"ffn_hidden_size": 72, "qk_norm": True})
    with pytest.raises(CheckpointError) as refused:
        check(open_checkpoint(folder / "llama"), wider, WEIGHTS)
    assert "mlp.linear_fc1.weight [4, 128, 64]: this model has [4, 144, 64]" in str(refused.value)
    assert "self_attention.q_layernorm.weight: not there" in str(refused.value)
    tied = model_of("llama").model_copy(update={"tie_embeddings": True})
    with pytest.raises(CheckpointError, match=r"output_layer.weight \[44, 64\]: this model has no such parameter"):
        check(open_checkpoint(folder / "llama"), tied, WEIGHTS)
