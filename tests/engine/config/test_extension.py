"""`model.extension`: where it is looked for, what it must give, what a resume and other ranks compare."""

from pathlib import Path

import pytest

from triaxis.engine.checkpoint.resume_rules import changes
from triaxis.engine.config.load import load_config
from triaxis.engine.config.quantities.plan import parallel_sizes
from triaxis.engine.config.rules.check import problems
from triaxis.engine.config.tree import Config, resume_verdict
from triaxis.engine.config.write import to_yaml
from triaxis.engine.errors import ConfigError
from triaxis.engine.optimizer.lr import rate_of
from triaxis.launch.rank.agreement import _config_facts
from triaxis.models.predict.rank_memory import resolve_recompute
from triaxis.models.run_rules import RULES_OF_A_RUN

BASE = """\
model: {num_layers: 2, hidden_size: 64, num_attention_heads: 4, seq_length: 32, vocab_size: 300, EXTENSION}
data: {synthetic: true}
train: {steps: 10, global_batch_size: 16, micro_batch_size: 2}
"""
PART = """\
from triaxis.engine.config.schema.extension_parts import Extension
from triaxis.engine.layout.shard_spec import Init, ParamSpec
class Part:
    @staticmethod
    def specs(model, layer):
        SPECS
class Loss:
    pass
extension = Extension(GIVEN)
"""
ONE = 'return [ParamSpec("scale", (model.hidden_size,), Init("ones"))]'


def written(folder: Path, given: str = "mlp=Part", specs: str = ONE, extension: str = "extension: mine.py") -> Path:
    (folder / "mine.py").write_text(PART.replace("GIVEN", given).replace("SPECS", specs))
    (folder / "run.yaml").write_text(BASE.replace("EXTENSION", extension))
    return folder / "run.yaml"


def refused(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def test_a_path_is_relative_to_the_file_and_as_an_override_to_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(written(tmp_path))
    assert config.model.extension is not None and config.model.extension.source == str(tmp_path / "mine.py")
    assert config.model.own.mlp is not None and config.model.own.attention is None
    (tmp_path / "elsewhere").mkdir()
    path = written(tmp_path, extension="extension: null")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert load_config(path, ["model.extension=../mine.py"]).model == config.model
    assert load_config(path).model.own.parts() == {}


def test_a_written_configuration_reads_back_and_knows_other_sources(tmp_path: Path) -> None:
    config = load_config(written(tmp_path))
    (tmp_path / "again.yaml").write_text(to_yaml(config))
    assert load_config(tmp_path / "again.yaml") == config
    assert Config.model_validate(config.model_dump(mode="json")) == config
    # The module is loaded already, so a live run stays as it is; a changed one is another model for everybody else.
    text = to_yaml(config).replace(str(config.model.extension and config.model.extension.digest), "0" * 64)
    (tmp_path / "again.yaml").write_text(text)
    assert "sources were changed" in refused(tmp_path / "again.yaml")


def test_a_resume_names_another_digest_and_takes_another_place(tmp_path: Path) -> None:
    config = load_config(written(tmp_path))
    there = config.model_dump(mode="json")
    there["model"]["extension"] |= {"source": "/before/mine.py", "digest": "1" * 64}
    found = {change.key: change.verdict for change in changes(there, config)}
    assert found == {"model.extension.source": "layout", "model.extension.digest": "meant"}
    keys = _config_facts(config)
    assert "model.extension.digest" in keys and "model.extension.source" not in keys


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("", "gives no part"),
        ("mpl=Part", "unexpected keyword argument 'mpl'"),
        ("mlp=3", "static method `specs`"),
        ("mlp=Part)\ndel(extension", "assigns no Extension"),
        ("mlp=Part, norm=(", "line 9: SyntaxError"),
    ],
)
def test_a_module_that_gives_no_extension_is_refused(tmp_path: Path, given: str, says: str) -> None:
    said = refused(written(tmp_path, given))
    assert says in said and "model.extension.source = " in said and "1 problem" in said


def test_a_path_is_expanded_as_every_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINE", str(tmp_path))
    config = load_config(written(tmp_path, extension="extension: $MINE/mine.py"))
    assert config.model.extension is not None and config.model.extension.source == str(tmp_path / "mine.py")
    assert "no such user" in refused(written(tmp_path, extension="extension: ~nobody_at_all/mine.py"))


def test_a_missing_module_is_one_problem(tmp_path: Path) -> None:
    said = refused(written(tmp_path, extension="extension: other.py"))
    assert f"model.extension.source = {tmp_path}/other.py: there is no such file" in said


