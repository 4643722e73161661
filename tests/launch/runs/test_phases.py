"""Runs of several phases, from one command: the launcher starts each phase by itself, in its own layout.

layouts      64 tokens at tp 2, dp 2  ->  256 at tp 2, cp 2       against one process through the same phases, in float64
branches     one stable run, and two decays on other data from its checkpoint
"""

import json
import shutil
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests import netns
from tests.launch.command_line import PRETRAIN, TRIAXIS, ended, events, records, run, started
from tests.soak.scene import address
from triaxis.engine.checkpoint.directory import CheckpointDirectory
from triaxis.engine.checkpoint.format.manifest import read_manifest
from triaxis.engine.config.load import load_config
from triaxis.engine.config.quantities.run_phases import at_phase, run_phases
from triaxis.engine.data.datasets import open_run_datasets
from triaxis.engine.data.skipped import SkippedRanges
from triaxis.launch.reads.ledger import reads_of_step

pytestmark = pytest.mark.distributed

MODEL = "num_layers: 2, hidden_size: 32, num_attention_heads: 4, seq_length: 64, vocab_size: 257"
CONFIG = f"""\
model: {{{MODEL}}}
data: {{train: [first, second], attention: within, split: [1, 0, 0]}}
train: {{global_batch_size: 8, micro_batch_size: 2}}
optimizer: {{lr: 0.003, lr_schedule: wsd, warmup_tokens: 1024, cooldown_tokens: 2048}}
precision: {{dtype: float64}}
checkpoint: {{interval: 4}}
telemetry: {{sample_tokens: 0}}
phases:
"""
LAYOUTS = (
    "parallel.tp: 2, parallel.dp: 2",
    "model.seq_length: 256, data.train: [{path: second, weight: 3}, first], train.global_batch_size: 2, parallel.tp: 2, "
    "parallel.dp: 1, parallel.cp: 2, train.micro_batch_size: 1",
)
ALONE = (
    "parallel.dp: 1",
    "model.seq_length: 256, data.train: [{path: second, weight: 3}, first], train.global_batch_size: 2",
)
NUM_STEPS, EDGE = 9, 5
"""Steps of 512 tokens; the cooldown begins at the edge."""

DECAYS = (("decay_a", "first"), ("decay_b", "second"))
"""Names of runs, and the corpus of their second phase."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("phases")
    for name, word in (("first", "one two "), ("second", "three four five ")):
        lines = [json.dumps({"text": f"{number} {word * (number % 9 + 1)}"}) for number in range(70)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
        run(folder, *TRIAXIS, "prepare", "--input", f"{name}.jsonl", "--tokenizer", "bytes", "--output", name)
    return folder


def trained(folder: Path, name: str, phases: tuple[str, ...], untils: tuple[int, ...], *more: str) -> Path:
    """The directory of a run through its phases, from one command."""
    entries = [
        f"  - {{name: s{n}, until: {until}, {fields}}}\n"
        for n, (until, fields) in enumerate(zip(untils, phases, strict=True))
    ]
    (folder / f"{name}.yaml").write_text(CONFIG + "".join(entries))
    with started(folder, *PRETRAIN, f"{name}.yaml", *more) as launcher:
        said = ended(launcher, 240.0)
    assert said.exit_code == 0, said.err
    return folder / "runs" / name


@pytest.fixture(scope="module")
def in_layouts(folder: Path) -> Path:
    return trained(folder, "layouts", LAYOUTS, (EDGE * 512, NUM_STEPS * 512))


def test_phases_in_their_layouts_train_as_one_process_does(folder: Path, in_layouts: Path) -> None:
    alone = records(trained(folder, "alone", ALONE, (EDGE * 512, NUM_STEPS * 512)) / "metrics.jsonl")
    ours = records(in_layouts / "metrics.jsonl")
    assert [one["step"] for one in ours] == [one["step"] for one in alone] == list(range(1, NUM_STEPS + 1))
    for mine, other in zip(ours, alone, strict=True):
        for key in ("consumed_samples", "consumed_tokens", "loss_tokens", "lr"):
            assert mine[key] == other[key]
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-11)
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-9)
    assert ours[EDGE]["consumed_samples"] - ours[EDGE - 1]["consumed_samples"] == 2
    assert ours[-1]["consumed_tokens"] == NUM_STEPS * 512


def test_the_optimizer_goes_along(in_layouts: Path) -> None:
    newest = CheckpointDirectory(in_layouts / "checkpoints").latest()
    assert newest is not None
    state = read_manifest(newest).state
    assert (state.step, state.num_updates, state.consumed_samples) == (
        NUM_STEPS,
        NUM_STEPS,
        EDGE * 8 + (NUM_STEPS - EDGE) * 2,
    )
    begun = [event for event in events(in_layouts) if event["kind"] == "begun"]
    assert [event["step"] for event in begun] == [0, EDGE]
    assert begun[1]["loaded"] == "all"


def test_each_document_is_read_once_over_both_phases(
    folder: Path, in_layouts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No token is an input twice before its corpus is at its end, by the parts that `data which` lists."""
    monkeypatch.chdir(folder)
    read: Counter[tuple[str, int, int, int]] = Counter()
    config = load_config(in_layouts / "config.yaml")
    for phase in run_phases(config):
        source = open_run_datasets(at_phase(config, phase.name)).train_after(SkippedRanges())
        for step in range(phase.first_step, phase.end_step):
            for sample in reads_of_step(step + 1, phase, source, SkippedRanges()):
                *parts, last = sample.parts
                for part in (*parts, last._replace(length=last.length - 1)):
                    for token in range(part.first, part.first + part.length):
                        read[sample.corpus, sample.epoch, part.document, token] += 1
    assert len(read) > 4000
    twice = {key: count for key, count in read.items() if count > 1}
    # A label at the end of an unread window may be an input of the next sample, and was one of the window behind it.
    assert len(twice) < 0.02 * len(read) and set(twice.values()) <= {2}


