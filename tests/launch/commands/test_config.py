"""`triaxis config`, and the configs that are shipped."""

import re
from pathlib import Path

import pytest

from tests.models.interop.huggingface.published_experts import PUBLISHED_EXPERTS
from triaxis.engine.config.load import load_config
from triaxis.engine.errors import ConfigError
from triaxis.engine.pipeline.actions import Schedule
from triaxis.engine.pipeline.lowering import Program
from triaxis.engine.pipeline.validate import ScheduleFacts, check
from triaxis.engine.telemetry.record.parameters import num_active
from triaxis.launch.cli import command_module, command_parser, main
from triaxis.models.interop.huggingface.config import family_of, to_hugging_face
from triaxis.models.specs import model_specs, num_parameters

CONFIGS = Path(__file__).parents[3] / "configs"
WORLD_SIZES = {
    "gpt_tiny": 8,
    "moe_tiny": 8,
    "gpt_125m": 8,
    "gpt_125m_bytes": 8,
    "gpt_345m": 8,
    "gpt_1p3b": 8,
    "gpt_2p7b": 32,
    "gpt_22b": 64,
    "gpt_175b": 1024,
    "gpt_530b": 2240,
    "gpt_1t": 3072,
    "llama3_8b": 64,
    "llama3_70b": 256,
    "llama3_405b": 8192,
    "qwen3_8b": 64,
    "mistral_7b": 64,
    "gemma2_9b": 128,
    "olmo2_7b": 128,
    "smollm3_3b": 384,
    "llama3_8b_128k": 64,
    "mixtral_8x7b": 64,
    "qwen3_30b_a3b": 64,
    "olmoe_1b_7b": 256,
    "deepseek_v3": 2048,
}
LONG_PIPELINES = ("gpt_530b", "gpt_1t", "deepseek_v3")
"""A check of their schedules takes a minute or more."""
TINY = str(CONFIGS / "gpt_tiny.yaml")


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    command = command_module("config")
    assert command.run(command_parser(command).parse(arguments)) == 0
    return capsys.readouterr().out


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TP", "CP", "PP", "VPP", "DP", "EP", "ETP", "MICRO_BATCH_SIZE", "GLOBAL_BATCH_SIZE", "RUN_NAME"):
        monkeypatch.delenv(name, raising=False)


def test_every_shipped_config_is_listed_here() -> None:
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == WORLD_SIZES.keys()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in LONG_PIPELINES else ()) for name in WORLD_SIZES]
)
def test_shipped_configs_check_alone_and_at_their_world_size(capsys: pytest.CaptureFixture[str], name: str) -> None:
    path = str(CONFIGS / f"{name}.yaml")
    text = shown(capsys, "check", path)
    assert text.startswith(f"{path}: ok\n")
    is_open = load_config(path).parallel.dp is None
    assert ("dp = world size / " if is_open else f": {WORLD_SIZES[name]:,} ranks") in text
    at_size = shown(capsys, "check", path, "--world-size", str(WORLD_SIZES[name]), "--ranks-per-node", "8")
    assert f"{WORLD_SIZES[name]:,} ranks on {WORLD_SIZES[name] // 8:,} x 8" in at_size
    batch = load_config(path).train.global_batch_size
    parallel = load_config(path).parallel
    dp = WORLD_SIZES[name] // (parallel.tp * parallel.cp * parallel.pp)
    assert f"x dp {dp}; " in at_size and f"{batch:,} samples per step" in at_size
    # The number of replicas stands in the comment of the micro batch, with what follows from it.
    text = Path(path).read_text()
    micro = load_config(path).train.micro_batch_size
    assert f"/ ({micro} x dp {dp}) = {batch // (micro * dp)} microbatches" in text


def test_tiny_configs_say_their_world_because_a_machine_without_gpus_has_no_size() -> None:
    with pytest.raises(ConfigError, match="must be the world size"):
        load_config(TINY, world_size=16)
    assert {name for name in WORLD_SIZES if load_config(CONFIGS / f"{name}.yaml").parallel.dp is not None} == {
        "gpt_tiny",
        "moe_tiny",
    }


