"""Decoding with a cache is the full forward; generated tokens do not depend on the layout; draws follow the softmax."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import triaxis.engine.context_parallel.mixer
import triaxis.models.inference.generate as generation
from tests.harness import run_ranks
from tests.parity.cases import Case, load_weights, weights_of
from tests.parity.test_step_properties import build_rank
from triaxis.engine.checkpoint.directory import find
from triaxis.engine.checkpoint.format.manifest import TrainingState
from triaxis.engine.checkpoint.import_weights import whole, write_checkpoint
from triaxis.engine.comm.topology import Topology
from triaxis.engine.config.quantities.plan import parallel_sizes
from triaxis.engine.config.schema.dotted import with_value
from triaxis.engine.errors import CheckpointError, ConfigError, DivergenceError
from triaxis.engine.kernels.attention import attention
from triaxis.engine.kernels.registry import Kernels, open_kernels
from triaxis.engine.layout.rank_grid import ParallelSizes, RankGrid
from triaxis.engine.numerics.precision import DTYPES
from triaxis.engine.pipeline.executor import Executor
from triaxis.engine.pipeline.forwards import of_forward
from triaxis.engine.pipeline.lowering import lower
from triaxis.models.gpt.chunk import GPTChunk
from triaxis.models.gpt.moe import MoE
from triaxis.models.inference.decoding import DecodingChunk
from triaxis.models.inference.evaluate import loss_of
from triaxis.models.inference.generate import Decoder, Model, Sampling, _batch, generate, sample_token, stream
from triaxis.models.inference.load import for_reading, load_model

pytestmark = pytest.mark.distributed

PROMPT = [3, 1, 4, 1, 5]
WINDOW = [3, 1, 4, 1, 5, 9, 2, 6]
"""As many tokens as the models of the parity tests read."""

QUICK = [
    Case("qwen", pp=2, vpp=2, dp=2, num_layers=4),
    Case("llama", tp=4, sequence_parallel=True, num_layers=2),
    Case("deepseek", tp=2, pp=2, ep=2, sequence_parallel=True),
    Case("deepseek", dp=2, ep=2, dispatch="all_to_all"),
]
"""Of experts all ranks have the same tokens in generation, and each computes the rows of its own."""

LAYOUTS = [
    Case("qwen", tp=2, pp=2, vpp=2, dp=2, sequence_parallel=True, num_layers=4),
    Case("qwen", tp=8, num_layers=2),
    Case("gpt", tp=2, pp=2, dp=2, sequence_parallel=True, recompute=("full", "uniform", 1), num_layers=4),
    Case("gpt_dropout", tp=2, pp=4, recompute=("selective", "uniform", 1), num_layers=4),
    Case("llama", tp=4, pp=2, sequence_parallel=True, num_layers=4),
    Case("mqa_rope_bias", tp=4, dp=2, num_layers=4),
    Case("gpt_untied", pp=8),
    Case("gpt", tp=2, pp=2, vpp=2, schedule="zbv", num_layers=4),
    Case("mla, queries from x", tp=4, pp=2, sequence_parallel=True),
    Case("mla, mscale", tp=2, dp=2),
    Case("deepseek", tp=2, etp=2, dp=2, ep=2),
    Case("deepseek", pp=2, vpp=2, dp=2, ep=2, recompute=("full", "uniform", 1)),
    Case("moe gelu", dp=4, ep=4),
]


def engine_of(rank: int, case: Case) -> Model:
    engine, batches = build_rank(rank, case)
    batches.close()
    weights = weights_of(case.model, case.num_layers)
    load_weights(engine, {name: weight.detach() for name, weight in weights.items()})
    return engine


def full_logits(model: Model, tokens: list[int]) -> torch.Tensor | None:
    """Logits [s, V] after each of the tokens by one forward without a cache; None off the last stage."""
    config, topology = model.config, model.topology
    sizes, tp = topology.sizes, topology.axis("tp")
    shape = (len(tokens) // (tp.size if config.parallel.sequence_parallel else 1), 1, config.model.hidden_size)
    for chunk in model.chunks:
        chunk.train(False)
    executor = Executor(topology, [chunk.queue for chunk in model.chunks], shape, DTYPES[config.precision.dtype])
    outputs = executor.run(
        lower(of_forward(sizes, 1)),
        [_batch(tokens, 0, topology.device)],
        lambda chunk, x, batch: model.chunks[chunk].logits(x, batch),
    )
    if not outputs:
        return None
    columns = tp.all_gather(outputs[0][:, 0].t().contiguous(), "test").wait()
    return columns.t()[:, : config.model.vocab_size]


# The cache --------------------------------------------------------------------------------------------------------------


def decoded(rank: int, cases: Sequence[Case]) -> list[torch.Tensor | None]:
    return [Decoder(engine_of(rank, case), len(PROMPT)).logits(PROMPT) for case in cases]


def test_a_run_in_fp8_decodes_as_one_without() -> None:
    """A text that is written during training is the one that its checkpoint writes, which is read without FP8."""
    case = Case("llama", tp=2, num_layers=2)
    plain, in_fp8 = run_ranks(decoded, 2, (case, replace(case, fp8="tensorwise")))[0]
    assert torch.equal(in_fp8, plain)


def largest_differences(engine: Model, lengths: Sequence[int]) -> list[float]:
    """Largest difference of the logits after each position, for lengths of the prompt; empty off the last stage."""
    want = full_logits(engine, WINDOW)
    differences = []
    decoder = Decoder(engine, len(WINDOW))
    for length in lengths:
        decoder.forget()
        for position in range(length - 1, len(WINDOW)):
            got = decoder.logits(WINDOW[:length] if position == length - 1 else WINDOW[position : position + 1])
            if got is not None and want is not None:
                differences.append(float((got - want[position]).abs().max()))
    return differences


def assert_small(differences: list[float], lengths: Sequence[int]) -> None:
    assert len(differences) == sum(len(WINDOW) - length + 1 for length in lengths)
    assert max(differences) <= 1e-12


@pytest.mark.parametrize(
    "model",
    [
        *("gpt", "llama", "qwen", "gpt_dropout", "kinds", "kinds_capped", "olmo2", "gemma2", "neox", "granite"),
        *("mla, kinds", "mla, dropout", "deepseek"),
    ],
)
def test_logits_with_a_cache_are_those_of_the_full_forward(model: str) -> None:
    """gpt_dropout computes attention by the explicit kernel."""
    lengths = range(1, len(WINDOW) + 1)
    assert_small(largest_differences(engine_of(0, Case(model, num_layers=2)), lengths), lengths)


def test_a_cache_of_latent_attention_has_one_latent_and_one_key_per_token() -> None:
    """6 + 4 numbers, of which 8 heads of 9 + 3 are made."""
    (chunk,) = engine_of(0, Case("mla", num_layers=2)).chunks
    assert isinstance(chunk, GPTChunk)
    for layer in DecodingChunk(chunk).caches():
        layer.forget(places=7)
        layer.extended([torch.zeros(1, 1, 3, 10, dtype=torch.float64)])
        assert [each.untyped_storage().nbytes() for each in layer.cache] == [7 * 10 * 8]


def model_with(case: Case, decoding: str | None = None) -> tuple[Model, Kernels]:
    """One rank's model and its kernels; with another decoding kernel than the resolved one where that is given."""
    engine = engine_of(0, case)
    (chunk,) = engine.chunks
    assert isinstance(chunk, GPTChunk)
    if decoding is not None:
        kernels = chunk.context.kernels
        chunk.context = replace(
            chunk.context, kernels=replace(kernels, choices=replace(kernels.choices, decoding=decoding))
        )
    return engine, chunk.context.kernels


