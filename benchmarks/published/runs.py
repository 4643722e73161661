"""Published training runs of a CSV file, and the configuration, cluster and software that stand for each.

    a row  ->  Run: numbers and words, and what it lacks  ->  Setup: cluster, software, a configuration per value of open fields

A row lacks something where a prediction would be a guess: a number, a calibrated device, a record of its software, experts. It is
then listed with its reasons. A header without a column, or a file that is no CSV, is an error.
"""

import csv
import io
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from benchmarks.published.software import implementation_of
from triaxis.engine.config.quantities.plan import parallel_sizes
from triaxis.engine.config.rules.layout import layers_fill_stages, ranks_can_be_listed
from triaxis.engine.config.rules.problem import Rule, Subject, divisors
from triaxis.engine.config.rules.sizes import GPT_SHAPES
from triaxis.engine.config.rules.training import batch_is_whole_microbatches, microbatches_can_be_listed
from triaxis.engine.config.tree import Config
from triaxis.engine.errors import ConfigError, shown
from triaxis.engine.layout.rank_grid import ParallelSizes
from triaxis.engine.storage.state_files import read_regular
from triaxis.models.predict.step_time.cluster import Cluster, cluster_of
from triaxis.models.predict.step_time.implementation import OURS, Implementation

COLUMNS = (
    *("source", "model", "layers", "hidden", "heads", "kv_heads", "ffn", "seq", "vocab", "gpus", "gpu_type"),
    *("tp", "pp", "vpp", "cp", "ep", "dp", "micro_batch", "global_batch", "recompute", "dtype"),
    *("tflops_per_gpu", "mfu_percent", "tokens_per_s_per_gpu", "step_time_s", "note"),
)
"""The header. Other columns may stand beside them."""

WHOLE = ("layers", "hidden", "heads", "seq", "gpus", "tp", "pp", "global_batch")
"""Numbers that a prediction needs."""
MAYBE_WHOLE = ("kv_heads", "ffn", "vocab", "cp", "ep", "dp", "micro_batch")
"""Numbers that may be empty: their usual value is meant, or they are searched."""

GPT2_VOCABULARY = 50257
"""Tokens where a GPT's row names none; Megatron-LM pads them to a multiple of 128 tp."""

SHAPES: tuple[Rule, ...] = (
    *(*GPT_SHAPES, layers_fill_stages, ranks_can_be_listed),
    *(batch_is_whole_microbatches, microbatches_can_be_listed),
)
"""The rules that hold for any software. Others are of this engine, and stop no prediction of another one's run."""

GPT = MappingProxyType({"norm": "layernorm", "activation": "gelu", "position": "learned", "bias": "all"})
LLAMA = MappingProxyType(
    {"norm": "rmsnorm", "activation": "swiglu", "position": "rope", "bias": "none", "tie_embeddings": False}
)
SQUARED = MappingProxyType({**LLAMA, "activation": "relu2"})

ARCHITECTURES: tuple[tuple[str, Mapping[str, object]], ...] = (
    ("llama", LLAMA),
    ("nemotron", MappingProxyType({**SQUARED, "norm": "layernorm"})),  # 2402.16819, section 2
    ("nanochat", SQUARED),  # karpathy/nanochat, gpt.py
    ("mpt", MappingProxyType({**GPT, "bias": "none"})),  # llm-foundry: no_bias
    ("gpt", GPT),
    ("mt-nlg", GPT),
    ("zb-", GPT),
)
"""By a word of the model's name. Of other models, those with an MLP of other than 4 h are taken for Llama's kind."""

