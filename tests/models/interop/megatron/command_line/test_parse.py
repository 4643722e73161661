"""Words of a Megatron-LM command line: files of them, launchers before them, and everything that is wrong at once."""

from pathlib import Path

import pytest

from triaxis.engine.config.names.megatron_arguments import ARGUMENTS, READ, REFUSED, WITHOUT_EFFECT
from triaxis.engine.errors import ConfigError
from triaxis.models.interop.megatron.command_line.parse import parse, pattern, words_of


def test_words_come_from_texts_and_from_files(tmp_path: Path) -> None:
    path = tmp_path / "args.txt"
    path.write_text("# the model\n--num-layers 4 \\\n  --split '99,1,0'  # shares\n--bf16\n")
    words = words_of(["--lr 1e-3 --data-path a", f"@{path}", "--fp16"])
    assert words == ["--lr", "1e-3", "--data-path", "a", "--num-layers", "4", "--split", "99,1,0", "--bf16", "--fp16"]
    for wrong, source in (("--split '99", "the command line"), (f"@{tmp_path}/none", f"@{tmp_path}/none")):
        with pytest.raises(ConfigError, match=r"cannot be (split|read)") as error:
            words_of([wrong])
        assert str(error.value).startswith(source)


def test_a_launcher_is_left_out() -> None:
    line = "torchrun --nproc_per_node 8 tools/pretrain_gpt.py --num-layers 4 --tokenizer-model=a.py --log-throughput"
    parsed = parse(line.split())
    assert (parsed.args["num_layers"], parsed.args["tokenizer_model"], parsed.problems) == (4, "a.py", [])
    assert parsed.without_effect == {"logging": ["log-throughput"]} and parsed.args["hidden_dropout"] == 0.1
    assert parse(["--num-layers", "4", "--tokenizer-model", "a.py"]).args["num_layers"] == 4


def test_every_problem_of_the_words_is_found() -> None:
    line = (
        "stray --num-layer 4 --hidden-size --lr abc --bf16 yes --num-layers 2.5 --save $DIR --split 1 2 --log-throughput 3 "
        "--fp8-format --seed 1 --seed 2 --my_own 7 --moe-layer-freq [0]*99999 --adam-beta1 0.9 --adam-beta1 0.9 --other"
    )
    problems = parse(line.split(), ignored={"other"}).problems
    for words in (
        "stray: no argument",
        "--num-layer: Megatron-LM has no such argument, so what it does is unknown. Did you mean --num-layers?",
        "--hidden-size has no value",
        "--lr abc: must be a number.",
        "--bf16 yes: it takes no value",
        "--num-layers 2.5: must be a whole number.",
        "--save $DIR: a shell variable that was not filled in",
        "--split 1 2: it takes one value. Remove 2",
        "--log-throughput 3: it takes no value",
        "--fp8-format has no value",
        "--seed is given twice, with 1 and 2",
        "--my_own: Megatron-LM has no such argument, so what it does is unknown. Remove it, or pass it over: --ignore my_own.",
        "--moe-layer-freq [0]*99999: must be a whole number or a list",
    ):
        assert sum(problem.startswith(words) for problem in problems) == 1, words
    assert len(problems) == 13


def test_an_ignored_argument_takes_all_its_words() -> None:
    """A script's output has lost the quotes around one value of three words."""
    line = "--num-layers 4 --step-batch-size-schedule 0:16 2.4B:320 4.8B:624 --log-throughput 3 --bf16"
    parsed = parse(line.split(), ignored={"step-batch-size-schedule", "log-throughput"})
    assert not parsed.problems and parsed.args["bf16"] and "step-batch-size-schedule" in parsed.missing
    assert len(parse(line.split()).problems) == 2


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("3", 3),
        ("([1]*3+[0]*1)*2", [1, 1, 1, 0] * 2),
        ("2*[0,1]", [0, 1, 0, 1]),
        ("127,0", [127, 0]),
        ("(-1,0)", [-1, 0]),
    ],
)
def test_patterns_are_numbers_and_lists(text: str, made: object) -> None:
    assert pattern(text) == made


@pytest.mark.parametrize(
    "text", ["[1]+2", "[1]*[2]", "f()", "[True]*2.0", "[1]*-1", "[[1]*9999]*2+[1]*9999", "__import__"]
)
def test_other_expressions_are_refused(text: str) -> None:
    with pytest.raises((ValueError, SyntaxError)):
        made = pattern(text)
        assert not isinstance(made, list) or len(made) > 10_000


def test_an_argument_is_in_the_table_once() -> None:
    texts = [text.replace("\n    ", " ") for groups in (READ, REFUSED) for text in groups.values()]
    names = [line.split()[0] for text in texts for line in text.strip().splitlines()]
    names += [word for text in WITHOUT_EFFECT.values() for word in text.split()]
    assert len(names) == len(ARGUMENTS)