def test_one_query_goes_through_the_decoding_kernel_and_a_prompt_through_the_training_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU the training kernel may be cuDNN's, which would plan anew for each number of keys."""
    called: list[tuple[str, int]] = []

    def watched(kernel: str, q: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
        called.append((kernel, q.shape[2]))
        return attention(kernel, q, *others, **options)

    monkeypatch.setattr(triaxis.engine.context_parallel.mixer, "attention", watched)
    model, kernels = model_with(Case("qwen", num_layers=1, attention="flash"), decoding="math")
    assert kernels.choices.attention == "flash"
    generate(model, PROMPT, 3, temperature=0.0)
    assert called == [("flash", len(PROMPT)), ("math", 1), ("math", 1)]


@pytest.mark.parametrize("kernel", ["auto", "sdpa", "flash", "explicit"])
def test_on_the_cpu_the_decoding_kernel_has_the_bits_of_the_training_kernel(kernel: str) -> None:
    case = Case("llama", num_layers=2, attention=kernel)
    model, kernels = model_with(case)
    as_in_training, _ = model_with(case, decoding=kernels.choices.attention)
    one, other = (Decoder(each, len(WINDOW)) for each in (model, as_in_training))
    for tokens in (WINDOW[:3], *([token] for token in WINDOW[3:])):
        mine, theirs = one.logits(tokens), other.logits(tokens)
        assert mine is not None and theirs is not None and torch.equal(mine, theirs)


# The text ---------------------------------------------------------------------------------------------------------------

SAMPLINGS = [Sampling(0.0), Sampling(1.0, seed=3), Sampling(1.5, top_k=20, top_p=0.9, seed=4)]


def texts_of(model: Model, samplings: Sequence[Sampling]) -> list[list[int]]:
    """12 tokens after a prompt of 5, in a window of 8: the window starts anew, too."""
    return [list(stream(model, PROMPT, 12, sampling)) for sampling in samplings]


def continued(rank: int, case: Case, samplings: Sequence[Sampling]) -> list[list[int]]:
    return texts_of(engine_of(rank, case), samplings)


@cache
def alone(model: str, num_layers: int | None, *samplings: Sampling) -> list[list[int]]:
    """What one process writes."""
    texts = continued(0, Case(model, num_layers=num_layers), samplings)
    assert all(len(text) == 12 for text in texts)
    assert all(0 <= token < 43 for text in texts for token in text), "a padded column was drawn"
    return texts


def decoded_and_continued(rank: int, case: Case, lengths: Sequence[int]) -> tuple[list[float], list[list[int]]]:
    engine = engine_of(rank, case)
    return largest_differences(engine, lengths), texts_of(engine, [SAMPLINGS[2]])


@pytest.mark.distributed
@pytest.mark.parametrize("case", [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in LAYOUTS)], ids=str)
def test_every_layout_decodes_as_the_full_forward_and_writes_the_same_tokens(case: Case) -> None:
    lengths = (1, 3, len(WINDOW))
    found = run_ranks(decoded_and_continued, case.world_size, case, lengths)
    compared = [differences for differences, _ in found if differences]
    assert len(compared) == case.tp * case.dp
    for differences in compared:
        assert_small(differences, lengths)
    (text,) = alone(case.model, case.num_layers, SAMPLINGS[2])
    assert len(set(text)) > 4
    assert [texts for _, texts in found] == [[text]] * case.world_size