EXPERTS = re.compile(r"\d+x\d|moe|mixtral|-a\d+(\.\d+)?b|deepseek-v[23]", re.IGNORECASE)
RECOMPUTED = re.compile(r"(full|selective|none)\b(\+SP)?", re.IGNORECASE)
DTYPES = re.compile(r"(mx)?fp8|bf16|fp16", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Run:
    """A row of the file.

    Attributes:
        line: of the file, counted from 1.
        words: the row as it stands.
        numbers: columns that hold a positive whole number.
        seconds: of a step; derived from tokens per second where no step time is given; None: the row has neither.
        lacks: why it cannot be predicted; empty: it can.
    """

    line: int
    words: Mapping[str, str]
    numbers: Mapping[str, int]
    seconds: float | None
    lacks: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.words["model"]

    @property
    def gpu_type(self) -> str:
        return self.words["gpu_type"]

    @property
    def is_timed(self) -> bool:
        """Return whether there is a published time to compare with."""
        return self.seconds is not None

    @property
    def layout(self) -> str:
        """Return the published layout in words."""
        named = {key: self.words[key] for key in ("tp", "cp", "pp", "vpp", "dp")}
        parts = [f"{key} {value}" for key, value in named.items() if value not in ("", "1")]
        return " ".join([*parts, f"mb {self.words['micro_batch'] or '?'}", self.words["recompute"] or "?"])

    @property
    def tokens(self) -> int:
        """Return the tokens of a step."""
        return self.numbers["global_batch"] * self.numbers["seq"]

    @property
    def shape(self) -> tuple[int, ...]:
        """Return what makes two rows runs of one model: sizes and length, whatever the rows call it."""
        return tuple(self.numbers.get(key, 0) for key in ("layers", "hidden", "heads", "kv_heads", "ffn", "seq"))


def read_runs(path: Path) -> list[Run]:
    """Read the rows of a CSV file.

    Raises:
        ConfigError: it cannot be read, is no CSV, or lacks columns.
    """
    try:
        text = read_regular(path).decode("utf-8-sig")
    except OSError as error:
        raise ConfigError([f"{path}: {error.strerror}. Give the path of a CSV file of published runs."]) from error
    except UnicodeDecodeError as error:
        raise ConfigError([f"{path}: it is no text in UTF-8. Save the table as CSV in UTF-8."]) from error
    reader = csv.reader(io.StringIO(text, newline=""))
    try:
        header = next(reader, [])
        if missing := [name for name in COLUMNS if name not in header]:
            raise ConfigError(
                [
                    f"{path}: column{'s' * (len(missing) > 1)} {', '.join(missing)} missing: no row can say what it ran. "
                    f"The header is {','.join(COLUMNS)}."
                ]
            )
        if twice := sorted({name for name in header if name in COLUMNS and header.count(name) > 1}):
            raise ConfigError(
                [f"{path}: column {', '.join(twice)} stands there twice: which one counts would be a guess."]
            )
        runs = [_run(reader.line_num, header, row) for row in reader if any(cell.strip() for cell in row)]
    except csv.Error as error:
        raise ConfigError([f"{path}: line {reader.line_num}: {error}: it is no CSV file."]) from error
    if not runs:
        raise ConfigError([f"{path}: it has no row below its header: there is nothing to compare with."])
    return runs


def _run(line: int, header: list[str], cells: list[str]) -> Run:
    words = dict.fromkeys(COLUMNS, "") | {
        name: cell.strip() for name, cell in zip(header, cells, strict=False) if name in COLUMNS
    }
    lacks: list[str] = []
    if len(cells) != len(header):
        lacks.append(f"it has {len(cells)} cells below {len(header)} columns: what stands where is a guess")
    numbers = {}
    for name in (*WHOLE, *MAYBE_WHOLE):
        if words[name] == "":
            lacks += [name] if name in WHOLE else []
        elif (number := _whole(words[name])) is None:
            lacks.append(f"{name} = {shown(words[name])} is no positive whole number")
        else:
            numbers[name] = number
    if words["vpp"] not in ("", ">1") and _whole(words["vpp"]) is None:
        lacks.append(f"vpp = {shown(words['vpp'])} is no positive whole number, nor >1")
    seconds, rate = (_positive(name, words, lacks) for name in ("step_time_s", "tokens_per_s_per_gpu"))
    if seconds is None and rate is not None and {"global_batch", "seq", "gpus"} <= numbers.keys():
        seconds = numbers["global_batch"] * numbers["seq"] / (numbers["gpus"] * rate)
    return Run(line, words, numbers, seconds, (*lacks, *_missing_facts(words, numbers)))


def _whole(word: str) -> int | None:
    return int(word) if re.fullmatch(r"0*[1-9][0-9]{0,17}", word) else None


def _positive(name: str, words: Mapping[str, str], lacks: list[str]) -> float | None:
    """Return a positive number of a column, None where it is empty or none; the latter is added to `lacks`."""
    word = words[name]
    if word == "":
        return None
    try:
        value = float(word)
    except ValueError:
        value = 0.0
    if 0 < value < float("inf"):
        return value
    lacks.append(f"{name} = {shown(word)} is no positive number")
    return None


def _missing_facts(words: Mapping[str, str], numbers: Mapping[str, int]) -> Iterator[str]:
    """Yield what no number of the row says and a prediction needs."""
    if numbers.get("ep", 1) > 1 or EXPERTS.search(words["model"]):
        yield "experts: the cost model has none"
    if device_of(words["gpu_type"]) is None:
        yield f"a calibrated device for {shown(words['gpu_type'])}"
    if _software(words) is OURS:
        yield f"a record of the software of {shown(words['source'])}"
    if words["recompute"] and RECOMPUTED.match(words["recompute"]) is None:
        yield f"recompute = {shown(words['recompute'])} is none of full, selective, selective+SP, none"
    if DTYPES.search(words["dtype"]) is None:
        yield f"a rate for dtype {shown(words['dtype'])}"
    family = _architecture(words, numbers)
    if "vocab" not in numbers and family.get("activation") != "gelu":
        yield "vocab"
    if "ffn" not in numbers and family is LLAMA:
        yield "ffn"
    sizes = [numbers.get(axis, 1) for axis in ("tp", "pp", "cp", "dp")]
    if "gpus" in numbers and "dp" in numbers and sizes[0] * sizes[1] * sizes[2] * sizes[3] != numbers["gpus"]:
        yield f"tp x pp x cp x dp = {sizes[0] * sizes[1] * sizes[2] * sizes[3]} is not gpus = {numbers['gpus']}"
    elif "gpus" in numbers and numbers["gpus"] % (sizes[0] * sizes[1] * sizes[2]):
        yield f"gpus = {numbers['gpus']} is no multiple of tp x pp x cp = {sizes[0] * sizes[1] * sizes[2]}"


def device_of(gpu_type: str) -> str | None:
    """Return the name of the calibrated device that a GPU type means; None where there is none."""
    words = gpu_type.upper()
    if words.startswith("H100") and ("96GB" in words or "500W" in words):
        return "H100-SXM-96GB-500W"
    for family, memory in (("A100", "80GB"), ("H100", "80GB"), ("H200", "141GB")):
        others = re.findall(r"\d+GB(?!/S)", words)
        if re.match(rf"{family}(?![0-9])", words) and "PCIE" not in words and set(others) <= {memory}:
            return f"{family}-SXM-{memory}"
    return None


def _software(words: Mapping[str, str]) -> Implementation:
    return implementation_of(words["source"], words["note"], words["dtype"])


def _architecture(words: Mapping[str, str], numbers: Mapping[str, int]) -> Mapping[str, object]:
    name = words["model"].lower()
    named = next((family for word, family in ARCHITECTURES if word in name), None)
    if named is not None:
        return named
    is_four = "ffn" not in numbers or numbers["ffn"] == 4 * numbers.get("hidden", 0)
    return GPT if is_four else LLAMA


@dataclass(frozen=True, slots=True)
class Setup:
    """Cluster, software and configurations that stand for a published run.

    Attributes:
        cluster: with its usual links.
        implementation: the software.
        choices: configurations, one for each value of what the row leaves open.
        open: the columns that are searched.
        broken: rules that the shapes break, in words; then there are no choices.
    """

    cluster: Cluster
    implementation: Implementation
    choices: tuple[tuple[Config, ParallelSizes], ...] = ()
    open: tuple[str, ...] = ()
    broken: tuple[str, ...] = field(default=())


def setup_of(run: Run) -> Setup:
    """Build the configurations of a run that lacks nothing.

    Raises:
        ConfigError: its devices fill no whole nodes.
    """
    numbers, words = run.numbers, run.words
    how = _software(words)
    cluster = cluster_of(f"{numbers['gpus']}x{device_of(run.gpu_type)}")
    tp, pp, cp = (numbers.get(axis, 1) for axis in ("tp", "pp", "cp"))
    dp = numbers["gpus"] // (tp * pp * cp)
    vpps, micros, recomputes = _vpps(run, pp, how), _micro_batches(run, dp), _recomputes(run)
    choices, broken = [], []
    for vpp, micro, granularity in product(vpps, micros, recomputes):
        if vpp > 1 and len(vpps) * len(micros) > 1 and numbers["global_batch"] % (micro * dp * pp):
            # What is searched keeps its software's rule: interleaved microbatches come in rounds of pp (2104.04473, section 2.2).
            continue
        try:
            config = Config.model_validate(_sections(run, how, vpp, dp, micro, granularity, cluster.gpus_per_node))
        except ValidationError as error:
            first = error.errors()[0]
            broken.append(f"{'.'.join(map(str, first['loc']))}: {first['msg']}")
            continue
        if problems := _broken_shapes(config, numbers["gpus"], cluster.gpus_per_node):
            broken += problems
        else:
            choices.append((config, parallel_sizes(config)))
    columns = (("vpp", vpps), ("micro_batch", micros), ("recompute", recomputes))
    found = (
        () if choices else tuple(dict.fromkeys(broken)) or (f"no micro batch makes whole rounds of pp {pp} with vpp",)
    )
    return Setup(cluster, how, tuple(choices), tuple(name for name, values in columns if len(values) > 1), found)


def _broken_shapes(config: Config, gpus: int, per_node: int) -> list[str]:
    subject = Subject(config, gpus, per_node)
    return [f"{problem.key} {problem.rule}" for rule in SHAPES for problem in rule(subject)]


def _vpps(run: Run, pp: int, how: Implementation) -> list[int]:
    given, layers = _whole(run.words["vpp"]), run.numbers["layers"]
    if given is not None:
        return [given]
    if pp == 1:
        return [1]
    if run.words["vpp"] == ">1" and how.chunks:
        return [how.chunks]
    least = 2 if run.words["vpp"] == ">1" else 1
    depths = range(least, layers // pp + 1)
    # Stages of equal depth where there are any.
    return [vpp for vpp in depths if layers % (pp * vpp) == 0] or list(depths) or [least]


def _micro_batches(run: Run, dp: int) -> list[int]:
    if "micro_batch" in run.numbers:
        return [run.numbers["micro_batch"]]
    sizes = divisors(max(1, run.numbers["global_batch"] // dp), 1)
    return [size for size in sizes if size.bit_count() == 1]


def _recomputes(run: Run) -> list[str]:
    found = RECOMPUTED.match(run.words["recompute"])
    return ["none", "selective", "full"] if found is None else [found[1].lower()]


def _sections(
    run: Run, how: Implementation, vpp: int, dp: int, micro: int, granularity: str, per_node: int
) -> dict[str, Any]:
    numbers = run.numbers
    tp = numbers["tp"]
    vocabulary = numbers.get("vocab", -(-GPT2_VOCABULARY // (128 * tp)) * 128 * tp)
    model = {
        **_architecture(run.words, numbers),
        "num_layers": numbers["layers"],
        "hidden_size": numbers["hidden"],
        "num_attention_heads": numbers["heads"],
        "num_kv_heads": numbers.get("kv_heads"),
        "ffn_hidden_size": numbers.get("ffn"),
        "seq_length": numbers["seq"],
        "vocab_size": vocabulary,
        # Published vocabularies are padded already, at least to whole rows of each rank.
        "vocab_multiple": tp,
        "hidden_dropout": how.dropout,
        "attention_dropout": how.dropout,
    }
    if "untied" in run.words["note"]:
        model["tie_embeddings"] = False
    cuts = how.sequence_parallel or "+SP" in run.words["recompute"].upper()
    return {
        "model": model,
        "data": {"synthetic": True},
        "train": {"steps": 1, "global_batch_size": numbers["global_batch"], "micro_batch_size": micro},
        "parallel": {"tp": tp, "pp": numbers["pp"], "vpp": vpp, "cp": numbers.get("cp", 1), "dp": dp}
        | {"sequence_parallel": cuts and tp > 1},
        "recompute": {"granularity": granularity, "head_tokens": None},
        # fp16 multiplies and moves as many bytes as bf16; fp8 is a property of the software.
        "precision": {"dtype": "bf16", "gradients": "bf16" if how.gradient_bytes == 2 else "full"},
        "kernels": {"attention": "auto" if how.attention else "explicit"},
        "runtime": {"ranks_per_node": per_node},
    }
