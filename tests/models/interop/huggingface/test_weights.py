"""Hugging Face weights: transformers' logits are ours, there and back is bit-identical, and what does not fit is named."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.harness import run_ranks
from tests.lacking import need_package
from tests.models.interop.huggingface.miniatures import LENGTH, MODELS
from tests.models.interop.huggingface.wide import wide
from triaxis.engine.checkpoint.directory import Candidate, find
from triaxis.engine.checkpoint.format.manifest import TrainingState
from triaxis.engine.checkpoint.format.store import Shard
from triaxis.engine.checkpoint.import_weights import read_tensor, write_checkpoint
from triaxis.engine.checkpoint.shards import fingerprint, restore
from triaxis.engine.comm.topology import Topology
from triaxis.engine.config.schema.model import ModelConfig
from triaxis.engine.config.tree import Config
from triaxis.engine.data.loader import MicroBatch
from triaxis.engine.errors import CheckpointError, ConfigError
from triaxis.engine.layout.rank_grid import ParallelSizes, RankGrid
from triaxis.engine.layout.shard_spec import localize
from triaxis.engine.step import Engine
from triaxis.engine.train import build
from triaxis.models.gpt.chunk import build_chunks
from triaxis.models.interop.huggingface.config import family_of, to_hugging_face
from triaxis.models.interop.huggingface.families import FAMILIES
from triaxis.models.interop.huggingface.files import WeightFiles, write_weights
from triaxis.models.interop.huggingface.weights import exchanges, open_folder, plan_export
from triaxis.models.predict.rank_memory import resolve_recompute
from triaxis.models.specs import model_specs

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module", autouse=True)
def _transformers() -> None:
    """Transformers is the oracle of these tests."""
    need_package("transformers", "pip install -e '.[dev]'")


def random_model(name: str, **changes: Any) -> Any:
    """A model of transformers in float64 whose every parameter is off its initial point."""
    import transformers

    keys = MODELS[name] | changes
    config = transformers.AutoConfig.for_model(keys.pop("model_type"), **keys)
    model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            is_gain = parameter.ndim == 1 and parameter_name.endswith("weight")
            # Rounded to what fp32 holds, so that the model in fp32 is the same one.
            parameter.copy_((1.0 + 0.2 * noise if is_gain else 0.15 * noise).float().double())
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.copy_((0.1 * torch.randn(buffer.shape, generator=generator)).double())
    return model


def tokens_of(vocab_size: int) -> torch.Tensor:
    return torch.randint(vocab_size, (2, LENGTH), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def their_logits(model: Any) -> torch.Tensor:
    return model(tokens_of(43), use_cache=False).logits


def engine_of(model: Mapping[str, Any], dtype: str, sizes: ParallelSizes | None = None, rank: int = 0) -> Engine:
    sizes = sizes or ParallelSizes()
    config = Config.model_validate(
        {
            "model": model,
            "data": {"synthetic": True},
            "train": {"steps": 1, "global_batch_size": 2, "micro_batch_size": 1},
            "parallel": {"tp": sizes.tp, "pp": sizes.pp, "dp": sizes.dp},
            "precision": {"dtype": dtype},
        }
    )
    topology = Topology(
        RankGrid(sizes), rank, torch.device("cpu"), kv_heads=config.model.kv_heads, has_experts=config.model.has_experts
    )
    return build(resolve_recompute(config, topology.sizes), topology, build_chunks)


@torch.no_grad()
def our_logits(candidate: Candidate, dtype: str) -> torch.Tensor:
    """[b, s, V] of our model in one process, with a checkpoint's weights."""
    engine = engine_of(candidate.manifest.config["model"], dtype)
    restore(engine, candidate, "weights")
    engine.buffers.wait_all()
    (chunk,) = engine.chunks
    chunk.train(False)
    tokens = tokens_of(43)
    batch = MicroBatch(
        tokens=tokens,
        labels=tokens,
        loss_mask=torch.ones_like(tokens, dtype=torch.bool),
        position_ids=torch.arange(LENGTH).expand(2, LENGTH),
        sample_ids=[0, 1],
        num_tokens=tokens.numel(),
    )
    return chunk.logits(None, batch)[..., :43].transpose(0, 1)


