"""`triaxis import` of Megatron-Core's checkpoints and `triaxis export --to megatron`, as they are typed."""

import json
import re
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.launch.command_line import TRIAXIS, records, run
from triaxis.engine.checkpoint.directory import find
from triaxis.engine.checkpoint.format.manifest import LossScaleRecord, TrainingState
from triaxis.engine.checkpoint.import_weights import read_tensor, whole, write_checkpoint
from triaxis.engine.config.load import load_config
from triaxis.engine.config.schema.loss_scale import LossScaleConfig
from triaxis.engine.config.schema.model import ModelConfig
from triaxis.engine.config.tree import Config
from triaxis.engine.config.values.optimizer_kinds import OPTIMIZERS
from triaxis.launch.cli import main
from triaxis.models.interop.megatron import writer as megatron_writer
from triaxis.models.interop.megatron.files import open_checkpoint
from triaxis.models.specs import model_specs

pytestmark = pytest.mark.distributed

MODEL = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "ffn_hidden_size": 24,
    "seq_length": 8,
    "vocab_size": 40,
    "norm": "rmsnorm",
    "activation": "swiglu",
    "bias": "none",
    "tie_embeddings": False,
}
RUN = {
    "model": MODEL,
    "data": {"synthetic": True},
    "train": {"steps": 6, "global_batch_size": 4},
    "optimizer": {"lr": 1e-2, "decay_steps": 20, "warmup_steps": 2},
    "precision": {"dtype": "fp32"},
}
STATE = TrainingState(
    step=3, consumed_samples=12, consumed_tokens=96, num_updates=3, lr=1e-2, rng={"seed": 1234}, data={}
)


