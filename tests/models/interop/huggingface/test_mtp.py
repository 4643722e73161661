"""Layers of a DeepSeek-V3 that predict further tokens: losses are those of the names, there and back is bit-identical."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.lacking import need_package
from tests.models.interop.huggingface.miniatures import LENGTH
from tests.models.interop.huggingface.published_experts import PUBLISHED_EXPERTS
from tests.models.interop.huggingface.test_weights import (
    all_tensors,
    assert_identical,
    engine_of,
    exported,
    imported,
    our_logits,
    random_model,
    rewrite,
    their_logits,
    tokens_of,
)
from tests.models.interop.huggingface.wide import wide
from triaxis.engine.checkpoint.directory import Candidate
from triaxis.engine.checkpoint.shards import restore
from triaxis.engine.config.schema.model import ModelConfig
from triaxis.engine.data.loader import MicroBatch
from triaxis.engine.errors import CheckpointError, ConfigError, counted
from triaxis.models.interop.huggingface.config import family_of, from_hugging_face, to_hugging_face
from triaxis.models.interop.huggingface.weights import open_folder
from triaxis.models.specs import num_parameters

V3 = PUBLISHED_EXPERTS["deepseek_v3"][0]
OWN = 3
"""Layers of the small model itself."""

COPIES = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}


def save_with_mtp(folder: Path, num_ahead: int, name: str = "deepseek_v3_experts", **changes: Any) -> Any:
    """Save a small model whose last layers predict further tokens, as DeepSeek publishes them.

    Returns:
        Transformers' model in float64, in which they are ordinary layers.
    """
    need_package("transformers", "pip install -e '.[dev]'")
    from safetensors.torch import save_file

    changes |= {"num_hidden_layers": OWN + num_ahead, "first_k_dense_replace": changes.get("first_k_dense_replace", 1)}
    model = random_model(name, **changes)
    model.save_pretrained(folder)
    tensors, generator = all_tensors(folder), torch.Generator().manual_seed(5)
    h = model.config.hidden_size
    head = "model.embed_tokens.weight" if model.config.tie_word_embeddings else "lm_head.weight"
    for layer in range(OWN, OWN + num_ahead):
        for part in ("enorm", "hnorm", "shared_head.norm", "eh_proj"):
            noise = 0.2 * torch.randn((h, 2 * h) if part == "eh_proj" else (h,), generator=generator)
            tensors[f"model.layers.{layer}.{part}.weight"] = (noise + (part != "eh_proj")).double()
        for copy, own in COPIES.items():
            tensors[f"model.layers.{layer}.{copy}"] = tensors[head if own == "lm_head.weight" else own].clone()
    save_file(tensors, folder / "model.safetensors")
    change_config(folder, num_hidden_layers=OWN, num_nextn_predict_layers=num_ahead)
    return model


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def plain_losses(model: Any, tensors: dict[str, torch.Tensor], num_ahead: int) -> list[torch.Tensor]:
    """The sum of losses of each token ahead in float64, by the names of the files and layers of transformers.

    hk = norm_k(layer_k(eh_proj_k [enorm_k(embedding of t_{i+k}), hnorm_k(h(k-1))])), and h0 is the output of the model's norm.
    """
    body, tokens = model.model, tokens_of(43)
    embedding = tensors["model.embed_tokens.weight"]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + model.config.rms_norm_eps) * tensors[name]

    turns = body.rotary_emb(embedding, torch.arange(LENGTH).expand(2, LENGTH))
    x = F.embedding(tokens, embedding)
    for layer in body.layers[:OWN]:
        x = layer(x, position_embeddings=turns)
    hidden, found = norm(x, "model.norm.weight"), []
    for distance in range(1, num_ahead + 1):
        name = f"model.layers.{OWN + distance - 1}"
        # A position without such a token is not counted; the attention of those before it does not see it.
        further = F.embedding(tokens.roll(-distance, 1), embedding)
        joined = torch.cat((norm(further, f"{name}.enorm.weight"), norm(hidden, f"{name}.hnorm.weight")), dim=-1)
        x = body.layers[OWN + distance - 1](joined @ tensors[f"{name}.eh_proj.weight"].t(), position_embeddings=turns)
        hidden = norm(x, f"{name}.shared_head.norm.weight")
        logits = (hidden @ tensors[f"{name}.shared_head.head.weight"].t())[:, : -distance - 1]
        found.append(F.cross_entropy(logits.flatten(0, 1), tokens[:, distance + 1 :].flatten(), reduction="sum"))
    return found


def our_losses(candidate: Candidate, num_ahead: int) -> torch.Tensor:
    """The same of our model in training, which weights them."""
    engine = engine_of(candidate.manifest.config["model"], "float64")
    restore(engine, candidate, "weights")
    engine.buffers.wait_all()
    (chunk,), mtp = engine.chunks, engine.config.model.mtp
    assert mtp is not None
    tokens = tokens_of(43)
    ahead = torch.stack([tokens.roll(-distance - 1, 1) for distance in range(1, num_ahead + 1)])
    mask = torch.stack([torch.arange(LENGTH).expand(2, -1) < LENGTH - 1 - n for n in range(1, num_ahead + 1)])
    batch = MicroBatch(
        tokens=tokens,
        labels=tokens.roll(-1, 1),
        loss_mask=torch.arange(LENGTH).expand(2, -1) < LENGTH - 1,
        position_ids=torch.arange(LENGTH).expand(2, LENGTH),
        sample_ids=[0, 1],
        num_tokens=2 * (LENGTH - 1),
        ahead=ahead,
        mask_ahead=mask,
    )
    sums = chunk(None, batch).detach()
    assert len(sums) == 1 + num_ahead
    return sums[1:] * num_ahead / mtp.loss_weight


@pytest.mark.parametrize(
    ("num_ahead", "changes"),
    [(2, {}), (1, {"first_k_dense_replace": OWN + 1, "tie_word_embeddings": True})],
    ids=["two_with_experts", "dense_tied"],
)
def test_losses_are_those_of_the_names_and_there_and_back_is_bit_identical(
    num_ahead: int, changes: dict[str, Any], tmp_path: Path
) -> None:
    """float64: |difference| <= 1e-13 of a loss sum."""
    import transformers

    source = tmp_path / "source"
    theirs = wide(save_with_mtp(source, num_ahead, **changes))
    tensors = all_tensors(source)
    candidate = imported(source, tmp_path / "ours")
    assert open_folder(source).notes == () and candidate.manifest.config["model"]["mtp"]["num_layers"] == num_ahead
    expected = torch.stack(plain_losses(theirs, tensors, num_ahead)).detach()
    torch.testing.assert_close(our_losses(candidate, num_ahead), expected, rtol=1e-13, atol=0)

    target = exported(candidate, tmp_path / "target")
    assert_identical(all_tensors(target), tensors)
    keys = json.loads((target / "config.json").read_text())
    assert keys["num_nextn_predict_layers"] == num_ahead
    again = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64).eval()
    logits = their_logits(wide(again))
    assert (our_logits(candidate, "float64") - logits).abs().max() <= 1e-14 * logits.abs().max()


def test_copies_of_own_tensors_may_lack_and_must_not_differ(tmp_path: Path) -> None:
    save_with_mtp(tmp_path, 2)
    whole = all_tensors(tmp_path)
    rewrite(tmp_path, model__layers__4__embed_tokens__weight=None, model__layers__3__shared_head__head__weight=None)
    target = exported(imported(tmp_path, tmp_path / "ours"), tmp_path / "target")
    assert_identical(all_tensors(target), whole)
    for copy, own in COPIES.items():
        name, zero = f"model.layers.4.{copy}", whole[own].clone()
        zero[42, 23] = 0.0
        minus = zero.clone()
        minus[42, 23] = -0.0
        for theirs in (minus, whole[own].float(), whole[own][:42]):
            rewrite(tmp_path, **{own.replace(".", "__"): zero, name.replace(".", "__"): theirs.contiguous()})
            with pytest.raises(CheckpointError, match=rf"{name} differs from {own}, which the layers"):
                open_folder(tmp_path)
        rewrite(tmp_path, **{own.replace(".", "__"): whole[own], name.replace(".", "__"): whole[own].clone()})
    assert open_folder(tmp_path).notes == ()


def test_layers_that_are_not_in_the_files_are_none_and_that_is_said(tmp_path: Path) -> None:
    save_with_mtp(tmp_path, 1)
    behind = {name.replace(".", "__"): None for name in all_tensors(tmp_path) if "layers.3." in name}
    rewrite(tmp_path, **{name: tensor for name, tensor in behind.items() if "norm" in name})
    with pytest.raises(CheckpointError, match=r"model\.layers\.3\.enorm\.weight \[24\] is missing"):
        open_folder(tmp_path)
    rewrite(tmp_path, **behind)
    found = open_folder(tmp_path)
    assert found.notes == (
        "config.json names 1 layer to predict further tokens, and the files have none: model.mtp is null",
    )
    assert found.model.mtp is None and "mtp" not in found.sections["model"]
    assert imported(tmp_path, tmp_path / "ours").manifest.config["model"].get("mtp") is None
    assert to_hugging_face(found.model, "deepseek_v3", dtype="float32")[0]["num_nextn_predict_layers"] == 0


@pytest.mark.parametrize(("named", "left_out"), [(1, 1), (0, 2), (None, 2)])
def test_layers_that_config_json_does_not_name_are_left_out_and_counted(
    named: int | None, left_out: int, tmp_path: Path
) -> None:
    """The way to import a model without them."""
    save_with_mtp(tmp_path, 2)
    change_config(tmp_path, num_nextn_predict_layers=named)
    found = open_folder(tmp_path)
    count = sum(name.startswith("model.layers.4.") for name in found.files.tensors) * left_out
    assert found.notes == (
        f"layers behind the last, which predict further tokens, were left out ({counted(count, 'tensor')})",
    )
    assert found.model.num_mtp_layers == (named or 0)
    assert len({name for exchange in found.exchanges for name in exchange.theirs if "layers.4." in name}) == 0


def test_families_without_such_layers_leave_them_out_or_refuse_them(tmp_path: Path) -> None:
    random_model("deepseek_v2_lite_experts").save_pretrained(tmp_path / "second")
    change_config(tmp_path / "second", num_nextn_predict_layers=1)
    rewrite(tmp_path / "second", model__layers__3__enorm__weight=torch.ones(2))
    found = open_folder(tmp_path / "second")
    assert found.notes == ("layers behind the last, which predict further tokens, were left out (1 tensor)",)
    assert found.model.mtp is None
    random_model("qwen3_moe").save_pretrained(tmp_path / "other")
    rewrite(tmp_path / "other", model__layers__3__enorm__weight=torch.ones(2))
    with pytest.raises(CheckpointError, match=r"model\.layers\.3\.enorm\.weight \[2\] is not a tensor of this model"):
        open_folder(tmp_path / "other")


def test_a_published_file_has_its_number_of_parameters() -> None:
    """Those of the published safetensors: BF16 and FP8 elements, with the copies, and the biases of choices beside the scales."""
    model = ModelConfig.model_validate(from_hugging_face(V3)["model"])
    assert model.mtp is not None and (model.mtp.num_layers, model.mtp.loss_weight) == (1, 0.3)
    assert num_parameters(model) + 2 * 129_280 * 7168 == 3_918_786_560 + 680_571_043_840 + 59 * 256


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_mtp_layers": 2}, r"num_nextn_predict_layers = 1 and num_mtp_layers = 2: both are our model\.mtp\.num"),
        ({"num_nextn_predict_layers": -1}, r"model\.mtp\.num_layers = -1"),
        ({"num_nextn_predict_layers": "one"}, r"model\.mtp\.num_layers = 'one'"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        from_hugging_face(V3 | changes)


def test_their_layers_are_of_the_kind_of_the_last_on_the_way_back() -> None:
    """Readers of files count dense layers from the first: those that predict further tokens are behind the last."""
    dense = ModelConfig.model_validate(from_hugging_face(V3 | {"first_k_dense_replace": 62})["model"])
    assert dense.moe is None and len(dense.kinds) == 62
    keys, notes = to_hugging_face(dense, "deepseek_v3", dtype="bfloat16")
    assert (keys["first_k_dense_replace"], keys["num_nextn_predict_layers"], notes) == (62, 1, [])
    model = ModelConfig.model_validate(from_hugging_face(V3 | {"num_mtp_layers": 1})["model"])
    keys, _ = to_hugging_face(model, "deepseek_v3", dtype="bfloat16")
    assert (keys["first_k_dense_replace"], family_of(model)) == (3, "deepseek_v3")


def test_what_a_family_has_no_place_for_is_refused_or_said() -> None:
    fields = from_hugging_face(V3)["model"] | {"mtp": {"num_layers": 1, "loss_weight": 0.1}}
    model = ModelConfig.model_validate(fields)
    with pytest.raises(ConfigError, match=r"as deepseek_v2: .*model\.mtp = .*which it does not have"):
        family_of(model, "deepseek_v2")
    _, notes = to_hugging_face(model, "deepseek_v3", dtype="bfloat16")
    assert notes == ["model.mtp.loss_weight = 0.1 has no key in deepseek_v3: it acts in training only"]
