"""Build an exported folder's README.md, a model card, from checkpoint and run.

The card names no license and no author, since no record has them. It contains no local paths.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from triaxis.engine.checkpoint.directory import Candidate
from triaxis.engine.config.schema.model import ModelConfig
from triaxis.engine.config.values.sources import Source
from triaxis.engine.run.entries import CHECKPOINTS, METRICS
from triaxis.engine.storage.redaction import without_secrets
from triaxis.engine.telemetry.record.jsonl import read_records

README = "README.md"
_HEAD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- triaxis
- pretraining
---
"""


def model_card(
    candidate: Candidate,
    model: ModelConfig,
    *,
    name: str,
    keys: Mapping[str, Any],
    weights: str,
    commit: str,
    reads_text: bool,
) -> str:
    """Build the text of README.md: a YAML header, a table of facts, and how to load the folder.

    Secrets in it are removed.

    Args:
        name: name of the exported folder, as the card's title.
        keys: content of the exported config.json.
        weights: kind of the exported weights; `ema` is their moving average.
        commit: commit of the Triaxis program that exports.
        reads_text: whether the folder has a tokenizer.
    """
    rows = [*_model(candidate, model, keys, weights), *_training(candidate), *_program(candidate, commit)]
    table = "\n".join(f"| {row} | {value} |" for row, value in rows)
    title = f"# {name}\n\nA language model, trained and exported with Triaxis."
    return without_secrets(f"{_HEAD}\n{title}\n\n| | |\n|---|---|\n{table}\n\n{_loading(reads_text)}")


def _model(
    candidate: Candidate, model: ModelConfig, keys: Mapping[str, Any], weights: str
) -> Iterator[tuple[str, str]]:
    average = " (the moving average of the weights)" if weights == "ema" else ""
    yield "architecture", f"{keys['architectures'][0]}, {candidate.manifest.num_parameters:,} parameters{average}"
    yield (
        "sizes",
        f"{model.num_layers:,} layers, hidden size {model.hidden_size:,}, {model.num_attention_heads:,} heads, vocabulary "
        f"{model.vocab_size:,}, samples of {model.seq_length:,} tokens",
    )
    yield "files", str(keys["torch_dtype"])


def _training(candidate: Candidate) -> Iterator[tuple[str, str]]:
    manifest = candidate.manifest
    config, state, layout = manifest.config, manifest.state, manifest.layout
    for ancestor in manifest.lineage:
        # imported/llama/step_00000000, or runs/web/checkpoints/step_00001000
        folder = next(part for part in reversed(Path(ancestor.path).parts[:-1]) if part != CHECKPOINTS)
        yield (
            "started from",
            f"`{folder}`, step {ancestor.step:,}{' (weights)' if ancestor.loaded == 'weights' else ''}",
        )
    if manifest.content == "weights":
        what, colon, path = manifest.run.partition(": ")
        yield "weights", f"{what}{colon}{Path(path).name}" if colon else what
        return
    yield "run", f"`{manifest.run}`, after step {state.step:,}: {state.consumed_tokens:,} tokens"
    data = config.get("data", {})
    sources = [Source.model_validate(source) for source in data.get("train") or ()]
    total = sum(source.weight for source in sources)
    named = ", ".join(f"`{source.title}` {source.weight / total:.1%}" for source in sources)
    yield "corpora", "random tokens" if data.get("synthetic") else named or "not recorded"
    yield from _losses(candidate)
    optimizer = config.get("optimizer", {})
    if "lr" in optimizer:
        batch = config["train"]["global_batch_size"]
        yield "optimizer", f"{manifest.optimizer}, peak learning rate {optimizer['lr']:g}, {batch:,} samples per step"
    if layout:
        sizes = ", ".join(f"{axis} {layout[axis]}" for axis in ("tp", "pp", "dp", "cp", "ep") if axis in layout)
        yield (
            "layout",
            f"{sizes} (ranks: {layout['world_size']:,}) on {layout['device']}, computed in {layout['dtype']}",
        )


def _losses(candidate: Candidate) -> Iterator[tuple[str, str]]:
    """Yield rows of the run's last losses up to the checkpoint's step, from metrics.jsonl."""
    manifest = candidate.manifest
    runs_dir = manifest.config.get("runtime", {}).get("runs_dir", "runs")
    places = (candidate.folder.parent.parent, Path(runs_dir) / manifest.run)
    records = next((found for place in places if (found := read_records(place / METRICS).records)), ())
    made = [record for record in records if record.get("step", 0) <= manifest.state.step]
    for what, name in (("loss", "loss"), ("validation loss", "val_loss")):
        if measured := [record for record in made if record.get(name) is not None]:
            yield what, f"{measured[-1][name]:.4f} nats per token at step {measured[-1]['step']:,}"


def _program(candidate: Candidate, commit: str) -> Iterator[tuple[str, str]]:
    versions = candidate.manifest.layout.get("versions", {})
    if versions:
        yield "trained with", ", ".join(f"{name} {version}" for name, version in versions.items())
    yield "exported by", f"Triaxis, {commit}"


def _loading(reads_text: bool) -> str:
    """Build the section that shows how to load the folder."""
    load = "model = AutoModelForCausalLM.from_pretrained(folder)\n"
    if not reads_text:
        return f"""This folder has no tokenizer.

```python
from transformers import AutoModelForCausalLM

folder = "."  # this folder
{load}```
"""
    return f"""```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # this folder
{load}tokenizer = AutoTokenizer.from_pretrained(folder)
tokens = tokenizer("The", return_tensors="pt", add_special_tokens=False)
print(tokenizer.decode(model.generate(**tokens, max_new_tokens=40)[0]))
```
"""
