"""The reference of the configuration: complete, true to what is read, and printed as docs/config.md has it."""

import pytest
import yaml

from tests.documented import ROOT
from triaxis.engine.config.schema.section import Section
from triaxis.engine.config.tree import Config, resume_verdict
from triaxis.engine.errors import ConfigError
from triaxis.launch.cli import main
from triaxis.launch.config_reference import ON_RESUME, chosen, entries, to_markdown


def test_the_page_is_current() -> None:
    written = (ROOT / "docs" / "config.md").read_text()
    assert written == to_markdown(entries()), "write it: triaxis config explain --markdown > docs/config.md"


def test_every_field_has_an_entry_with_a_meaning() -> None:
    found = {one.name: one for one in entries()}
    leaves = [name for name in Config.dotted_names() if _section_at(name) is None]
    assert set(leaves) <= set(found) and len(leaves) > 190
    assert not [one.name for one in found.values() if not one.meaning or "Undefined" in one.default]


def _section_at(name: str) -> type[Section] | None:
    section: type[Section] | None = Config
    for part in name.split("."):
        assert section is not None
        section = section.section_type(part)
    return section


def test_defaults_are_what_an_empty_section_is_read_as() -> None:
    """The other side is a parsed configuration, not the fields' declarations."""
    train = {"global_batch_size": 8, "steps": 1}
    model = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "seq_length": 4, "vocab_size": 5}
    config = Config.model_validate({"model": model, "train": train}).model_dump(mode="json")
    for one in entries():
        value: object = config
        for part in one.name.split("."):
            value = value[part] if isinstance(value, dict) else None
        given = one.section in ("model", "train") and one.name.rpartition(".")[2] in model | train
        if not given and one.section in config:
            assert one.default != "required" and yaml.safe_load(one.default) == value, one.name


def test_the_rule_on_resume_is_what_a_resume_asks() -> None:
    model = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "seq_length": 4, "vocab_size": 5}
    config = Config.model_validate({"model": model, "train": {"global_batch_size": 8, "steps": 1}})
    for one in entries():
        word, *condition = one.resume.split("; ")
        assert word == ON_RESUME[resume_verdict(config, one.name)], one.name
        assert bool(condition) == (one.name in ("train.steps", "train.tokens"))


@pytest.mark.parametrize(
    ("name", "type_", "default"),
    [
        ("train.micro_batch_size", "count from 1", "1"),
        ("checkpoint.interval", "count, or `never`, or null", "null"),
        ("optimizer.beta1", "number ≥ 0, < 1", "0.9"),
        ("model.mtp.num_layers", "integer from 1 to 16", "1"),
        ("model.norm", "`layernorm`, `rmsnorm`, `rmsnorm_1p`", "layernorm"),
        ("data.skip_samples", "list (list (count))", "[]"),
        ("schedule.file", "path, or null", "null"),
    ],
)
def test_types_are_in_words(name: str, type_: str, default: str) -> None:
    (one,) = chosen(name)
    assert (one.type, one.default) == (type_, default)


def test_the_command_explains_a_field_a_section_and_a_foreign_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "explain", "parallel.tp"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("parallel.tp (environment: TP)\n") and "default 1; resume free" in said
    assert main(["config", "explain", "model.moe"]) == 0
    assert "model.moe.balance.bias_rate\n" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"here it is parallel\.tp"):
        chosen("tensor_model_parallel_size")
    assert main(["config", "explain", "train.step"]) == 2
    assert "train.steps" in capsys.readouterr().err
