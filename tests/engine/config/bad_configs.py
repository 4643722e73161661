"""Configurations that must be refused, each with the words that its refusal must say."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.engine.config.bad_expert_configs import BAD_EXPERTS
from tests.engine.config.bad_extensions import BAD_EXTENSIONS
from tests.engine.config.bad_graphs import BAD_GRAPHS
from tests.engine.config.bad_latents import BAD_LATENTS
from tests.engine.config.bad_phases import BAD_PHASES
from tests.engine.config.bad_rates import BAD_RATES
from tests.engine.config.bad_rows import BAD_ROWS
from tests.engine.config.bad_scales import BAD_SCALES
from triaxis.engine.config.tree import Config

MIXED_SCHEDULE = Path(__file__).parents[2] / "parity" / "mixed_schedule.txt"
"""For pp 2 and 5 microbatches."""

LEGAL = [
    "model={num_layers: 8, hidden_size: 64, num_attention_heads: 8, seq_length: 32, vocab_size: 300}",
    "data={train: corpus}",
    "train={steps: 10, global_batch_size: 16, micro_batch_size: 2}",
]
"""A legal config, as overrides."""


def config_with(*overrides: str) -> Config:
    """LEGAL with some fields changed, whether that is legal or not."""
    tree: dict[str, Any] = {}
    for override in (*LEGAL, *overrides):
        dotted, _, text = override.partition("=")
        *sections, key = dotted.split(".")
        at = tree
        for section in sections:
            at = at.setdefault(section, {})
        at[key] = yaml.safe_load(text)
    return Config.model_validate(tree)


BAD: dict[str, tuple[Sequence[str], dict[str, int], Sequence[str]]] = {
    # name: changes, what is known of the cluster, words of the message
    "heads do not fill the width": (
        ["model.hidden_size=60"],
        {},
        ["model.hidden_size = 60", "multiple of num_attention_heads = 8", "hidden_size = 64 or 48", "head_dim"],
    ),
    **BAD_EXTENSIONS,
    **BAD_GRAPHS,
    **BAD_LATENTS,
    **BAD_RATES,
    **BAD_PHASES,
    **BAD_ROWS,
    "lengths of documents that a corpus has": (
        ["data.synthetic_document_length=9"],
        {},
        ["data.synthetic_document_length = 9", "has no effect without data.synthetic", "data.synthetic = true"],
    ),
    "weights of nothing": (
        ["checkpoint.load_what=weights"],
        {},
        ["checkpoint.load, which is null", "random weights", "checkpoint.load_what = all"],
    ),
    "kept steps that are never saved": (
        ["checkpoint.interval=100", "checkpoint.keep_every=150"],
        {},
        ["checkpoint.keep_every = 150", "multiple of checkpoint.interval = 100", "keep_every = 100 or 200"],
    ),
    "a difference that is no field": (
        ["checkpoint.accept=[optimizer.lr, lr]"],
        {},
        ["checkpoint.accept", "and lr is none"],
    ),
    "more microbatches than a schedule can list": (
        ["train.global_batch_size=1000000000", "train.micro_batch_size=1"],
        {},
        ["1,000,000,000 microbatches", "at most 131,072", "train.global_batch_size = 131072"],
    ),
    "more ranks than groups can list": (
        ["parallel.tp=8", "parallel.dp=262144", "train.global_batch_size=524288"],
        {},
        ["tp x pp x dp = 8 x 1 x 262144", "is 2,097,152 ranks", "at most 1,048,576", "parallel.dp = 131072"],
    ),
    "rope with odd heads": (["model.hidden_size=40"], {}, ["model.head_dim = 5", "even", "position = learned"]),
    "rope with an odd head_dim": (["model.head_dim=7"], {}, ["model.head_dim = 7", "even", "head_dim = 6 or 8"]),
    "kv heads do not divide the heads": (
        ["model.num_kv_heads=3"],
        {},
        ["num_kv_heads = 3", "divide", "num_kv_heads = 2 or 4"],
    ),
    "more kv heads than heads": (["model.num_kv_heads=16"], {}, ["num_kv_heads = 16", "num_kv_heads = 8 or 4"]),
    "heads over tp": (
        ["model.num_attention_heads=4", "parallel.tp=8"],
        {},
        [
            "num_attention_heads = 4",
            "multiple of parallel.tp = 8",
            "whole heads",
            "num_attention_heads = 8",
            "parallel.tp = 4 or 2",
        ],
    ),
    "kv heads over tp": (
        [
            "model.num_attention_heads=12",
            "model.hidden_size=96",
            "model.num_kv_heads=4",
            "parallel.tp=6",
            "model.vocab_multiple=96",
        ],
        {},
        ["model.num_kv_heads = 4", "parallel.tp = 6", "replicas", "num_kv_heads = 3 or 2", "parallel.tp = 4 or 2"],
    ),
    "ffn over tp": (
        ["model.ffn_hidden_size=130", "parallel.tp=4"],
        {},
        ["ffn_hidden_size = 130", "128 or 132", "tp = 2 or 1"],
    ),
    "default ffn over tp": (
        ["model.hidden_size=9", "model.num_attention_heads=8", "model.head_dim=2", "parallel.tp=8"],
        {},
        ["model.ffn_hidden_size = 36", "multiple of parallel.tp = 8", "32 or 40"],
    ),
    "vocabulary over tp": (
        ["model.vocab_multiple=100", "parallel.tp=8"],
        {},
        ["model.vocab_multiple = 100", "vocab_size = 300 to 300", "parallel.tp = 8", "96 or 104", "tp = 4 or 2"],
    ),
    "sequence over tp": (
        ["model.seq_length=30", "parallel.tp=4", "parallel.sequence_parallel=true"],
        {},
        ["model.seq_length = 30", "sequence_parallel", "seq_length = 28 or 32", "sequence_parallel = false"],
    ),
    "bytes need 257 ids": (["model.vocab_size=256", "data.tokenizer=bytes"], {}, ["= 256", "at least 257", "= 257"]),
    "dropout in the fused kernel": (
        ["model.attention_dropout=0.1"],
        {},
        ["attention_dropout = 0.1", "kernels.attention = explicit", "attention_dropout = 0"],
    ),
    "kinds of layers that no layer is of": (
        ["model.layer_kinds={local: {window: 8}, global: {}}"],
        {},
        ["model.layers = null", "local, global", "model.layers=[local, global]"],
    ),
    "a pattern of unknown kinds": (
        ["model.layers=[local*5, global]", "model.layer_kinds={local: {window: 8}}"],
        {},
        ["model.layers", "names global", "model.layer_kinds has local", "global: {}"],
    ),
    "a pattern without a count": (
        ["model.layers=['local*0']", "model.layer_kinds={}"],
        {},
        ["model.layers = local*0", "name*count", "local*5"],
    ),
    "a kind that no layer names": (
        ["model.layers=[local]", "model.layer_kinds={local: {window: 8}, lokal: {}}"],
        {},
        ["model.layer_kinds = lokal", "does not name"],
    ),
    "a scaling without its factor": (
        ["model.rope_scaling={type: linear}"],
        {},
        ["model.rope_scaling.factor", "type = linear"],
    ),
    "a scaling with another's field": (
        ["model.rope_scaling={type: linear, factor: 8.0, beta_fast: 32}"],
        {},
        ["model.rope_scaling.beta_fast = 32", "no effect with type = linear"],
    ),
    "a rotation of less than a pair": (
        ["model.rotary_share=0.2"],
        {},
        ["model.rotary_share", "rotates 1 of the 8", "even number"],
    ),
    "scaled positions without rotation": (
        ["model.position=learned", "model.rope_scaling={type: linear, factor: 2.0}"],
        {},
        ["model.rope_scaling = {type: linear, factor: 2}", "no effect with position = learned", "rope_scaling = null"],
    ),
    "a kernel that cannot cap": (
        ["model.attention_softcap=50", "kernels.attention=flash"],
        {},
        ["kernels.attention = flash", "no cap of the logits", "kernels.attention = auto or flex"],
    ),
    "a compiled kernel in an eager run": (
        ["model.attention_softcap=50", "kernels={attention: flex, elementwise: eager}"],
        {},
        ["kernels.attention = flex", "compiled with the elementwise functions", "kernels.attention = blocks"],
    ),
    "a norm whose output is not kept": (
        ["model.norm_placement=after", "recompute.granularity=selective", "recompute.modules=[norm, activation]"],
        {},
        ["recompute.modules", "no norm's output is kept", "recompute.modules = [activation]"],
    ),
    "a kernel without windows": (
        ["model.window=8", "kernels.attention=cudnn"],
        {},
        ["kernels.attention = cudnn", "no windows", "kernels.attention = auto or varlen"],
    ),
    "fewer layers than stages": (
        ["parallel.pp=4", "parallel.vpp=3"],
        {},
        [
            "model.num_layers = 8",
            "pp x vpp = 4 x 3 = 12",
            "num_layers = 12",
            "parallel.pp = 2 or 1",
            "parallel.vpp = 2 or 1",
        ],
    ),
    "too few entries": (
        ["parallel.pp=2", "parallel.vpp=2", "parallel.layers_per_stage=[4, 4]"],
        {},
        ["layers_per_stage = [4, 4]", "4 entries, one per stage, not 2", "[2, 2, 2, 2] or null"],
    ),
    "entries of another sum": (
        ["parallel.pp=3", "parallel.layers_per_stage=[3, 3, 3]"],
        {},
        ["must sum to model.num_layers = 8, not 9", "layers_per_stage = [3, 3, 2]", "num_layers = 9"],
    ),
    "negative entry": (["parallel.pp=2", "parallel.layers_per_stage=[-1, 9]"], {}, ["[-1, 9]", "negative", "[4, 4]"]),
    "auto for too few layers": (
        ["parallel.pp=4", "parallel.vpp=3", "parallel.layers_per_stage=auto"],
        {},
        ["model.num_layers = 8", "pp x vpp = 4 x 3 = 12"],
    ),
    "a file beside a schedule's name": (
        [
            "parallel.pp=2",
            "parallel.dp=1",
            "train.global_batch_size=10",
            f"schedule.file={MIXED_SCHEDULE}",
            "schedule.name=zb_h1",
        ],
        {},
        ["schedule.name = zb_h1", "must be auto beside schedule.file", "schedule.name = auto"],
    ),
    "1f1b with chunks": (
        ["parallel.vpp=2", "schedule.name=1f1b"],
        {},
        ["schedule.name = 1f1b", "parallel.vpp = 2", "never run", "interleaved or auto", "vpp = 1"],
    ),
    "gpipe with chunks": (
        ["parallel.vpp=2", "schedule.name=gpipe"],
        {},
        ["schedule.name = gpipe", "interleaved or auto"],
    ),
    "nothing to interleave": (
        ["schedule.name=interleaved"],
        {},
        ["schedule.name = interleaved", "vpp = 1", "1f1b or auto"],
    ),
    "parts of a sample": (
        ["parallel.cp=3"],
        {},
        [
            "model.seq_length = 32",
            "multiple of 2 x parallel.cp = 6",
            "model.seq_length = 30 or 36",
            "parallel.cp = 2 or 4",
        ],
    ),
    "shards of parts of a sample": (
        ["parallel.cp=2", "parallel.tp=8", "parallel.sequence_parallel=true", "model.seq_length=24"],
        {},
        [
            "multiple of parallel.cp x parallel.tp = 16: sequence_parallel",
            "seq_length = 16 or 32",
            "sequence_parallel = false",
        ],
    ),
    "attention made again in parts": (
        ["parallel.cp=2", "recompute.granularity=selective"],
        {},
        ["recompute.modules", "has attention, but with parallel.cp = 2", "recompute.granularity = none"],
    ),
    "heads over more ranks": (
        ["parallel.cp=4", "parallel.tp=2", "model.num_kv_heads=4", "parallel.cp_method=ulysses"],
        {},
        [
            "parallel.cp_method = ulysses",
            "has 2 of the 4 key/value heads",
            "parallel.cp_method = all_gather",
            "parallel.cp = 2",
        ],
    ),
    **BAD_EXPERTS,
    **BAD_SCALES,
    "world size without dp": (
        ["parallel.tp=2", "parallel.pp=4", "train.global_batch_size=48"],
        {"world_size": 12},
        ["tp x pp = 2 x 4", "divide the world size 12", "parallel.tp = 1", "parallel.pp = 3 or 2", "start 16 ranks"],
    ),
    "world size with dp": (
        ["parallel.tp=2", "parallel.dp=2"],
        {"world_size": 8},
        ["tp x pp x dp = 2 x 1 x 2", "is 4 and must be the world size 8", "dp = 4 or null", "tp = 4", "start 4 ranks"],
    ),
    "smaller world than one replica": (
        ["parallel.tp=4"],
        {"world_size": 2},
        ["world size 2", "tp = 2 or 1", "start 4 ranks"],
    ),
    "tp across nodes": (
        ["parallel.tp=8"],
        {"world_size": 16, "ranks_per_node": 4},
        ["parallel.tp = 8", "4 ranks of a node", "slow network", "tp = 4 or 2", "allow_tp_across_nodes"],
    ),
    "tp across nodes of the config": (
        ["parallel.tp=8", "parallel.dp=2", "runtime.ranks_per_node=4"],
        {},
        ["parallel.tp = 8", "4 ranks of a node"],
    ),
    "nodes that are not filled": (
        ["parallel.pp=3", "parallel.dp=4"],
        {"ranks_per_node": 8},
        ["= 12 ranks", "whole nodes of 8", "parallel.pp = 2 or 4", "parallel.dp = 2 or 1"],
    ),
    "batch over dp": (
        ["parallel.dp=3"],
        {},
        ["global_batch_size = 16", "micro_batch_size x dp = 2 x 3 = 6", "= 18 or 12", "dp = 2 or 4"],
    ),
    "batch over a derived dp": (["parallel.tp=2"], {"world_size": 12}, ["2 x 6 = 12", "global_batch_size = 12 or 24"]),
    "batch over the microbatch": (
        ["train.micro_batch_size=3"],
        {},
        ["micro_batch_size = 3", "15 or 18", "micro_batch_size = 2 or 4"],
    ),
    "microbatch above the batch": (
        ["train.micro_batch_size=32"],
        {},
        ["global_batch_size = 32", "micro_batch_size = 16 or 8"],
    ),
    "no length": (["train.steps=null"], {}, ["train.steps = null", "no end"]),
    "two lengths": (["train.tokens=1000"], {}, ["train.steps = 10", "train.tokens = 1000", "ignored", "= null"]),
    "warm-up after the end": (["optimizer.warmup_steps=11"], {}, ["warmup_steps = 11", "10 steps", "train.steps = 11"]),
    "warm-up after the end in tokens": (
        ["train.steps=null", "train.tokens=5000", "optimizer.warmup_steps=11"],
        {},
        ["at most the 10 steps", "warmup_steps = 10"],
    ),
    "decay before the warm-up": (
        ["optimizer.warmup_steps=5", "optimizer.decay_steps=5"],
        {},
        ["decay_steps = 5", "more than warmup_steps = 5", "6 or null"],
    ),
    "decay upwards": (
        ["optimizer.min_lr=0.1"],
        {},
        ["min_lr = 0.1", "at most lr = 0.0003", "min_lr = 0.0003", "lr = 0.1"],
    ),
    "a decay that never is": (
        ["optimizer.lr_schedule=constant", "optimizer.min_lr=1e-5"],
        {},
        ["lr_schedule = constant", "no effect", "cosine or linear"],
    ),
    "more layers to recompute than there are": (
        ["parallel.pp=3", "recompute={granularity: full, method: block, num_layers: 4}"],
        {},
        ["recompute.num_layers = 4", "at most 3", "num_layers = 3"],
    ),
    "recompute by another word": (
        ["recompute.num_layers=2"],
        {},
        ["recompute.granularity = none", "no effect", "= full"],
    ),
    "modules without what recomputes them": (
        ["recompute={granularity: full, modules: [norm]}"],
        {},
        ["recompute.modules = [norm]", "no effect", "modules = null", "granularity = selective"],
    ),
    "a module twice": (
        ["recompute={granularity: selective, modules: [norm, norm]}"],
        {},
        ["recompute.modules = [norm, norm]", "each module once", "[norm]"],
    ),
    "no module": (
        ["recompute={granularity: selective, modules: []}"],
        {},
        ["recompute.modules = []", "nothing would be recomputed", "[attention]", "granularity=none"],
    ),
    "an automatic choice without a measure": (
        ["recompute.granularity=auto"],
        {},
        ["recompute.memory_gb = null", "granularity = auto", "Set recompute.memory_gb"],
    ),
    "a measure without an automatic choice": (
        ["recompute={granularity: selective, memory_gb: 70}"],
        {},
        ["recompute.memory_gb = 70", "no effect", "granularity = auto", "memory_gb = null"],
    ),
    "norms whose results nobody keeps": (
        [
            "parallel.tp=2",
            "parallel.sequence_parallel=true",
            "recompute={granularity: selective, modules: [norm, activation], gathered_inputs: keep}",
        ],
        {},
        ["recompute.modules = [norm, activation]", "gathered_inputs = regather", "modules = [activation]"],
    ),
    "a rotation that is not there": (
        ["model.position=learned", "recompute={granularity: selective, modules: [norm, rope]}"],
        {},
        ["recompute.modules = [norm, rope]", "nothing to recompute", "modules = [norm]"],
    ),
    "copies of what was rotated": (
        ["model.qk_norm=true", "kernels.attention=explicit", "recompute={granularity: selective, modules: [rope]}"],
        {},
        ["recompute.modules = [rope]", "keeps copies", "attention = sdpa", "modules = [rope, attention]"],
    ),
    "an MLP whose input is cut": (
        ["parallel={tp: 2, sequence_parallel: true}", "recompute={granularity: selective, modules: [norm, mlp]}"],
        {},
        ["recompute.modules = [norm, mlp]", "gather", "[norm, activation]", "sequence_parallel = false"],
    ),
    "more layers to offload than there are": (
        ["parallel.pp=3", "offload.num_layers=4"],
        {},
        ["offload.num_layers = 4", "at most 3", "num_layers = 3"],
    ),
    "no corpus": (["data={}"], {}, ["data.train = []", "nothing to learn", "triaxis prepare", "synthetic = true"]),
    "no validation corpus": (["data.valid=[]"], {}, ["data.valid = []", "= null"]),
    "two corpora of one name": (["data.train=[{path: a, name: w}, {path: b, name: w}]"], {}, ["of one name"]),
    "a corpus twice": (["data.train=[a, {path: a, name: b}]"], {}, ["[{path: a}, {path: a, name: b}]", "once"]),
    "a negative split": (
        ["data.split=[1.0, -0.1, 0.1]"],
        {},
        ["data.split = [1, -0.1, 0.1]", "at least 0", "[0.98, 0.02, 0]"],
    ),
    "nothing to train on": (["data.split=[0, 1, 0]"], {}, ["data.split", "nothing to learn"]),
    "nothing to validate on": (
        ["data.split=[1, 0, 0]", "eval.interval=5"],
        {},
        ["eval.interval = 5", "no document", "split = [0.98, 0.02, 0]"],
    ),
    "a bucket for nothing": (
        ["optimizer.bucket_bytes=3"],
        {},
        ["bucket_bytes = 3", "main grad", "bucket_bytes = 67108864"],
    ),
    "no checkpoint to go back to": (
        ["resilience.on_nonfinite=rollback"],
        {},
        ["on_nonfinite = rollback", "interval = null", "on_nonfinite = stop or skip", "checkpoint.interval = 100"],
    ),
    "a window of no limit": (["resilience.skip_window=64"], {}, ["skip_window = 64", "= 128", "_deviations = 6"]),
    "a hang after the timeout": (
        ["runtime.hang_seconds=600"],
        {},
        [
            "hang_seconds = 600",
            "below runtime.timeout_seconds = 600",
            "hang_seconds = 300 or null",
            "timeout_seconds = 1200",
        ],
    ),
    "skipped samples that are none": (
        ["data.skip_samples=[[8, 16], [4, 4]]"],
        {},
        ["data.skip_samples = [[8, 16], [4, 4]]", "[4, 4] names no sample", "skip_samples = [[8, 16]]"],
    ),
    "a name with a slash": (["runtime.name=../x"], {}, ["runtime.name = ../x", "folder", "name = x"]),
    "an empty name": (['runtime.name=" "'], {}, ["runtime.name", "folder"]),
    "a trace past the end": (
        ["telemetry.profile={start: 9, steps: 3}"],
        {},
        [
            *("profile.start = 9", "steps 9 to 11", "the run has 10"),
            "profile.start = 8",
            "profile.steps = 2",
            "train.steps = 11",
        ],
    ),
    "a timeline past the end": (
        ["telemetry.timeline={start: 10, steps: 2}"],
        {},
        ["timeline.start = 10", "steps 10 to 11", "the run has 10", "timeline.start = 9", "timeline.steps = 1"],
    ),
    "a trace by nobody": (
        ["telemetry.profile={start: 1, ranks: [1, 8, -1]}"],
        {"world_size": 8},
        ["profile.ranks = [1, 8, -1]", "0 to 7", "8, -1", "ranks = [1]", "profile = null"],
    ),
    "NCCL on the CPU": (
        ["runtime.collectives=nccl", "runtime.device=cpu"],
        {},
        ["runtime.collectives = nccl", "GPUs only", "collectives = auto or gloo", "device = auto or cuda"],
    ),
    "a secret as a folder": (["runtime.runs_dir=glpat-aaaaaaaaaaaaaaaaaaaa"], {}, ["[redacted]", "runs_dir = runs"]),
    "ranges of a GPU on the CPU": (
        ["telemetry.nvtx=true", "runtime.device=cpu"],
        {},
        ["telemetry.nvtx = true", "looks at a GPU", "nvtx = false", "device = auto or cuda"],
    ),
}