@pytest.mark.slow
def test_two_decays_share_every_bit_up_to_the_fork(folder: Path) -> None:
    """Two runs that differ behind the fork are one run up to it, and one branches off from the other's checkpoint there."""
    ends = (EDGE * 512, NUM_STEPS * 512)
    phases = {name: ("parallel.dp: 1", f"data.train: {corpus}, parallel.dp: 1") for name, corpus in DECAYS}
    runs = {name: trained(folder, name, phases[name], ends) for name in phases}
    made = {name: [one["loss"] for one in records(run / "metrics.jsonl")] for name, run in runs.items()}
    forks = [run / "checkpoints" / f"step_{EDGE:08d}" for run in runs.values()]
    assert made["decay_a"][:EDGE] == made["decay_b"][:EDGE]
    assert read_manifest(forks[0]).fingerprint == read_manifest(forks[1]).fingerprint
    assert made["decay_a"][EDGE] != made["decay_b"][EDGE], "the decays read other samples"
    branch = trained(
        folder, "branch", phases["decay_b"], ends, f"checkpoint.load={forks[0]}", "checkpoint.accept=[phases]"
    )
    assert [one["loss"] for one in records(branch / "metrics.jsonl")] == made["decay_b"][EDGE:]


@pytest.mark.slow
def test_other_phases_in_the_past_are_refused(folder: Path, in_layouts: Path) -> None:
    text = (folder / "layouts.yaml").read_text().replace("model.seq_length: 256", "model.seq_length: 128")
    (folder / "other.yaml").write_text(text)
    checkpoint = in_layouts / "checkpoints" / f"step_{NUM_STEPS:08d}"
    said = run(folder, *PRETRAIN, "other.yaml", f"checkpoint.load={checkpoint}", "checkpoint.accept=[phases]")
    assert said.exit_code == 2
    assert "differently from this run's phases" in said.err


@pytest.mark.slow
def test_a_launcher_on_each_node_goes_through_the_edge(folder: Path, in_layouts: Path) -> None:
    """Each launcher starts the next phase when its own ranks have ended; their store outlives the phase."""
    shutil.copy(folder / "layouts.yaml", folder / "nodes.yaml")
    meeting = {"NNODES": "2", "MASTER_ADDR": address(0), "MASTER_PORT": "29500", "NPROC_PER_NODE": "2"}
    with netns.hosts(2) as hosts, ExitStack() as launchers:
        each = [
            launchers.enter_context(
                started(folder, "ip", "netns", "exec", host, *PRETRAIN, "nodes.yaml", NODE_RANK=str(node), **meeting)
            )
            for node, host in enumerate(hosts)
        ]
        for launcher in each:
            said = ended(launcher, 240.0)
            assert said.exit_code == 0, said.err
    ours, others = (records(run / "metrics.jsonl") for run in (folder / "runs" / "nodes", in_layouts))
    assert [one["step"] for one in ours] == list(range(1, NUM_STEPS + 1))
    for mine, other in zip(ours, others, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-11)