def checkpoint(folder: Path, *, has_moments: bool) -> Path:
    """A checkpoint of ours with random tensors."""
    generator = torch.Generator().manual_seed(1)
    config = Config.model_validate(RUN)
    kinds = OPTIMIZERS["adamw"].state_kinds if has_moments else OPTIMIZERS["adamw"].state_kinds[:1]
    shards = (
        whole(spec.name, 0.1 * torch.rand(spec.shape, generator=generator), kind)
        for spec in model_specs(config.model)
        for kind in kinds
    )
    tree = config.model_dump(mode="json") if has_moments else {"model": config.model.model_dump(mode="json")}
    state = STATE if has_moments else TrainingState.at_start()
    return write_checkpoint(folder, shards, state, config=tree, source="a test", has_moments=has_moments)


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A checkpoint of Megatron's, with the optimizer's state."""
    checkpoint(tmp_path / "start", has_moments=True)
    assert main(["export", "--to", "megatron", str(tmp_path / "start"), str(tmp_path / "megatron")]) == 0
    return tmp_path / "megatron"


def fingerprint(folder: Path) -> dict[Any, str]:
    return dict(find(folder).manifest.fingerprint)


def rewrite(folder: Path, **args: Any) -> None:
    """Change arguments in common.pt; None removes one."""
    source = open_checkpoint(folder)
    kept = {name: value for name, value in {**source.args, **args}.items() if value is not None or name not in args}
    common = {name: value for name, value in source.common.items() if name != "args"}
    with (source.folder / "common.pt").open("wb") as handle:
        torch.save({**common, "args": Namespace(**kept)} if kept else common, handle)


def test_a_run_moves_away_and_back_with_its_optimizer(theirs, tmp_path, capsys):
    assert (theirs / "latest_checkpointed_iteration.txt").read_text() == "3"
    assert open_checkpoint(theirs).args["consumed_train_samples"] == 12
    assert main(["import", str(theirs), str(tmp_path / "back")]) == 0
    said = capsys.readouterr().out
    assert "weights and Adam's moments at step 3 (fully_reshardable)" in said
    assert "Megatron's own order is not replayed" in said
    assert fingerprint(tmp_path / "back") == fingerprint(tmp_path / "start")
    manifest = find(tmp_path / "back").manifest
    assert manifest.state == STATE.model_copy(update={"rng": {}})
    assert set(manifest.config) == {"model", "train", "optimizer", "precision"}
    assert manifest.config["optimizer"] == Config.model_validate(RUN).optimizer.model_dump(mode="json")


def test_a_loss_scale_moves_away_and_back(tmp_path, monkeypatch, capsys):
    scaling = {"initial": 4096.0, "window": 7, "hysteresis": 3, "minimum": 2.0}
    state = STATE.model_copy(update={"loss_scale": LossScaleRecord(scale=512.0, updates=5, hysteresis=1)})
    monkeypatch.setitem(RUN, "precision", {"dtype": "fp16", "loss_scale": scaling})
    monkeypatch.setitem(globals(), "STATE", state)
    checkpoint(tmp_path / "start", has_moments=True)
    theirs, back = tmp_path / "megatron", tmp_path / "back"
    assert main(["export", "--to", "megatron", str(tmp_path / "start"), str(theirs)]) == 0
    exported = capsys.readouterr().out
    assert main(["import", str(theirs), str(back)]) == 0
    for said in (exported, capsys.readouterr().out):
        assert "note       the learning rate of step 1 is 0 in Megatron-LM and 0.005 here; of 6 steps" in said
    assert "--lr 0.01 --min-lr 0.0 --lr-decay-style cosine --lr-decay-iters 20 --lr-warmup-iters 2" in exported
    manifest = find(back).manifest
    assert manifest.state == state.model_copy(update={"rng": {}})
    assert manifest.config["precision"]["loss_scale"] == {**scaling, "static": None}
    assert load_config(back / "train.yaml", ["data.synthetic=true"], {}).precision.loss_scale == LossScaleConfig(
        **scaling
    )

    opened = open_checkpoint(theirs)
    for number, (scaler, said) in enumerate(
        (
            ([1.0], r"\[1.0\] for the state of a loss scale"),
            ({"scale": float("nan"), "growth_tracker": 1, "hysteresis_tracker": 1}, "nan for a loss scale"),
            ({"scale": 1.0, "growth_tracker": 0.5, "hysteresis_tracker": 1}, "0.5 for the updates at a loss scale"),
            ({"scale": 0.0, "growth_tracker": 1, "hysteresis_tracker": 1}, "0.0 for scale"),
            ({"scale": 1.0, "growth_tracker": 1, "hysteresis_tracker": None}, "None for the hysteresis of a loss"),
        )
    ):
        optimizer = {**opened.common["optimizer"], "grad_scaler": scaler}
        common = {**opened.common, "optimizer": optimizer, "args": Namespace(**opened.args)}
        torch.save(common, opened.folder / "common.pt")
        assert main(["import", str(theirs), str(tmp_path / f"none{number}")]) != 0
        assert re.search(said, " ".join(capsys.readouterr().err.split())), scaler


def test_the_config_beside_an_import_is_whole_but_for_the_data(theirs, tmp_path):
    assert main(["import", str(theirs), str(tmp_path / "back")]) == 0
    overrides = ["data.synthetic=true"]
    config = load_config(tmp_path / "back" / "train.yaml", overrides, {})
    theirs_too = Config.model_validate(RUN)
    for field in ("kv_heads", "head_size", "ffn_size", "vocab_size", "norm", "activation", "bias", "tie_embeddings"):
        assert getattr(config.model, field) == getattr(theirs_too.model, field), field
    assert config.optimizer == theirs_too.optimizer
    assert (config.checkpoint.load, config.checkpoint.load_what) == (str(tmp_path / "back"), "all")


def test_weights_go_away_and_back_as_a_release(tmp_path, capsys):
    checkpoint(tmp_path / "start", has_moments=False)
    assert main(["export", "--to", "megatron", str(tmp_path / "start"), str(tmp_path / "megatron")]) == 0
    assert main(["import", str(tmp_path / "megatron"), str(tmp_path / "back")]) == 0
    assert (tmp_path / "megatron" / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert "--no-load-optim" in capsys.readouterr().out
    assert fingerprint(tmp_path / "back") == fingerprint(tmp_path / "start")
    assert find(tmp_path / "back").manifest.content == "weights"


def test_weights_only_leaves_the_optimizer_behind_and_dtype_rounds(tmp_path):
    checkpoint(tmp_path / "start", has_moments=True)
    away = ["--weights-only", "--dtype", "bf16"]
    assert main(["export", "--to", "megatron", str(tmp_path / "start"), str(tmp_path / "megatron"), *away]) == 0
    opened = open_checkpoint(tmp_path / "megatron")
    assert opened.folder.name == "release"
    assert {tensor.dtype for tensor in opened.tensors.values()} == {torch.bfloat16}
    assert not any(key.startswith("optimizer.") for key in opened.tensors)


def test_a_config_of_ours_is_recorded_whole_and_held_against_the_arguments(theirs, tmp_path, capsys):
    mine = tmp_path / "mine.yaml"
    mine.write_text(yaml.safe_dump(RUN))
    command = ["import", str(theirs), str(tmp_path / "back"), "--config", str(mine)]
    assert main(command) == 0
    assert find(tmp_path / "back").manifest.config == load_config(mine, [], {}).model_dump(mode="json")
    other = {**RUN, "model": {**MODEL, "norm_eps": 1e-6, "rope_base": 5e5}}
    mine.write_text(yaml.safe_dump(other))
    shutil.rmtree(tmp_path / "back")
    assert main(command) == 2
    said = capsys.readouterr().err
    assert "model.norm_eps = 1e-06 in the config, 1e-05 in Megatron's arguments" in said
    assert "model.rope_base = 500000.0 in the config" in said
    assert not (tmp_path / "back").exists()


def test_a_checkpoint_without_arguments_needs_a_config(theirs, tmp_path, capsys):
    source = open_checkpoint(theirs)
    rewrite(theirs, **dict.fromkeys(source.args))
    command = ["import", str(theirs), str(tmp_path / "back"), "--weights-only"]
    assert main(command) == 2
    assert "holds no Megatron arguments" in capsys.readouterr().err
    mine = tmp_path / "mine.yaml"
    mine.write_text(yaml.safe_dump(RUN))
    assert main([*command, "--config", str(mine)]) == 0


def test_rows_of_padding_are_dropped_and_named(theirs, tmp_path, capsys):
    command = ["import", str(theirs), str(tmp_path / "back"), "--weights-only"]
    assert main([*command, "--vocab-size", "33"]) == 0
    assert "7 rows of embedding.word_embeddings.weight are beyond the model" in capsys.readouterr().out
    assert find(tmp_path / "back").manifest.tensors["head.weight"].shape == (33, 16)
    shutil.rmtree(tmp_path / "back")
    assert main([*command, "--vocab-size", "41"]) == 2
    assert "output_layer.weight [40, 16]: this model has [41, 16]" in capsys.readouterr().err
    rewrite(theirs, vocab_size=None)
    assert main(command) == 2
    assert "--vocab-size N" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"num_experts": 8}, "num_experts = 8: checkpoints with experts cannot be imported yet"),
        ({"softmax_type": "off-by-one"}, "softmax_type = 'off-by-one': only vanilla and learnable are built"),
        ({"multi_latent_attention": True}, "multi-latent attention is not built"),
        ({"rotary_interleaved": True}, "pairs are i and i + head_dim / 2"),
        ({"apply_layernorm_1p": True, "normalization": "LayerNorm"}, "stored less one are built for RMSNorm only"),
        ({"window_size": (128, 128)}, "window_size = (128, 128): must be (keys before the query, 0)"),
        ({"normalization": "L2Norm"}, "normalization = 'L2Norm': must be one of LayerNorm, RMSNorm"),
        ({"position_embedding_type": "yarn"}, "position_embedding_type = 'yarn'"),
        ({"quick_geglu": True}, "a gate of x sigmoid(1.702 x) is not built"),
        ({"qk_layernorm": True, "normalization": "LayerNorm"}, "normalised by RMSNorm only"),
    ],
)
def test_a_model_that_is_not_built_is_refused_by_name(theirs, tmp_path, capsys, args, said):
    rewrite(theirs, **args)
    assert main(["import", str(theirs), str(tmp_path / "back")]) == 2
    assert said in re.sub(r"\s+", " ", capsys.readouterr().err)


def wrong_folders(folder: Path) -> dict[str, str]:
    """Each a folder in `folder`, and what is said of it."""
    (folder / "legacy" / "iter_0000005" / "mp_rank_00").mkdir(parents=True)
    (folder / "legacy" / "latest_checkpointed_iteration.txt").write_text("5")
    for name, content in {"zarr": {"sharded_backend": "zarr"}, "nothing_said": {}}.items():
        (folder / name).mkdir()
        (folder / name / "metadata.json").write_text(json.dumps(content))
    (folder / "fsdp").mkdir()
    (folder / "fsdp" / ".metadata").write_bytes(b"")
    (folder / "gone").mkdir()
    (folder / "gone" / "latest_checkpointed_iteration.txt").write_text("9")
    (folder / "above" / "iter_0000001").mkdir(parents=True)
    (folder / "empty").mkdir()
    (folder / "half").mkdir()
    (folder / "half" / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    return {
        "legacy": "is a legacy checkpoint (mp_rank_00/model_optim_rng.pt), cut for one layout. Let the Megatron job",
        "zarr": "the zarr backend, which Megatron-Core itself no longer reads; only torch_dist",
        "nothing_said": "does not say how the checkpoint is stored",
        "fsdp": "stored by torch.distributed.checkpoint alone, or incomplete",
        "gone": "says '9', and iter_0000009 is not there",
        "above": "Give one of its iterations: iter_0000001",
        "empty": "has neither config.json (Hugging Face) nor latest_checkpointed_iteration.txt or metadata.json",
        "half": ".metadata cannot be read: No such file or directory. Without it",
        "absent": "No such file or directory",
    }


def test_what_is_no_torch_dist_checkpoint_is_refused_with_a_way_out(tmp_path, capsys):
    for name, said in wrong_folders(tmp_path).items():
        assert main(["import", str(tmp_path / name), str(tmp_path / "out")]) == 2
        assert said in capsys.readouterr().err, name
        assert not (tmp_path / "out").exists()


def test_an_export_keeps_what_is_there(theirs, tmp_path, capsys):
    assert main(["export", "--to", "megatron", str(tmp_path / "start"), str(theirs)]) == 2
    assert "iter_0000003 already exists" in capsys.readouterr().err
    open_checkpoint(theirs).read("output_layer.weight")


def test_a_large_export_has_several_files(tmp_path, monkeypatch):
    monkeypatch.setattr(megatron_writer, "FILE_BYTES", 20_000)
    checkpoint(tmp_path / "start", has_moments=True)
    assert main(["export", "--to", "megatron", str(tmp_path / "start"), str(tmp_path / "megatron")]) == 0
    assert main(["import", str(tmp_path / "megatron"), str(tmp_path / "back")]) == 0
    assert len(list((tmp_path / "megatron" / "iter_0000003").glob("__0_*.distcp"))) > 2
    assert fingerprint(tmp_path / "back") == fingerprint(tmp_path / "start")


def test_an_export_that_fails_leaves_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch, "save", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    checkpoint(tmp_path / "start", has_moments=True)
    assert main(["export", "--to", "megatron", str(tmp_path / "start"), str(tmp_path / "megatron")]) == 1
    assert "could not be written: [Errno 28] No space left on device" in capsys.readouterr().err
    assert list((tmp_path / "megatron").iterdir()) == []


@pytest.mark.parametrize(
    ("choices", "refusal"),
    [
        ({"norm": "layernorm", "qk_norm": True}, "model.qk_norm with norm = layernorm"),
        ({"activation": "geglu_tanh"}, "model.activation = geglu_tanh: Megatron-LM has no argument for it"),
        ({"qk_norm": "all_heads"}, "model.qk_norm = all_heads"),
        ({"parallel_block": True}, "model.parallel_block = True: an exchange with Megatron-LM is not built"),
        ({"attention_softcap": 4}, "model.attention_softcap = 4.0: an exchange with Megatron-LM is not built for it"),
    ],
)
def test_what_megatron_cannot_express_is_refused(choices, refusal, tmp_path, capsys):
    model = ModelConfig.model_validate({**MODEL, **choices})
    shards = (whole(spec.name, torch.zeros(spec.shape)) for spec in model_specs(model))
    config = {"model": model.model_dump(mode="json")}
    write_checkpoint(tmp_path / "start", shards, TrainingState.at_start(), config=config, source="a test")
    assert main(["export", "--to", "megatron", str(tmp_path / "start"), str(tmp_path / "megatron")]) == 2
    assert refusal in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.distributed
def test_an_imported_run_goes_on_where_it_stood(theirs, tmp_path, monkeypatch):
    """The command that the import prints, typed: 6 steps in all, the first three of them Megatron's."""
    monkeypatch.chdir(tmp_path)
    assert main(["import", str(theirs), "back"]) == 0
    command = ["train", "back/train.yaml", "data.synthetic=true", "runtime.name=moved", "telemetry.log_interval=1"]
    trained = run(tmp_path, *TRIAXIS, *command)
    assert trained.exit_code == 0, trained.err
    steps = [record["step"] for record in records(tmp_path / "runs" / "moved" / "metrics.jsonl") if "step" in record]
    assert steps and min(steps) == 4 and max(steps) == 6


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"consumed_train_samples": 10**25}, "for consumed_samples: "),
        ({"consumed_train_samples": float("inf")}, "has inf for args.consumed_train_samples"),
        ({"consumed_train_samples": float("nan")}, "has nan for args.consumed_train_samples"),
        ({"consumed_train_samples": [3]}, "has .3. for args.consumed_train_samples"),
        ({"num_layers": 10**10_000}, r"model.num_layers = an integer of 33,\d+ bits"),
        ({"num_layers": [[2]]}, "num_layers = .a list.: must be a number"),
        ({"normalization": ["RMSNorm"]}, "normalization = .'RMSNorm'.: must be a number or a word"),
        ({"lr_decay_style": {"a": 1}}, "lr_decay_style = {'a': 1}"),
        ({"lr_warmup_iters": "x"}, "settings cannot be read"),
        ({"lr": -1.0}, "lr = -1.0"),
        ({"num_experts": torch.ones(3)}, "num_experts = a Tensor: checkpoints with experts"),
        ({"optimizer": "sgd"}, "--optimizer 'sgd'; only the state of adam is read here.* --weights-only"),
    ],
)
def test_absurd_arguments_are_refused_in_words(theirs, tmp_path, capsys, args, said):
    rewrite(theirs, **args)
    assert main(["import", str(theirs), str(tmp_path / "out")]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert re.search(said, error), error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "groups", [[], [3], "x", [{"step": 2**80, "lr": 1.0}], [{"step": 3, "lr": "x"}], [{"step": 3, "lr": float("nan")}]]
)
def test_an_absurd_optimizer_is_refused_in_words(theirs, tmp_path, capsys, groups):
    path = open_checkpoint(theirs).folder / "common.pt"
    common = torch.load(path, weights_only=False)
    common["optimizer"]["optimizer"]["param_groups"] = groups
    torch.save(common, path)
    assert main(["import", str(theirs), str(tmp_path / "out")]) == 2
    assert "Import the weights: --weights-only" in " ".join(capsys.readouterr().err.split())