@pytest.mark.parametrize("name", WORLD_SIZES)
def test_shipped_configs_have_a_comment_on_each_line(name: str) -> None:
    lines = (CONFIGS / f"{name}.yaml").read_text().splitlines()
    assert lines[0].startswith("# ")
    bare = [line for line in lines if line and "#" not in line and not line.endswith(":")]
    assert not bare


def gpt_parameters(layers: int, hidden: int, vocabulary: int, length: int = 2048) -> int:
    """Count a GPT with biases, 2104.04473 (2): 12 l h^2 (1 + 13 / 12h) + (V + s) h, and 2 h of the final norm."""
    return 12 * layers * hidden**2 + 13 * layers * hidden + (vocabulary + length) * hidden + 2 * hidden


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [
        ("gpt_125m", gpt_parameters(12, 768, 50257)),
        ("gpt_345m", gpt_parameters(24, 1024, 50257, 1024)),
        ("gpt_1p3b", gpt_parameters(24, 2048, 50257)),
        ("gpt_2p7b", gpt_parameters(32, 2560, 50257)),
        ("gpt_22b", gpt_parameters(48, 6144, 51200)),
        ("gpt_175b", gpt_parameters(96, 12288, 50257)),
        ("gpt_530b", gpt_parameters(105, 20480, 51200)),
        ("gpt_1t", gpt_parameters(128, 25600, 51200)),
        # Sizes of the published safetensors.
        ("llama3_8b", 8_030_261_248),
        ("llama3_8b_128k", 8_030_261_248),
        ("llama3_70b", 70_553_706_496),
        ("llama3_405b", 405_853_388_800),
        ("qwen3_8b", 8_190_735_360),
        ("mistral_7b", 7_241_732_096),
        ("gemma2_9b", 9_241_705_984),
        ("olmo2_7b", 7_298_617_344),
        ("smollm3_3b", 3_075_098_624),
    ],
)
def test_shipped_models_have_the_size_in_their_name(name: str, num_parameters: int) -> None:
    model = load_config(CONFIGS / f"{name}.yaml").model
    assert sum(spec.numel for spec in model_specs(model)) == num_parameters


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("mixtral_8x7b", "mixtral"),
        ("qwen3_30b_a3b", "qwen3_moe"),
        ("olmoe_1b_7b", "olmoe"),
        ("deepseek_v3", "deepseek_v3"),
    ],
)
def test_shipped_models_with_experts_are_the_published_ones(name: str, family: str) -> None:
    """In all and active: and as an export the published file, but for the context that is extended later."""
    keys, total, active = PUBLISHED_EXPERTS[name]
    model = load_config(CONFIGS / f"{name}.yaml").model
    assert (num_parameters(model), num_active(model), family_of(model)) == (total, active, family)
    exported, _ = to_hugging_face(model, family, dtype="bfloat16")
    later = {"max_position_embeddings", "rope_scaling", "torch_dtype", "initializer_range"}
    assert {key: exported[key] for key in keys.keys() & exported.keys() - later} == {
        key: keys[key] for key in keys.keys() & exported.keys() - later
    }
    assert {"hidden_size", "num_experts_per_tok", "rms_norm_eps", "rope_theta"} <= keys.keys() & exported.keys()
    assert (
        f"{total / 1e9:.1f} billion" in (text := (CONFIGS / f"{name}.yaml").read_text())
        or f"{total // 10**9} billion" in text
    )
    assert f"a token uses {active / 1e9:.1f}" in text


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("llama3_8b", "llama"),
        ("qwen3_8b", "qwen3"),
        ("mistral_7b", "mistral"),
        ("gemma2_9b", "gemma2"),
        ("olmo2_7b", "olmo2"),
        ("smollm3_3b", "smollm3"),
    ],
)
def test_shipped_models_can_be_exported_as_the_family_in_their_name(name: str, family: str) -> None:
    assert family_of(load_config(CONFIGS / f"{name}.yaml").model) == family


