"""Let the trained model write a text at the end of its run."""

from triaxis.engine.comm.stop import StopRequest
from triaxis.engine.data.corpus.tokenizers import load_tokenizer
from triaxis.engine.data.samples import SampleSource
from triaxis.engine.step import Engine
from triaxis.models.inference.generate import Sampling, stream

PROMPT_TOKENS = 48
SAMPLE_TEMPERATURE = 0.8


def write_sample(engine: Engine, valid: SampleSource, stop: StopRequest) -> tuple[str, str | None]:
    """Continue a prompt from the validation data. Every rank takes part.

    After each token the ranks agree whether to stop. A run that is asked to stop here still ends as finished.

    Returns:
        The prompt and its continuation; ("", None) if `telemetry.sample_tokens` is 0, the data is random, or a stop was agreed.
    """
    config, device = engine.config, engine.topology.device
    if config.telemetry.sample_tokens == 0 or config.data.synthetic or stop.agreed is not None:
        return "", None
    prompt = [int(token) for token in valid[0].tokens[:PROMPT_TOKENS]]
    world = engine.topology.axis("world")
    tokens: list[int] = []
    sampling = Sampling(SAMPLE_TEMPERATURE, seed=config.train.seed)
    for token in stream(engine, prompt, config.telemetry.sample_tokens, sampling):
        tokens.append(token)
        stop.decide(world.sum_values(stop.flags(), device, "generation"))
        if stop.agreed is not None:
            break
    tokenizer = load_tokenizer(config.data.tokenizer_name)
    return tokenizer.decode(prompt), tokenizer.decode(tokens)
