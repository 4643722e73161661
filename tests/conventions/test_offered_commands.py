"""Every command that the product's texts offer runs as it is printed; every one that they mention exists.

    triaxis(f"train {path}") in a message        runs here, with its holes filled in, and does what the sentence says
    `triaxis verify` in a text                   is a command, with verbs and options that it has
    examples of --help, heads of the scripts     run here; what starts ranks, with --dry-run

A new offer without a run fails. `NOT_RUN` lists what does not run here, and the tests that run it.
"""

import os
import re
import shlex
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.documented import PAGES, ROOT, commands, make_workplace
from tests.launch.command_line import OTHER_LAUNCHERS, OTHER_RUNS
from tests.launch.small_checkpoint import GPT, save
from tests.offered import HELPERS, PROSE, examples, literals, mentioned, offers, parser_for, require_readable
from triaxis.engine.config.load import load_config
from triaxis.launch import cli


@dataclass(frozen=True)
class Offer:
    """A run of an offered line: what fills its holes and words in capitals, and what it then prints or makes."""

    fills: dict[str, str] = field(default_factory=dict)
    prints: str = ""
    makes: str = ""


NEEDS_A_NETWORK = (
    "pip needs a network; test_an_extra_exists looks into pyproject.toml, tests/engine/test_program.py at the line"
)

SAVED = "saved/checkpoints/step_00000000"
TRAINS = "data.train=data/web data.tokenizer=bytes model.vocab_size=257"

MEGATRON = """--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 256 --max-position-embeddings 256 --bf16
--micro-batch-size 1 --global-batch-size 8 --lr 1e-3 --train-iters 100 --mock-data"""

OFFERED: dict[str, Offer | str] = {
    "triaxis checkpoint inspect {shlex.quote(str(folder))} --tensors": Offer(
        {"{shlex.quote(str(folder))}": SAVED}, prints="layers.1.mlp"
    ),
    "triaxis prepare --input 'TEXT/*.txt' --tokenizer {shlex.quote(tokenizer)} --output {shlex.quote(self.prefix)}": Offer(
        {"TEXT": "books", "{shlex.quote(self.prefix)}": "data/one", "{shlex.quote(tokenizer)}": "bytes"},
        makes="data/one.bin",
    ),
    "triaxis prepare --tokenizer {shlex.quote(tokenizer)} --input TEXT --output {shlex.quote(prefix)}-2": Offer(
        {"TEXT": "books", "{shlex.quote(prefix)}": "data/web", "{shlex.quote(tokenizer)}": "bytes"},
        makes="data/web-2.bin",
    ),
    "triaxis prepare --tokenizer {shlex.quote(tokenizer)} --input 'TEXT/*.txt' --output PREFIX": Offer(
        {"TEXT": "books", "PREFIX": "data/two", "{shlex.quote(tokenizer)}": "bytes"}, makes="data/two.bin"
    ),
    "triaxis prepare --stdlib --output data/stdlib": Offer(makes="data/stdlib.bin"),
    "triaxis train {shlex.join(overrides)}": Offer(
        {"{shlex.join(overrides)}": TRAINS}, prints="data.tokenizer=bytes model.vocab_size=257"
    ),
    "triaxis train {shlex.quote(str(args.out / TRAIN_CONFIG))} data.train=PREFIX": Offer(
        {"{shlex.quote(str(args.out / TRAIN_CONFIG))}": "run.yaml", "PREFIX": "data/web"}, prints="data.train=data/web"
    ),
    "triaxis train {shlex.quote(str(config_path))} data.train=PREFIX data.tokenizer=TOKENIZER": Offer(
        {"{shlex.quote(str(config_path))}": "run.yaml", "PREFIX": "data/web", "TOKENIZER": "bytes"},
        prints="tokenizer=bytes",
    ),
    "triaxis train {shlex.quote(str(args.config))} {load} checkpoint.load_what={what}": Offer(
        {
            "{shlex.quote(str(args.config))}": "run.yaml",
            "{load}": "checkpoint.load=saved/checkpoints",
            "{what}": "weights",
        },
        prints="checkpoint.load=saved/checkpoints",
    ),
    "triaxis train {shlex.quote(str(path))}": Offer({"{shlex.quote(str(path))}": "run.yaml"}, prints="run.yaml"),
    "triaxis evaluate {run} --text FILE": Offer({"{run}": SAVED, "FILE": "books/0.txt"}, prints="per byte"),
    "triaxis generate {run} --prompt 'Once upon a time'": Offer({"{run}": SAVED}, prints="Once upon a time"),
    "triaxis export {run} {exported}": Offer({"{run}": SAVED, "{exported}": "run-hf"}, makes="run-hf/README.md"),
    "triaxis new --from {shlex.quote(theirs)} > megatron.yaml": Offer(
        {"{shlex.quote(theirs)}": f"'{MEGATRON} --vocab-size 300'", " > megatron.yaml": ""}, prints="num_layers: 4"
    ),
    "triaxis {shlex.join([*command, *words])}": Offer(
        {"{shlex.join([*command, *words])}": "train run.yaml"}, prints="run.yaml"
    ),
    "triaxis bench {shlex.quote(_near(GPU_CONFIG))}": Offer(
        {"{shlex.quote(_near(GPU_CONFIG))}": "run.yaml"}, prints="8 on 1 node"
    ),
    "triaxis train run.yaml": Offer(prints="run.yaml"),
    "triaxis config check run.yaml": Offer(prints="run.yaml: ok"),
    "triaxis report {shlex.quote(str(directory.path))} --timeline": "needs the timeline of a run: tests/engine/telemetry/timing",
    "triaxis import {shlex.quote(args['load'])} imported": "needs a checkpoint of Megatron-LM: "
    "tests/launch/commands/test_convert_megatron.py",
    "install text": NEEDS_A_NETWORK,
    "install hf": NEEDS_A_NETWORK,
    "install tensorboard": NEEDS_A_NETWORK,
    "install te --no-build-isolation": NEEDS_A_NETWORK,
    "pip_install triton": NEEDS_A_NETWORK,
    "pip_install {requirement}": NEEDS_A_NETWORK,
}
"""The lines of messages, and how each is run; or the reason why one is not."""