@pytest.mark.distributed
@pytest.mark.slow
def test_every_layout_writes_the_same_tokens_however_they_are_drawn() -> None:
    for case in LAYOUTS[:2]:
        written = alone(case.model, case.num_layers, *SAMPLINGS[:2])
        assert run_ranks(continued, 8, case, SAMPLINGS[:2]) == [written] * 8, str(case)


def without_cache(engine: Model, sampling: Sampling, num_tokens: int) -> list[int]:
    """What `stream` does, by a full forward for each token (one process)."""
    text = list(PROMPT)
    for _ in range(num_tokens):
        logits = full_logits(engine, text)
        assert logits is not None
        text.append(sample_token(logits[-1], sampling, place=len(text)))
    return text[len(PROMPT) :]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_a_cache_does_not_change_the_text(sampling: Sampling) -> None:
    engine = engine_of(0, Case("gpt", num_layers=2))
    assert list(stream(engine, PROMPT, 3, sampling)) == without_cache(engine, sampling, 3)


def test_a_text_ends_at_its_stop_and_goes_on_past_its_window() -> None:
    engine = engine_of(0, Case("qwen"))
    whole_text = generate(engine, PROMPT, 12, temperature=1.0, seed=3)
    assert whole_text == list(stream(engine, PROMPT, 12, Sampling(1.0, seed=3)))
    stop = whole_text[4]
    first = whole_text.index(stop)
    assert list(stream(engine, PROMPT, 12, Sampling(1.0, seed=3), stop=stop)) == whole_text[:first]

    # A prompt longer than the window is read from its last half window; a full window goes on as that prompt would.
    long = [7, 7, 7, *WINDOW]
    (after_long,) = stream(engine, long, 1, Sampling(0.0))
    assert [after_long] == list(stream(engine, long[-4:], 1, Sampling(0.0)))
    after_full = generate(engine, WINDOW, 2, temperature=0.0)
    assert after_full[1:] == generate(engine, [*WINDOW, after_full[0]][-4:], 1, temperature=0.0)
    # A narrower window sees less.
    assert list(stream(engine, WINDOW[:4], 3, Sampling(0.0), window=4)) != generate(
        engine, WINDOW[:4], 3, temperature=0.0
    )


