"""A run keeps secrets to itself and writes only where its configuration says."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.command_line import PRETRAIN, TRIAXIS, Ended, events, run

pytestmark = pytest.mark.distributed

MARKER = "marker0123456789abcdef0123456789abcdef42"
CONFIG = """
model: {num_layers: 1, hidden_size: 16, num_attention_heads: 2, seq_length: 8, vocab_size: 257}
data: {synthetic: true}
train: {steps: 2, global_batch_size: 2}
checkpoint: {interval: 1}
telemetry: {wandb: {project: secrets}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("secrets")
    (place / "work").mkdir()
    (place / "home").mkdir()
    (place / "work" / "small.yaml").write_text(CONFIG)
    return place


@pytest.fixture(scope="module")
def trained(folder: Path) -> Ended:
    """A run with a key in its environment, offline, and its page."""
    variables = {
        "WANDB_API_KEY": MARKER,
        "WANDB_MODE": "offline",
        "HOME": str(folder / "home"),
        "HF_TOKEN": MARKER[::-1],
    }
    # A key in a value of the configuration, which is a path too.
    said = run(folder / "work", *PRETRAIN, "small.yaml", f"data.cache_dir={folder}/cache-{MARKER}", **variables)
    assert said.exit_code == 0, said.err
    assert run(folder / "work", *TRIAXIS, "report", "runs/small", **variables).exit_code == 0
    return said


def files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def test_no_file_of_a_run_and_nothing_it_says_holds_a_key(folder: Path, trained: Ended) -> None:
    there = {path.relative_to(folder / "work" / "runs" / "small").parts[0] for path in files(folder / "work" / "runs")}
    assert there >= {"metrics.jsonl", "events", "logs", "checkpoints", "wandb", "config.yaml", "report.html"}
    for secret in (MARKER.encode(), MARKER[::-1].encode()):
        assert [path for path in files(folder) if secret in path.read_bytes()] == []
    assert MARKER not in trained.out + trained.err
    assert f"data.cache_dir={folder}/cache-[redacted]" in trained.out
    assert f"{folder}/cache-[redacted]" in (folder / "work/runs/small/config.yaml").read_text()
    modes = [event["mode"] for event in events(folder / "work/runs/small") if event["kind"] == "wandb"]
    assert modes == ["offline"], "wandb did write"
    assert "to upload it: wandb sync runs/small/wandb/offline-run-*" in trained.out


@pytest.mark.slow
def test_an_error_quotes_a_path_without_its_key_and_the_run_goes_on_with_a_renewed_one(
    folder: Path, trained: Ended
) -> None:
    assert trained.exit_code == 0
    renewed = "renewed" + MARKER
    cache = f"data.cache_dir={folder}/cache-{renewed}"
    said = run(folder / "work", *PRETRAIN, "small.yaml", cache, WANDB_API_KEY=renewed)
    assert said.exit_code == 0, said.err
    started = run(
        folder / "work",
        *PRETRAIN,
        "small.yaml",
        "runtime.name=other",
        f"checkpoint.load={folder}/none-{renewed}",
        HF_TOKEN=renewed,
        WANDB_MODE="disabled",
    )
    assert started.exit_code == 2 and f"{folder}/none-[redacted]" in started.out + started.err
    for ended in (said, started):
        assert MARKER not in ended.out + ended.err
    assert [path for path in files(folder) if MARKER.encode() in path.read_bytes()] == []


def test_a_run_writes_in_its_own_folder_alone(folder: Path, trained: Ended) -> None:
    assert trained.exit_code == 0
    assert {path.name for path in (folder / "work").iterdir()} == {"small.yaml", "runs"}
    assert {path.name for path in (folder / "work" / "runs").iterdir()} <= {"small", "other"}
    assert list(files(folder / "home")) == [], "neither does wandb write elsewhere"


def test_a_name_that_leads_out_is_a_mistake_before_anything_starts(folder: Path) -> None:
    said = run(folder / "work", *PRETRAIN, "small.yaml", RUN_NAME="../outside")
    assert said.exit_code == 2 and "runtime.runs_dir" in said.err and "runtime.name" in said.err
    assert not (folder / "outside").exists()