def test_comments_about_derived_numbers_are_right() -> None:
    """The numbers that the large configs state in their comments."""
    text = (CONFIGS / "gpt_175b.yaml").read_text()
    config = load_config(CONFIGS / "gpt_175b.yaml")
    tokens_per_step = config.train.global_batch_size * config.model.seq_length
    for number in (tokens_per_step, -(-300_000_000_000 // tokens_per_step), config.model.padded_vocab_size):
        assert f"{number:,}" in text
    assert f"{config.model.padded_vocab_size // 8:,} per tensor-parallel rank" in text
    llama = (CONFIGS / "llama3_8b.yaml").read_text()
    assert f"{128 * 8192:,} tokens per step" in llama and f"{-(-(10**12) // (128 * 8192)):,} steps" in llama


def test_print_is_a_config_again(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DP", "4")
    text = shown(capsys, "print", TINY, "train.steps=30")
    assert "# tensor parallel: each matrix is cut over tp ranks of one node" in text
    path = tmp_path / "again.yaml"
    path.write_text(text)
    monkeypatch.delenv("DP")
    config = load_config(path)
    assert config == load_config(TINY, ["train.steps=30", "parallel.dp=4"])
    assert (config.train.steps, config.parallel.dp) == (30, 4)


def test_check_prints_the_derived_values(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, "check", TINY, "parallel.pp=3", "parallel.vpp=1", "train.steps=20").splitlines() == [
        f"{TINY}: ok",
        "  model      886,016 parameters; vocabulary 257 + 127 of padding",
        "  stages     4 layers over 3 stages: 1 2 1",
        "  schedule   1f1b",
        "  layout     tp=2 pp=3 vpp=1 dp=2: 12 ranks",
        "  batch      32 samples per step = 4 microbatches of 4 x dp 2; 4,096 tokens per step x 20 steps = 81,920 tokens",
        "  memory     1.4 GB predicted on the fullest rank, pp 0 (communicators 1.4)",
    ]


def test_check_says_that_gathered_inputs_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "check", TINY, "parallel.sequence_parallel=true", "recompute.memory_gb=1")
    assert "  gathered   inputs of column-parallel layers are kept for the backward" in text
    assert "gathered" not in shown(capsys, "check", TINY, "parallel.sequence_parallel=true")


def test_check_says_how_attention_reaches_the_other_parts_of_a_sample(capsys: pytest.CaptureFixture[str]) -> None:
    long = TINY.replace("gpt_tiny", "llama3_8b_128k")
    text = shown(capsys, "check", long, "--gpus", "64")
    assert (
        "all_gather: keys and values in 4 pieces of the 4 key/value heads of a rank, 25% of the bytes exposed" in text
    )
    text = shown(capsys, "check", TINY, "parallel.cp=2", "parallel.cp_method=ulysses")
    assert "ulysses: 1 query and 1 key/value heads of whole samples on each rank" in text
    text = shown(capsys, "check", TINY, "parallel.cp=2", "recompute.memory_gb=1")
    assert "  gathered   keys and values of all cp ranks are kept for the backward" in text
    assert "  attention" not in shown(capsys, "check", TINY)


def test_check_predicts_imbalance_over_cp(capsys: pytest.CaptureFixture[str]) -> None:
    within = ["parallel.cp=2", "data.attention=within", "data.positions=document"]
    synthetic = ["data.synthetic=true", "data.synthetic_document_length=60", "train.micro_batch_size=1"]
    text = shown(capsys, "check", TINY, *within, *synthetic)
    found = re.search(
        r"  imbalance  over cp, the rank with the most attention .* has (\S+)% more than the mean; .* for (\S+)% of the step's",
        text,
    )
    assert found is not None and 0 < float(found[1]) < 50 and 0 < float(found[2]) < 5
    assert "the banner of a run has it" in shown(capsys, "check", TINY, *within)
    assert "imbalance" not in shown(capsys, "check", TINY, "parallel.cp=2")
    assert "tp=2 cp=2 pp=2 vpp=2, dp = world size / 8: open" in shown(
        capsys, "check", TINY, "parallel.cp=2", "parallel.dp=null"
    )


def test_check_says_what_it_cannot_know(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "check", TINY, "parallel.dp=null")
    assert "dp = world size / 4: open" in text and "give --gpus N" in text and "batch" not in text
    assert "dp=3: 12 ranks" in shown(
        capsys, "check", TINY, "parallel.dp=null", "train.global_batch_size=24", "--world-size", "12"
    )


def test_check_compares_the_prediction_with_the_memory_of_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    llama = str(CONFIGS / "llama3_8b.yaml")
    assert (
        shown(capsys, "check", llama, "parallel.dp=32", "--gpu-memory", "80")
        .rstrip()
        .endswith("communicators 0.8) of 80.0 GB")
    )
    on_cpu = shown(capsys, "check", llama, "parallel.dp=32", "runtime.device=cpu", "--gpu-memory", "40").splitlines()[
        -1
    ]
    assert "44.2 GB predicted" in on_cpu and on_cpu.endswith("activations 18.6)"), "no verdict, no communicators"
    arguments = ["config", "check", llama, "parallel.dp=32", "optimizer.lrr=1", "--gpu-memory", "40"]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert "has 2 problems" in error and "memory = 45.0 GB predicted" in error and "These fit: " in error
    for wrong in ("0", "inf", "nan"):
        assert main([*arguments[:3], "--gpu-memory", wrong]) == 2
        assert f"--gpu-memory {wrong}: must be a number of GB above 0" in capsys.readouterr().err


def test_check_reports_everything_at_once_and_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["config", "check", TINY, "model.num_kv_heads=3", "optimizer.lrr=1", "--world-size", "12"]
    assert main([*arguments, "--ranks-per-node", "4"]) == 2
    error = capsys.readouterr().err
    assert "has 4 problems" in error
    assert (
        "Did you mean optimizer.lr?" in error and "must be the world size 12" in error and "num_kv_heads = 3" in error
    )
    assert main(["config", "check", TINY, "--world-size", "0"]) == 2
    assert "--gpus 0: must be at least 1" in capsys.readouterr().err


def test_check_executes_the_programs_of_a_step_and_of_a_validation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A lowering that opens no connection beforehand: the first receive of a pipeline would hold its host for ever."""
    checked = []

    def without_connections(program: Program) -> ScheduleFacts:
        checked.append((program.schedule.name, program.receives))
        return check(program, opened=())

    monkeypatch.setattr("triaxis.engine.pipeline.programs.check", without_connections)
    assert main(["config", "check", TINY, "parallel.vpp=1", "train.global_batch_size=8", "--gpus", "8"]) == 2
    assert "the first use of a connection that is not open holds the host" in capsys.readouterr().err
    assert checked == [("1f1b", "early")]
    monkeypatch.undo()
    monkeypatch.setattr("triaxis.engine.pipeline.programs.check", lambda program: checked.append(program.schedule.name))
    assert main(["config", "check", TINY, "--gpus", "8"]) == 0
    assert checked[1:] == ["interleaved", "interleaved", "forward_only", "forward_only"]


def test_check_of_a_large_pipeline_executes_a_smaller_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """64 pipeline ranks of 512 microbatches took 22 s."""
    executed: list[Schedule] = []
    monkeypatch.setattr("triaxis.launch.commands.config.Programs", executed.append)
    assert main(["config", "check", "configs/gpt_1t.yaml", "--gpus", "3072"]) == 0
    assert [(each.name, each.placement.vpp) for each in executed] == [("interleaved", 2), ("forward_only", 2)]
    assert all(sum(map(len, each.actions)) < 10_000 for each in executed)


@pytest.mark.parametrize("verb", ["from-hf", "from-megatron"])
def test_a_verb_of_before_is_answered_with_its_new_name(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["config", verb, "config.json"])
    assert f"unknown verb '{verb}': it is now `triaxis new --from`" in capsys.readouterr().err