def imported(folder: Path, out: Path, dtype: torch.dtype | None = None, seq_length: int | None = None) -> Candidate:
    found = open_folder(folder, seq_length)
    write_checkpoint(out, found.shards(dtype), TrainingState.at_start(), config=found.sections, source="test")
    return find(out)


def exported(candidate: Candidate, out: Path, family: str | None = None, shard_bytes: int = 10_000) -> Path:
    model = ModelConfig.model_validate(candidate.manifest.config["model"])
    export = plan_export(candidate, family_of(model, family), model)
    out.mkdir()
    write_weights(out, export.plans, export.tensors(), shard_bytes)
    keys, _ = to_hugging_face(model, family_of(model, family), dtype=export.dtype)
    (out / "config.json").write_text(json.dumps(keys))
    return out


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    files = WeightFiles(folder)
    return {name: files.read(name) for name in files.tensors}


def assert_identical(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype and torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_theirs_and_there_and_back_is_bit_identical(name: str, tmp_path: Path) -> None:
    """float64: |difference| <= 1e-14 of the largest logit (measured: 1e-15); what transformers leaves in fp32 is widened first.

    fp32 (nothing widened): 2e-6 of the largest logit; measured 6e-7, which is how far transformers is from its float64, too.
    """
    import transformers

    theirs = random_model(name)
    source = tmp_path / "source"
    theirs.save_pretrained(source, max_shard_size="10KB")
    assert len(list(source.glob("*.safetensors"))) > 3
    candidate = imported(source, tmp_path / "ours")
    assert {piece.dtype for file in candidate.manifest.files for piece in file.pieces} == {"float64"}
    ours = our_logits(candidate, "float64")
    expected = their_logits(wide(theirs))
    assert (ours - expected).abs().max() <= 1e-14 * expected.abs().max()

    family = MODELS[name]["model_type"]
    target = exported(candidate, tmp_path / "target", family)
    assert_identical(all_tensors(source), all_tensors(target))
    again = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    assert type(again).__name__ == FAMILIES[family].architecture == type(theirs).__name__
    single, of_them = our_logits(candidate, "fp32"), their_logits(again)
    assert (single - of_them).abs().max() <= 2e-6 * of_them.abs().max()
    assert (of_them - expected).abs().max() > 0, "fp32 was compared with itself"
    source_config = transformers.AutoConfig.from_pretrained(source)
    experts = FAMILIES[family].experts
    of_experts = () if experts is None else [key for names in experts.names for key in names]
    for key in (
        *FAMILIES[family].names,
        *of_experts,
        "rope_parameters",
        "activation_function",
        "hidden_act",
        "tie_word_embeddings",
    ):
        if (value := getattr(source_config, key, None)) is not None:  # null, or missing: what follows from other keys
            assert getattr(again.config, key) == value, key


def test_every_family_is_tried_tied_and_untied() -> None:
    assert {keys["model_type"] for keys in MODELS.values()} == FAMILIES.keys()


def test_transformers_finds_nothing_missing_or_left_over(tmp_path: Path) -> None:
    import transformers

    random_model("qwen3_tied").to(torch.bfloat16).save_pretrained(tmp_path / "source")
    target = exported(imported(tmp_path / "source", tmp_path / "ours"), tmp_path / "target", shard_bytes=10**9)
    assert [path.name for path in target.glob("*.safetensors*")] == ["model.safetensors"]
    model, info = transformers.AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    assert model.dtype == torch.bfloat16, "the dtype is that of the files"
    assert (model.config.bos_token_id, model.config.eos_token_id) == (None, None), "ids of another vocabulary"


@pytest.mark.parametrize("name", ["gpt2", "qwen2"])
def test_a_checkpoint_cut_for_tp_exports_the_same_bytes(name: str, tmp_path: Path) -> None:
    """The checkpoint is rewritten as two ranks hold it, in pieces of odd lengths."""
    random_model(name).save_pretrained(tmp_path / "source")
    candidate = imported(tmp_path / "source", tmp_path / "ours")

    def cut() -> Iterator[Shard]:
        for spec in model_specs(ModelConfig.model_validate(candidate.manifest.config["model"])):
            for index in range(2 if spec.tp_dim is not None else 1):
                record = localize(spec, tp=2, tp_index=index, sequence_parallel=False)
                box = record.box if spec.tp_dim is not None else tuple((0, size) for size in spec.shape)
                values = read_tensor(candidate.folder, candidate.manifest, spec.name, box=box).reshape(-1)
                for start in range(0, len(values), 77):
                    yield Shard(spec.name, "master", spec.shape, box, start, values[start : start + 77])

    write_checkpoint(tmp_path / "cut", cut(), TrainingState.at_start(), config=candidate.manifest.config, source="test")
    other = find(tmp_path / "cut")
    assert other.manifest.fingerprint == candidate.manifest.fingerprint
    assert_identical(all_tensors(exported(other, tmp_path / "target")), all_tensors(tmp_path / "source"))


def fingerprint_of(rank: int, folder: Path) -> int:
    candidate = find(folder)
    engine = engine_of(candidate.manifest.config["model"], "fp32", ParallelSizes(tp=2), rank)
    restore(engine, candidate, "weights")
    return fingerprint(engine)["master"]


@pytest.mark.distributed
def test_an_import_loads_into_another_layout(tmp_path: Path) -> None:
    random_model("qwen3").save_pretrained(tmp_path / "source")
    candidate = imported(tmp_path / "source", tmp_path / "ours", torch.float32)
    expected = int(candidate.manifest.fingerprint["master"], 16)
    assert run_ranks(fingerprint_of, 2, tmp_path / "ours") == [expected] * 2


def test_dtypes_stay_or_change_as_asked(tmp_path: Path) -> None:
    random_model("gpt2").to(torch.bfloat16).save_pretrained(tmp_path / "source")
    stay, change = (
        imported(tmp_path / "source", tmp_path / "a"),
        imported(tmp_path / "source", tmp_path / "b", torch.float32),
    )
    one, two = (read_tensor(c.folder, c.manifest, "layers.1.mlp.up.weight") for c in (stay, change))
    assert (one.dtype, two.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(one.float(), two)


def test_mixed_dtypes_are_kept_each(tmp_path: Path) -> None:
    """Norms in fp32 among bf16 matrices: what stands at an odd place in a file must still be readable."""
    model = random_model("qwen3").to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data = parameter.data.float()
    model.save_pretrained(tmp_path / "source", max_shard_size="7KB")
    target = exported(imported(tmp_path / "source", tmp_path / "ours"), tmp_path / "target", shard_bytes=7_000)
    assert {tensor.dtype for tensor in all_tensors(target).values()} == {torch.bfloat16, torch.float32}
    assert_identical(all_tensors(tmp_path / "source"), all_tensors(target))


@pytest.mark.parametrize("name", ["gpt2", "llama", "gpt_neox"])
def test_files_of_the_model_without_its_head_and_old_buffers(name: str, tmp_path: Path) -> None:
    """As the first GPT-2 files are: no `transformer.` before the names, causal masks among the weights."""
    from safetensors.torch import save_file

    model = random_model(name)
    model.save_pretrained(tmp_path / "source")
    expected = all_tensors(tmp_path / "source")
    prefix = FAMILIES[name].naming.base_prefix
    tensors = {key.removeprefix(prefix): value for key, value in expected.items()}
    extra = {
        "gpt2": ("h.0.attn.bias", "h.2.attn.masked_bias"),
        "llama": ("layers.0.self_attn.rotary_emb.inv_freq",) * 2,
        "gpt_neox": ("layers.0.attention.masked_bias", "layers.1.attention.rotary_emb.inv_freq"),
    }
    tensors |= {buffer: torch.ones(1, 1, LENGTH, LENGTH) for buffer in extra[name]}
    save_file(tensors, tmp_path / "source" / "model.safetensors")
    candidate = imported(tmp_path / "source", tmp_path / "ours")
    assert_identical(all_tensors(exported(candidate, tmp_path / "target")), expected)


@pytest.mark.parametrize("form", ["language_model.{}", "model.language_model.{}"])
def test_the_language_model_of_several_parts_is_taken(form: str, tmp_path: Path) -> None:
    """Files of both spellings, with a tensor of an image encoder and the head that is the embedding."""
    from safetensors.torch import save_file

    source = tmp_path / "source"
    random_model("gemma3_text").save_pretrained(source)
    expected = all_tensors(source)
    kept = {form.format(name if form[0] == "l" else name.removeprefix("model.")): expected[name] for name in expected}
    head = "language_model.lm_head.weight" if form[0] == "l" else "lm_head.weight"
    more = {head: expected["model.embed_tokens.weight"].clone(), "vision_tower.patch.weight": torch.ones(2)}
    save_file(kept | more, source / "model.safetensors")
    keys = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(
        json.dumps({"model_type": "gemma3", "text_config": keys, "vision_config": {}, "tie_word_embeddings": True})
    )
    found = open_folder(source)
    assert found.notes[0].endswith("(text_config) was taken, without vision_config") and found.family == "gemma3_text"
    assert_identical(all_tensors(exported(imported(source, tmp_path / "ours"), tmp_path / "target")), expected)
    save_file(kept | more | {form.format("strange"): torch.ones(2)}, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"language_model\.strange \[2\] is not a tensor of this model"):
        open_folder(source)
    save_file(kept | more | {head: torch.zeros(43, 36)}, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{head} differs from .*language_model\..*embed_tokens"):
        open_folder(source)


def test_a_shorter_sample_cuts_learned_positions(tmp_path: Path) -> None:
    random_model("gpt2").save_pretrained(tmp_path / "source")
    found = open_folder(tmp_path / "source", 5)
    assert found.notes == ("of the 16 learned positions the first 5 are kept",)
    candidate = imported(tmp_path / "source", tmp_path / "ours", seq_length=5)
    position = read_tensor(candidate.folder, candidate.manifest, "embedding.position.weight")
    assert torch.equal(position, all_tensors(tmp_path / "source")["transformer.wpe.weight"][:5])
    assert open_folder(tmp_path / "source").notes == ()


def rewrite(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Change tensors of a one-file model; None removes. Dots are written as __."""
    from safetensors.torch import save_file

    there = {name: tensor.clone() for name, tensor in all_tensors(folder).items()}
    for name, tensor in tensors.items():
        there.pop(name.replace("__", "."), None)
        if tensor is not None:
            there[name.replace("__", ".")] = tensor
    save_file(there, folder / "model.safetensors")


def test_tensors_that_do_not_fit_are_all_named(tmp_path: Path) -> None:
    random_model("llama_tied_mha").save_pretrained(tmp_path)
    rewrite(
        tmp_path,
        model__norm__weight=None,
        model__layers__1__mlp__down_proj__weight=torch.ones(24, 41),
        model__layers__2__self_attn__q_proj__bias=torch.ones(24),
        model__embed_tokens__weight=torch.ones(43, 24, dtype=torch.int8),
        lm_head__weight=torch.zeros(43, 24),
    )
    with pytest.raises(CheckpointError) as caught:
        open_folder(tmp_path)
    text = str(caught.value)
    for words in (
        "model.norm.weight [24] is missing",
        "model.layers.1.mlp.down_proj.weight has the shape [24, 41]; the config makes it [24, 40]",
        "model.layers.2.self_attn.q_proj.bias [24] is not a tensor of this model",
        "model.embed_tokens.weight is I8; weights may be BF16",
        "lm_head.weight differs from model.embed_tokens.weight",
    ):
        assert words in text


def test_a_tied_head_that_is_stored_twice_must_be_the_embedding(tmp_path: Path) -> None:
    random_model("llama_tied_mha").save_pretrained(tmp_path)
    word = all_tensors(tmp_path)["model.embed_tokens.weight"].clone()
    rewrite(tmp_path, lm_head__weight=word)
    open_folder(tmp_path)
    word[42, 23] += 1
    rewrite(tmp_path, lm_head__weight=word)
    with pytest.raises(CheckpointError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        open_folder(tmp_path)


def test_pickles_are_never_opened(tmp_path: Path) -> None:
    random_model("llama").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        open_folder(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch opened'\ntR.")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin\). Opening a pickle can run arbitrary code"):
        open_folder(tmp_path)


def test_damaged_and_missing_files_are_named(tmp_path: Path) -> None:
    random_model("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    second = next(iter(sorted(tmp_path.glob("model-00002-*"))))
    content = second.read_bytes()
    second.write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match=rf"{second.name} is not a complete safetensors file"):
        open_folder(tmp_path)
    second.unlink()
    with pytest.raises(CheckpointError, match=rf"{second.name} is missing; the index names it"):
        open_folder(tmp_path)
    second.write_bytes(content)
    index = tmp_path / "model.safetensors.index.json"
    whole = json.loads(index.read_text())
    name = next(name for name, file in whole["weight_map"].items() if file == second.name)
    whole["weight_map"][name] = next(iter(sorted(tmp_path.glob("model-00001-*")))).name
    index.write_text(json.dumps(whole))
    with pytest.raises(CheckpointError, match=rf"says that {name} is in model-00001"):
        open_folder(tmp_path)
    whole["weight_map"][name] = "../secret.safetensors"
    index.write_text(json.dumps(whole))
    with pytest.raises(CheckpointError, match="only safetensors files of the same folder"):
        open_folder(tmp_path)
    index.write_text("[]")
    with pytest.raises(CheckpointError, match="not a weight index"):
        open_folder(tmp_path)
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        open_folder(tmp_path / "nowhere")


def test_a_checkpoint_of_another_model_is_not_exported(tmp_path: Path) -> None:
    random_model("llama").save_pretrained(tmp_path / "source")
    candidate = imported(tmp_path / "source", tmp_path / "ours")
    model = ModelConfig.model_validate({**candidate.manifest.config["model"], "ffn_hidden_size": 48})
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.down\.weight has the shape \(24, 40\)"):
        plan_export(candidate, "llama", model)


def test_exchanges_hold_every_tensor_once() -> None:
    model = ModelConfig.model_validate(
        {
            "num_layers": 2,
            "hidden_size": 8,
            "num_attention_heads": 2,
            "seq_length": 4,
            "vocab_size": 5,
            "norm": "rmsnorm",
        }
        | {"activation": "swiglu", "bias": "none", "qk_norm": True}
    )
    found = exchanges("qwen3", model)
    assert sorted(spec.name for e in found for spec in e.ours) == sorted(spec.name for spec in model_specs(model))
    theirs = [name for e in found for name in e.theirs]
    assert len(theirs) == len(set(theirs))
    with pytest.raises(AssertionError, match="no tensor of a gpt2 holds"):
        exchanges("gpt2", model)


def test_reading_holds_one_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read before it is asked for: after the first shard, one tensor of the files was."""
    random_model("llama").save_pretrained(tmp_path)
    found = open_folder(tmp_path)
    read: list[str] = []
    original = found.files.read
    counting = SimpleNamespace(
        read=lambda name: read.append(name) or original(name), tensors=found.files.tensors, folder=tmp_path
    )
    object.__setattr__(found, "files", counting)
    stream = found.shards()
    next(stream)
    assert read == ["model.embed_tokens.weight"]
    assert len(list(stream)) + 1 == len(model_specs(found.model)) and len(read) == len(found.files.tensors)