def test_weights_that_are_not_finite_are_refused_by_name(tmp_path, capsys):
    start = checkpoint(tmp_path / "start", has_moments=False)
    manifest = find(start).manifest
    model = Config.model_validate(RUN).model
    tensors = {spec.name: read_tensor(start, manifest, spec.name) for spec in model_specs(model)}
    tensors["layers.1.mlp.down.weight"][0, 0] = float("nan")
    shards = (whole(name, values) for name, values in tensors.items())
    tree = {"model": model.model_dump(mode="json")}
    write_checkpoint(tmp_path / "bad", shards, TrainingState.at_start(), config=tree, source="a test")
    assert main(["export", "--to", "megatron", str(tmp_path / "bad"), str(tmp_path / "megatron")]) == 0
    assert main(["import", str(tmp_path / "megatron"), str(tmp_path / "out")]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "decoder.layers.mlp.linear_fc2.weight has 1 of 384 elements that are NaN" in error
    assert not (tmp_path / "out").exists()


def test_the_state_of_another_optimizer_is_not_exported_and_its_weights_are(tmp_path, capsys):
    config = Config.model_validate(RUN | {"optimizer": {"name": "sgd"}})
    shards = (
        whole(spec.name, torch.ones(spec.shape), kind)
        for spec in model_specs(config.model)
        for kind in OPTIMIZERS["sgd"].state_kinds
    )
    tree = config.model_dump(mode="json")
    write_checkpoint(tmp_path / "sgd", shards, TrainingState.at_start(), config=tree, source="a test", has_moments=True)
    export = ["export", "--to", "megatron", str(tmp_path / "sgd"), str(tmp_path / "megatron")]
    assert main(export) == 2
    assert "optimizer.name = sgd: only AdamW's state is written" in " ".join(capsys.readouterr().err.split())
    assert main([*export, "--weights-only"]) == 0
