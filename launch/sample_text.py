"""The text that a trained model writes at the end of its run: how it goes on from a few tokens that it has not seen."""

from engine.data.samples import SampleSource
from engine.data.tokenizers import load_tokenizer
from engine.step import Engine
from models.generate import generate

PROMPT_TOKENS = 48
SAMPLE_TEMPERATURE = 0.8


def write_sample(engine: Engine, valid: SampleSource) -> tuple[str, str | None]:
    """A beginning from the validation data, and how the model goes on; every rank takes part."""
    config = engine.config
    if config.telemetry.sample_tokens == 0 or config.data.synthetic:
        return "", None
    prompt = [int(token) for token in valid[0].tokens[:PROMPT_TOKENS]]
    tokens = generate(
        engine, prompt, config.telemetry.sample_tokens, temperature=SAMPLE_TEMPERATURE, seed=config.train.seed
    )
    tokenizer = load_tokenizer(config.data.tokenizer)
    return tokenizer.decode(prompt), tokenizer.decode(tokens)