# Draws ------------------------------------------------------------------------------------------------------------------

LOGITS = torch.tensor([2.0, -1.0, 1.0, 0.0, 1.5, -3.0], dtype=torch.float64)


@pytest.fixture(scope="module")
def same_noise() -> Iterator[None]:
    """Noise is a function of seed and place, so that draws of other laws at the same places can share it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generation, "_gumbel", cache(generation._gumbel))
        yield


def shares(sampling: Sampling, num_draws: int = 5_000) -> torch.Tensor:
    counts = torch.zeros(len(LOGITS), dtype=torch.float64)
    for place in range(num_draws):
        counts[sample_token(LOGITS, sampling, place)] += 1
    return counts / num_draws


@pytest.mark.usefixtures("same_noise")
@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    want = (LOGITS / temperature).softmax(-1)
    # Five standard deviations of a share.
    assert (shares(Sampling(temperature, seed=1)) - want).abs().max() < 5 * 0.5 / 5_000**0.5


@pytest.mark.usefixtures("same_noise")
def test_top_k_and_top_p_leave_the_most_likely() -> None:
    probabilities = LOGITS.softmax(-1)
    by_rank = probabilities.argsort(descending=True).tolist()
    for sampling, kept in (
        (Sampling(top_k=2), by_rank[:2]),
        (Sampling(top_k=100), by_rank),
        (Sampling(top_p=1e-9), by_rank[:1]),
        (Sampling(top_p=float(probabilities[by_rank[:2]].sum()) + 1e-9), by_rank[:3]),
        (Sampling(top_p=float(probabilities[by_rank[:2]].sum()) - 1e-9), by_rank[:2]),
        (Sampling(top_p=1.0), by_rank),
        (Sampling(top_k=3, top_p=0.5), by_rank[:1]),
    ):
        drawn = shares(sampling, 2_000)
        assert {token for token in range(len(LOGITS)) if drawn[token] > 0} == set(kept), sampling
        want = probabilities[kept] / probabilities[kept].sum()
        assert (drawn[kept] - want).abs().max() < 5 * 0.5 / 2_000**0.5, sampling


def test_a_draw_is_a_function_of_seed_and_place() -> None:
    flat = torch.zeros(1000)
    tokens = [sample_token(flat, Sampling(seed=1), place) for place in range(50)]
    assert tokens == [sample_token(flat, Sampling(seed=1), place) for place in range(50)]
    assert len(set(tokens)) > 40
    assert len(set(tokens) & {sample_token(flat, Sampling(seed=2), place) for place in range(50)}) < 10


def test_the_most_likely_token_needs_no_noise() -> None:
    assert [sample_token(LOGITS.to(torch.bfloat16), Sampling(0.0, seed=seed), seed) for seed in range(5)] == [0] * 5


# From a checkpoint --------------------------------------------------------------------------------------------------------


def checkpoint(folder: Path, case: Case) -> Path:
    """Weights of a parity model as a checkpoint."""
    shards = [whole(name, weight.detach()) for name, weight in weights_of(case.model, case.num_layers).items()]
    config = case.config().model_dump(mode="json")
    return write_checkpoint(folder, shards, TrainingState.at_start(), config=config, source="a test")


def loaded(rank: int, case: Case, folder: Path) -> tuple[list[int], list[float]]:
    """Text of a model that was loaded, and how far its logits are from an engine's with the same weights."""
    config = case.config()
    grid = RankGrid(parallel_sizes(config))
    topology = Topology(
        grid, rank, torch.device("cpu"), kv_heads=config.model.kv_heads, has_experts=config.model.has_experts
    )
    model = load_model(find(folder), config, topology)
    got = full_logits(model, WINDOW)
    (text,) = texts_of(model, [SAMPLINGS[2]])
    want = full_logits(engine_of(rank, case), WINDOW)
    return text, [] if got is None or want is None else [float((got - want).abs().max())]


