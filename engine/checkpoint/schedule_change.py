"""Reports how the learning rate changes when a run resumes with another schedule or length."""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from triaxis.engine.config.quantities.plan import planned_tokens
from triaxis.engine.config.tree import Config
from triaxis.engine.optimizer.lr import Fall, fall_of, rate_of
from triaxis.engine.storage.user_module import UserModuleError


def schedule_change(there: Mapping[str, Any], config: Config, consumed_tokens: int) -> Iterator[str]:
    """Yield printable lines if the learning rate will differ from the saved run's plan.

    Nothing is compared if a run's length is unknown, or the saved run's extension is gone.

    Args:
        there: saved configuration as JSON; if it is incomplete (an import), nothing is compared.
        config: configuration of the continuing run.
        consumed_tokens: tokens consumed so far.
    """
    try:
        saved = Config.model_validate({key: value for key, value in there.items() if key != "format_version"})
    except ValidationError:
        return
    tokens_there, tokens_here = planned_tokens(saved), planned_tokens(config)
    if tokens_there is None or tokens_here is None:
        return
    # Both runs have equal tokens per step: only phases can change that, and with phases no length is given in steps.
    step_tokens = config.train.global_batch_size * config.model.seq_length
    falls = fall_of(saved.optimizer, step_tokens, tokens_there), fall_of(config.optimizer, step_tokens, tokens_here)
    try:
        rate_there = rate_of(saved, consumed_tokens, step_tokens, tokens_there)
    except UserModuleError:
        return  # the extension's sources are gone
    rate_here = rate_of(config, consumed_tokens, step_tokens, tokens_here)
    unit, size = ("token", 1) if config.phases else ("step", step_tokens)
    if falls[0] != falls[1]:
        yield "learning rate: falls {} there, {} here".format(*(_in_words(fall, unit, size) for fall in falls))
    if rate_there != rate_here:
        yield f"learning rate of the next step: {rate_there:.3g} there, {rate_here:.3g} here"


def _in_words(fall: Fall | None, unit: str, size: int) -> str:
    """Describe the range in which the learning rate falls, in units of `size` tokens. None: it never falls."""
    if fall is None:
        return "never"
    return f"from {unit} {fall.start // size:,} to {fall.end // size:,} ({fall.shape})"
