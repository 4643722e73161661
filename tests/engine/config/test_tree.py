"""The whole tree: what a resumed run may change of it."""

from tests.engine.config.bad_configs import config_with
from triaxis.engine.config.schema.section import Section
from triaxis.engine.config.tree import Config, resume_verdict


def fields(verdict: str, *overrides: str) -> set[str]:
    """The fields of that verdict; sections in which all have it stand for themselves, those inside them for nothing."""
    config = config_with(*overrides)
    found = set()
    for name in Config.model_fields:
        section = Config.section_type(name)
        if section is None:
            found |= {name} if resume_verdict(config, name) == verdict else set()
            continue
        assert issubclass(section, Section)
        leaves = [key for key in section.dotted_names(f"{name}.") if resume_verdict(config, key) == verdict]
        found |= {name} if len(leaves) == len(list(section.dotted_names())) else set(leaves)
    return found


def test_a_speed_setting_may_always_change() -> None:
    assert fields("layout") == {
        "model.vocab_multiple", "model.init_std", "model.extension.source", "data.cache_dir", "data.tokenizer",
        "train.micro_batch_size", "train.phase", "eval", "optimizer.bucket_bytes", "optimizer.offload",
        "precision.masters", "precision.fp8.backend", "precision.fp8.gather",
        "parallel", "schedule", "recompute", "offload", "kernels", "checkpoint", "telemetry", "resilience", "runtime",
    }  # fmt: skip


def test_the_shape_of_the_model_the_samples_of_a_step_and_the_optimizer_never_change() -> None:
    kept = {"vocab_multiple", "init_std", "hidden_dropout", "attention_dropout", "rope_base", "rope_scaling", "z_loss"}
    names = type(config_with().model).dotted_names()
    shape = {f"model.{name}" for name in names if name.partition(".")[0] not in kept}
    of_training = (
        "model.mtp.loss_weight",
        "model.moe.balance",
        "model.moe.row_headroom",
        "model.moe.force_balanced",
        "model.extension",
    )
    shape -= {name for name in shape if name.startswith(of_training)}
    assert fields("never") == shape | {"train.global_batch_size", "optimizer.name", "model.extension.moments"}


def test_the_length_of_a_run_may_change_where_no_learning_rate_depends_on_it() -> None:
    length = {"train.steps", "train.tokens"}
    assert length | {"phases"} <= fields("meant")
    for free in ("optimizer.lr_schedule=constant", "optimizer.decay_steps=9"):
        assert length <= fields("layout", free) and not length & fields("meant", free)


def test_a_name_that_is_no_field_has_the_verdict_of_its_section() -> None:
    verdicts = [
        resume_verdict(config_with(), f"{name}.gone") for name in ("parallel", "optimizer", "model", "telemetry.wandb")
    ]
    assert verdicts == ["layout", "meant", "never", "layout"]
    assert resume_verdict(config_with(), "gone") == "never"