@pytest.mark.parametrize(
    ("specs", "says"),
    [
        ("return ['scale']", "'scale', which is no ParamSpec"),
        ("1 / 0", "mlp.specs raises ZeroDivisionError"),
        (f"{ONE[:-1]} * 2", "the name 'scale' twice"),
        ('return [ParamSpec("", (4,), Init("ones"))]', "no name"),
        ('return [ParamSpec("a", (0,), Init("ones"))]', "with the shape (0,)"),
        ('return [ParamSpec("a", (4,), Init("ones"), tp_dim=1)]', "no such dim"),
        ('return [ParamSpec("a", (6,), Init("ones"), tp_dim=0)]', "cannot be cut evenly over parallel.tp = 4"),
        ('return [ParamSpec("a", (4, 4), Init("ones"), tp_dim=0, ep_dim=1)]', "cut over ep"),
    ],
)
def test_parameters_that_no_layout_holds_are_refused(tmp_path: Path, specs: str, says: str) -> None:
    specs = specs if "* 2" not in specs else ONE.replace("]", "] * 2")
    assert says in refused(written(tmp_path, specs=specs), "parallel.tp=4")


def test_fields_that_only_our_loss_reads_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path, "loss=Loss")
    assert load_config(path).model.own.weigh is None
    said = refused(path, "model.z_loss=0.1", "recompute.head_tokens=64")
    assert said.count("would have no effect") == 2
    assert load_config(path, ["recompute.head_tokens=null"]).recompute.head_tokens is None


def test_what_auto_comes_to_with_a_loss_of_ones_own_is_legal(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, "loss=Loss"))
    sizes = parallel_sizes(config, 4)
    resolved = resolve_recompute(config, sizes)
    assert resolved.recompute.head_tokens is None and problems(resolved, sizes.world_size) == []


def test_a_corpus_that_nothing_gives_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, 'corpora={"mine": list}')
    assert load_config(path, ["data={train: extension:mine, synthetic: false}"]).model.own.corpora == {"mine": list}
    said = refused(path, "data={train: extension:other:x, synthetic: false}")
    assert "names the corpus 'other' of model.extension, which gives mine" in said


def test_costs_are_those_of_parts(tmp_path: Path) -> None:
    assert "would have no effect" in refused(written(tmp_path, "costs=max"))


def test_a_loss_has_no_parameters(tmp_path: Path) -> None:
    assert "a loss has no parameters" in refused(written(tmp_path, "loss=Part"))


RULE = """\
class Rule:
    moments = ("mean", "square")
    def factors(): ...
    def elementwise(): ...
"""


def test_the_moments_of_a_rule_are_recorded_and_count_as_state(tmp_path: Path) -> None:
    path = written(tmp_path, "update=Rule")
    (tmp_path / "mine.py").write_text(RULE + (tmp_path / "mine.py").read_text())
    config = load_config(path, ["optimizer.name=extension", "optimizer.beta2=0.5"])
    assert config.state_kinds == ("master", "mean", "square")
    other = load_config(path, ["optimizer.name=adamw", "optimizer.ema={}"])  # as who reads the model does
    assert other.state_kinds == ("master", "exp_avg", "exp_avg_sq", "ema")
    with pytest.raises(ConfigError, match=r"is not the update of model\.extension, which would have no effect"):
        load_config(path, more_rules=RULES_OF_A_RUN)
    assert resume_verdict(config, "model.extension.moments") == "never"
    assert load_config(written(tmp_path), []).model.extension.moments == ()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (RULE.replace("def factors(): ...", ""), "an update rule is a class with factors"),
        (RULE.replace('"mean"', '"square"'), "a moment named 'square'"),
        (RULE.replace('"mean"', '"ema"'), "a moment named 'ema'"),
        (RULE.replace('"mean"', '"../x"'), "a moment named '../x'"),
    ],
)
def test_a_rule_that_no_checkpoint_could_hold_is_refused(rule: str, says: str, tmp_path: Path) -> None:
    path = written(tmp_path, "update=Rule")
    (tmp_path / "mine.py").write_text(rule + (tmp_path / "mine.py").read_text())
    assert says in refused(path)


def test_a_schedule_is_used_where_it_is_named_and_only_there(tmp_path: Path) -> None:
    path = written(
        tmp_path, "schedule=lambda consumed, step, optimizer, num_tokens: optimizer.lr * (consumed - 1024) / 512"
    )
    unused = load_config(path)  # as who reads the model does
    assert rate_of(unused, 0, 512, 5120) == unused.optimizer.lr
    with pytest.raises(ConfigError, match="would have no effect"):
        load_config(path, more_rules=RULES_OF_A_RUN)
    words = ["optimizer={lr_schedule: extension, lr: 0.5, min_lr: 0.1, warmup_steps: 2}"]
    config = load_config(path, words)
    rates = [rate_of(config, tokens, 512, 5120) for tokens in (0, 512, 1024, 1536)]
    assert rates == [0.25, 0.5, 0.0, 0.5]
    assert resume_verdict(config, "train.steps") == "meant", "the rates depend on the length of the run"
    below = load_config(written(tmp_path, "schedule=lambda *arguments: -1.0"), words)
    with pytest.raises(ConfigError, match=r"gives the learning rate -1\.0 at 2,048 tokens"):
        rate_of(below, 2048, 512, 5120)