@pytest.mark.distributed
@pytest.mark.parametrize(
    "case",
    [
        Case("qwen", num_layers=4),
        Case("qwen", tp=2, pp=2, vpp=2, sequence_parallel=True, num_layers=4),
        pytest.param(Case("qwen", tp=8, num_layers=2), marks=pytest.mark.slow),
        Case("gpt", pp=2, num_layers=4),
        Case("gpt", pp=2, vpp=2, schedule="zbv", num_layers=4),
        pytest.param(LAYOUTS[-3], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_loaded_model_is_the_engine_s(case: Case, tmp_path: Path) -> None:
    results = run_ranks(loaded, case.world_size, case, checkpoint(tmp_path, case))
    assert [[text] for text, _ in results] == [alone(case.model, case.num_layers, SAMPLINGS[2])] * case.world_size
    differences = [difference for _, some in results for difference in some]
    assert len(differences) == case.tp * case.dp
    assert max(differences) <= 1e-13


def test_a_loaded_bias_of_the_choice_is_not_rounded(tmp_path: Path) -> None:
    case = Case("deepseek", dtype="bf16")
    folder = checkpoint(tmp_path, case)
    model = load_model(
        find(folder), case.config(), Topology(RankGrid(ParallelSizes()), 0, torch.device("cpu"), has_experts=True)
    )
    for name, wanted in weights_of(case.model).items():
        if name.endswith("router.bias"):
            mlp = model.chunks[0].get_submodule(f"blocks.{name.split('.')[1]}.mlp")
            assert isinstance(mlp, MoE) and mlp.bias is not None
            assert torch.equal(mlp.bias.weight(), wanted.detach().float())


def evaluated(headroom: float | None, folder: Path) -> float:
    case = Case("moe biased", num_layers=2)
    config = with_value(case.config(), "model.moe.row_headroom", headroom)
    topology = Topology(RankGrid(ParallelSizes()), 0, torch.device("cpu"), has_experts=True)
    model = load_model(find(folder), config, topology)
    unmasked = _batch(WINDOW, 0, topology.device)
    counted = replace(unmasked, loss_mask=torch.ones_like(unmasked.loss_mask), num_tokens=len(WINDOW))
    return loss_of(model, [[counted]])[0]


def test_a_loss_without_room_for_all_tokens_is_an_error(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, Case("moe biased", num_layers=2))
    assert evaluated(1.0, folder) == evaluated(None, folder) > 0
    with pytest.raises(DivergenceError, match=r"Evaluation: 16 rows of tokens found no room .* model.moe.row_headroom"):
        evaluated(0.5, folder)


@pytest.mark.parametrize(("name", "choice", "plain"), [("weight_grad", "fused", "separate"), ("graphs", "on", "off")])
def test_a_model_that_is_read_needs_no_kernel_for_gradients(name: str, choice: str, plain: str) -> None:
    """A run on a GPU may have asked for what the CPU does not have."""
    config = with_value(Case("gpt", dtype="bf16").config(), f"kernels.{name}", choice)
    topology = Topology(RankGrid(ParallelSizes()), 0, torch.device("cpu"))
    with pytest.raises(ConfigError, match=rf"kernels.{name} = {choice} does not run here"):
        open_kernels(config, topology)
    assert getattr(open_kernels(for_reading(config), topology).choices, name) == plain


def refusal(rank: int, case: Case, folder: Path) -> str:
    config = case.config()
    topology = Topology(RankGrid(ParallelSizes(tp=case.tp, pp=case.pp)), rank, torch.device("cpu"))
    with pytest.raises(CheckpointError) as refused:
        load_model(find(folder), config, topology)
    return str(refused.value)


@pytest.mark.distributed
def test_another_model_is_refused_on_every_rank(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, Case("gpt"))
    assert "no place for" in refusal(0, Case("qwen"), folder)
    # Only the last stage has the head.
    reasons = run_ranks(refusal, 2, Case("gpt_untied", pp=2), folder)
    assert reasons[0] == reasons[1]
    assert "head.weight is not in it" in reasons[0]