NOT_RUN = {
    r"triaxis (evaluate|generate|report|checkpoint) .*": "tests/launch/runs/test_checkpoints_page.py",
    r"triaxis (import|export) .*": "tests/launch/commands/test_convert.py",
    r"triaxis data .*": "tests/launch/commands/test_data.py",
    r"triaxis new .*": "tests/launch/commands/test_new.py",
    r"triaxis footprint .*": "tests/launch/footprint/test_footprint.py",
    r"(OMP_NUM_THREADS=1 )?triaxis bench --device .*": "tests/launch/tuning/test_calibrate.py",
    r"triaxis prepare --(input|tokenizer) .*": "tests/launch/prepare/test_prepare.py",
    r"srun .*|sbatch .*|bash launch/slurm/.*|HOSTFILE=.*": "tests/launch/slurm/test_slurm.py",
    r"bash launch/bootstrap\.sh.*": "tests/launch/start/test_bootstrap.py",
}
"""Examples that need a finished run, a model's folder, files of a kind, a cluster or minutes, and where their like runs. They are
still read by the command's own parser, with their config and overrides."""

STARTS_RANKS = ("train", "bench", "verify", "doctor")
SLOW = ("triaxis schedule check configs/gpt_175b.yaml", "triaxis plan ", "triaxis prepare --stdlib")

DOCUMENTED = {line for page in PAGES for line in commands(page.read_text())}
"""`test_documented_commands.py` runs them."""


def is_run(line: str) -> bool:
    return not any(re.fullmatch(pattern, line) for pattern in NOT_RUN)


