"""The adapters of examples/subjects: peers are equal, and what is planted in them is named.

A peer that is not installed is left out: torchtitan and DeepSpeed are of no extra.
"""

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.documented import ROOT
from tests.launch.command_line import TRIAXIS, Ended, run
from tests.verify.subjects.planted import PLANTED, Planted

ADAPTERS = ROOT / "examples" / "subjects"
PAGE = ROOT / "docs" / "prove-your-engine.md"

TRANSPOSED_HEAD = Planted(
    "NovaSky-AI/SkyRL#1886: Megatron-Core reduces a copy of a gradient that is not contiguous, and returns the gradient",
    "megatron_core",
    "tp=2,pp=2",
    "tp",
    ("model.norm",),
    (
        ('"sequence_parallel": tp > 1', '"sequence_parallel": False'),
        (
            "weights = job.weights()\n",
            "from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region\n"
            "def head(hidden, weight=None, **_):\n"
            "    hidden = copy_to_tensor_model_parallel_region(hidden).transpose(0, 1).contiguous()\n"
            "    return (hidden @ gpt.output_layer.weight.T).transpose(0, 1).contiguous(), None\n"
            "if mpu.is_pipeline_last_stage():\n"
            "    gpt.output_layer.forward = head\n"
            "weights = job.weights()\n",
        ),
    ),
    ("train.micro_batch_size=2",),
)


def judged(folder: Path, adapter: Path, *words: str) -> Ended:
    return run(folder, *TRIAXIS, "verify", "llama3_8b", "--subject", str(adapter), *words, within_seconds=1200.0)


def of_layouts(*layouts: str) -> list[str]:
    return [word for layout in layouts for word in ("--layout", layout)]


def needs(*packages: str) -> None:
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        pytest.skip(f"{', '.join(missing)} is not installed")


@pytest.mark.parametrize("adapter", sorted(ADAPTERS.glob("*.py")), ids=lambda path: path.stem)
def test_an_adapter_is_short(adapter: Path) -> None:
    lines = re.sub(r'^""".*?"""', "", adapter.read_text(), flags=re.DOTALL).splitlines()
    assert sum(bool(re.match(r"(?!import |from )\s*\S", line)) for line in lines) <= 120
    assert adapter.name in PAGE.read_text() and adapter.name in (ADAPTERS / "README.md").read_text()


SEVEN = of_layouts("tp=2,pp=2,dp=2", "tp=2,pp=2", "tp=2,dp=2", "pp=2,dp=2", "tp=2", "pp=2", "dp=2")


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["torch_fsdp2", "megatron_core"])
def test_a_peer_is_equal_to_itself_and_to_ours(adapter: str, tmp_path: Path) -> None:
    words = ["model.tie_embeddings=true"] if adapter == "megatron_core" else []
    found = judged(tmp_path, ADAPTERS / f"{adapter}.py", *words, *SEVEN, "--against", "triaxis")
    assert found.exit_code == 0 and "all of 8 comparisons" in found.out, found.out + found.err


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["torch_fsdp2", "megatron_core"])
@pytest.mark.parametrize("seed", range(1, 6))
def test_no_seed_is_a_false_alarm(adapter: str, seed: int, tmp_path: Path) -> None:
    found = judged(tmp_path, ADAPTERS / f"{adapter}.py", f"train.seed={seed}", *of_layouts("tp=2,pp=2", "tp=2,dp=2"))
    assert found.exit_code == 0 and "all of 2 comparisons" in found.out, found.out + found.err


@pytest.mark.slow
def test_torchtitan_is_equal_but_for_its_pipeline(tmp_path: Path) -> None:
    needs("torchtitan", "triton")
    found = judged(
        tmp_path, ADAPTERS / "torchtitan_llama3.py", *of_layouts("tp=2,dp=2", "pp=2,dp=2"), "--against", "triaxis"
    )
    assert found.exit_code == 1 and "1 of 3 comparisons show a difference" in found.out, found.out + found.err
    assert re.search(r"likely cause: pp: every gradient: \d+ times what it should be", found.out), found.out


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_deepspeed_is_equal_in_each_stage(stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("deepspeed")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("ZERO_STAGE", stage)
    dtype = ["--dtype", "fp32" if stage == "1" else "float64"]  # the first adds gradients in fp32
    found = judged(tmp_path, ADAPTERS / "deepspeed_zero.py", *of_layouts("dp=2"), "--against", "triaxis", *dtype)
    assert found.exit_code == 0 and "all of 2 comparisons" in found.out, found.out + found.err


@pytest.mark.slow
def test_the_adapter_on_the_page(tmp_path: Path) -> None:
    (text,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    (tmp_path / "mine.py").write_text(text)
    found = run(tmp_path, *TRIAXIS, "verify", "gpt_tiny", "--subject", "mine.py", *of_layouts("dp=2", "dp=4"))
    assert found.exit_code == 0 and "all of 2 comparisons" in found.out, found.out + found.err
    (tmp_path / "averaged.py").write_text(
        text.replace(
            "    job.gradients(",
            "    for weight in weights.values():\n        weight.grad /= dp\n    job.gradients(",
            1,
        )
    )
    found = run(tmp_path, *TRIAXIS, "verify", "gpt_tiny", "--subject", "averaged.py", *of_layouts("dp=2"))
    assert found.exit_code == 1 and "likely cause: dp: every gradient: 0.5 times" in found.out, found.out + found.err
    mean = "one.counted.sum() / len(job.microbatches(step))"
    (tmp_path / "mean.py").write_text(text.replace("job.num_counted(step)", mean, 1))
    words = [*of_layouts("dp=2"), "--against", "triaxis"]
    found = run(tmp_path, *TRIAXIS, "verify", "gpt_tiny", "--subject", "mean.py", *words)
    assert found.exit_code == 1 and "one process against triaxis" in found.out, found.out + found.err
    assert "2/2  equal" in found.out, found.out


def planted_in(folder: Path, one: Planted) -> Path:
    text = (ADAPTERS / f"{one.adapter}.py").read_text()
    for old, new in one.changes:
        assert text.count(old) == 1, f"{one.name}: {old!r} is there {text.count(old)} times"
        text = text.replace(old, new)
    path = folder / f"{one.adapter}.py"
    path.write_text(text)
    return path


def is_named(out: str, axis: str | None, parameters: Sequence[str]) -> bool:
    """Return whether the cause has the axis, and a parameter stands there or in a table that shows all that differ."""
    said = re.search(r"likely cause:(?: (tp|pp|dp|cp):)?.*", out)
    if said is None or said[1] != axis:
        return False
    looked_at = said[0]
    if not re.search(r"^and \d+ more$", out, flags=re.MULTILINE):
        looked_at += "".join(out.partition("different, first")[2].split())
    return not parameters or any(name in looked_at for name in parameters)


@pytest.mark.slow
@pytest.mark.parametrize("one", [*PLANTED, TRANSPOSED_HEAD], ids=lambda one: one.name)
def test_a_planted_mistake_is_named(one: Planted, tmp_path: Path) -> None:
    found = judged(tmp_path, planted_in(tmp_path, one), *one.overrides, *of_layouts(one.layout))
    assert found.exit_code == 1, found.out + found.err
    assert is_named(found.out, one.axis, one.parameters), found.out