def marked(line: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.slow] if line.startswith(SLOW) else []


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like the checkout, with the files that offers and examples name."""
    folder = tmp_path_factory.mktemp("checkout")
    make_workplace(folder)
    for name, config in (("run.yaml", "gpt_tiny"), ("my.yaml", "gpt_125m")):
        (folder / name).symlink_to(ROOT / "configs" / f"{config}.yaml")
    (folder / "books").mkdir()
    for number in range(3):
        (folder / "books" / f"{number}.txt").write_text("Call me Ishmael. " * 200)
    save(folder / "saved", GPT)
    (folder / "path" / "to").mkdir(parents=True)
    (folder / "path" / "to" / "config.json").write_text(LLAMA)
    (folder / "args.txt").write_text(MEGATRON)
    (folder / "moe_args.txt").write_text(
        f"{MEGATRON} --moe-aux-loss-coeff 0.01 --moe-router-load-balancing-type aux_loss --num-experts 4 --disable-bias-linear"
    )
    return folder


LLAMA = """{"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 8192,
"num_attention_heads": 4, "num_hidden_layers": 8, "num_key_value_heads": 2, "rms_norm_eps": 1e-05, "vocab_size": 300}"""


MOE = " --moe-aux-loss-coeff 0.01 --moe-router-load-balancing-type aux_loss --num-experts 4 --disable-bias-linear"


@pytest.fixture
def here(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The workplace as the current folder, without the variables of other runs."""
    for name in list(os.environ):
        if name.startswith(OTHER_LAUNCHERS) or name in OTHER_RUNS:
            monkeypatch.delenv(name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("webbrowser.open", lambda address: True)  # machines of tests have none
    monkeypatch.chdir(workplace)
    return workplace


def words_of(line: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the words behind `triaxis`, which launch/pretrain_gpt.sh hands to `train`; set the variables in front."""
    words = shlex.split(re.sub(r" > \S+$", "", line))
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        name, _, value = words.pop(0).partition("=")
        monkeypatch.setenv(name, value)
    if words[:2] == ["bash", "launch/pretrain_gpt.sh"]:
        return ["train", *words[2:]]
    return words[words.index("triaxis") + 1 :]


def run(line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    words = words_of(line, monkeypatch)
    dry = ["--dry-run"] if words[0] in STARTS_RANKS and "--dry-run" not in words else []
    exit_code = cli.main([*words, *dry])
    shown = capsys.readouterr()
    assert exit_code == 0, f"{line}\n{shown.out}\n{shown.err}"
    assert shown.out.strip(), f"{line} said nothing"
    return shown.out


RUNS = {line: offer for line, offer in OFFERED.items() if isinstance(offer, Offer)}


@pytest.mark.parametrize("line", [pytest.param(one, marks=marked(one)) for one in RUNS])
def test_an_offered_line_does_what_its_message_says(
    line: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    offer, filled = RUNS[line], line
    for hole, text in offer.fills.items():
        assert hole in filled
        filled = filled.replace(hole, text)
    assert "{" not in filled and (offer.prints or offer.makes)
    assert offer.prints in run(filled, monkeypatch, capsys)
    assert (here / offer.makes).exists()


def test_every_offer_has_a_run() -> None:
    found = {one.text: one.place for one in offers()}
    without = {text: place for text, place in found.items() if text not in OFFERED}
    assert not without, "give each an entry in OFFERED: what fills its holes, and what it then prints or makes"
    assert not OFFERED.keys() - found.keys(), "no message offers it any more"
    assert len(OFFERED) - len(RUNS) <= 10


@pytest.mark.parametrize("line", [line for line in OFFERED if line.startswith("install ")])
def test_an_extra_exists(line: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert line.split()[1] in extras


def test_few_examples_are_not_run_here() -> None:
    assert len(NOT_RUN) <= 10
    for pattern, file in NOT_RUN.items():
        assert (ROOT / file).is_file() and any(re.fullmatch(pattern, line) for line in examples())


EXAMPLES = [line for line in examples() if is_run(line) and line not in DOCUMENTED]


@pytest.mark.parametrize("line", [pytest.param(one, marks=marked(one)) for one in EXAMPLES])
def test_an_example_runs(
    line: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(line, monkeypatch, capsys)


@pytest.mark.parametrize("line", [line for line in examples() if "triaxis " in line and not is_run(line)])
def test_an_example_that_does_not_run_here_is_read(line: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parser, rest = parser_for(words_of(line, monkeypatch))
    given = parser.parse(rest)
    if getattr(given, "config", None) is not None and given.config.is_file():
        open_dp = {"world_size": given.world_size} if getattr(given, "world_size", None) else {}
        load_config(given.config, given.overrides, **open_dp)


def test_every_command_that_a_text_mentions_exists() -> None:
    problems = []
    for text in literals():
        for words in mentioned(text.text):
            if words.startswith("`"):
                parser, rest = parser_for(words.strip("`").split()[1:])
                if strangers := [word for word in rest if word not in parser._option_string_actions]:
                    problems.append(f"{text.place}: {words}: {strangers}; a whole line is built by triaxis()")
            elif not words.startswith(PROSE):
                problems.append(f"{text.place}: {words}: build it by {' or '.join(HELPERS)} (engine/program.py)")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    "output",
    [
        "train with  triaxis train run.yaml --from-scrach",
        "Check it:\n  .venv/bin/triaxis config chek run.yaml\n",
        "read `triaxis evaluat runs/a --text b`",
        "again:  triaxis prepare --input 'a",
    ],
)
def test_a_printed_line_that_the_program_refuses_is_found(output: str) -> None:
    require_readable(
        "done\n  triaxis train 'a b.yaml' train.steps=9\n`triaxis verify` goes, and  triaxis config check a.yaml  too"
    )
    with pytest.raises(AssertionError, match="refuses"):
        require_readable(output)
