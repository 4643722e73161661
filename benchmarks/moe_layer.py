"""Our layer of experts next to Megatron-Core's on the CPU: same weights, tokens, output and gradients, in pairs in one run.

    ours     `models/gpt/moe.py` on one rank, experts as a loop; weight gradients are added to main grads
    theirs   `MoELayer` of Megatron-Core 0.16 with `SequentialMLP`, its dispatch by all-gather or by all-to-all

Both are forward and backward of one layer. Their weight gradients are the ones of autograd, set to None before each pass, so that
nothing is added up there. Outputs and gradients are compared first, and a difference beyond rounding stops the run. What
Megatron-Core asks of a GPU for speed (Transformer Engine, grouped GEMMs, fused kernels) is not there.

    OMP_NUM_THREADS=1 python -m benchmarks.moe_layer
    OMP_NUM_THREADS=1 python -m benchmarks.moe_layer --experts 64 --top-k 8 --ffn 128 --tokens 1024
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from rich.console import Console

from benchmarks.megatron_peer import make_on_cpu
from benchmarks.pairs import Interval, in_turn, median_interval
from benchmarks.records import append_record
from triaxis.engine.comm.runtime import RankEnvironment
from triaxis.engine.comm.topology import Topology
from triaxis.engine.config.quantities.plan import stages_of
from triaxis.engine.config.schema.dotted import with_value
from triaxis.engine.config.tree import Config
from triaxis.engine.kernels.registry import open_kernels
from triaxis.engine.layout.param_layout import layout_parameters
from triaxis.engine.layout.shard_spec import REDUCE_AXES
from triaxis.engine.numerics.precision import DTYPES
from triaxis.engine.optimizer.grad_buffer import GradBuffers
from triaxis.engine.tensor_parallel.dropout import DropoutKeys, DropoutSites
from triaxis.engine.tensor_parallel.initial_weights import initialize
from triaxis.launch.rank.join import join
from triaxis.launch.verify.oracles.megatron_cpu import on_cpu
from triaxis.models.gpt.chunk import build_chunks
from triaxis.models.gpt.moe import MoE
from triaxis.models.predict.rank_memory import resolve_recompute

LAYER = "layers.0.mlp."
LARGEST_DIFFERENCE = 1e-6
"""Norm of a difference over the norm, in float64: theirs has a router whose softmax is in fp32 all the same."""

Tensors = Mapping[str, torch.Tensor]
Pass = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""(x, gradient of the output) -> (output, gradient of x), all [s, b, h]."""


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two layers.

    Attributes:
        run: one forward and backward.
        gradients: of the last pass, by our names and in our shapes.
    """

    run: Pass
    gradients: Callable[[], Tensors]


@dataclass(frozen=True, slots=True)
class Result:
    """A comparison with one form of their dispatch; seconds of the clock are medians of a forward and backward.

    Attributes:
        cpu_ratio: of the process' CPU time, which other work on the machine disturbs less.
    """

    dispatch: str
    largest_difference: float
    num_pairs: int
    speed_ratio: Interval
    cpu_ratio: Interval
    our_seconds: float
    their_seconds: float


class HostStream:
    """The stream of CUDA that their all-to-all copies counts to the host with; here they are on the host."""

    def record_event(self) -> "HostStream":
        return self

    def synchronize(self) -> None:
        """Wait for nothing."""


def config_of(options: argparse.Namespace, dtype: str) -> Config:
    """A model of one layer of experts, SwiGLU without biases, softmax over the chosen experts."""
    shared = options.shared
    return Config.model_validate(
        {
            "model": {
                "norm": "rmsnorm",
                "activation": "swiglu",
                "position": "rope",
                "bias": "none",
                "num_layers": 1,
                "hidden_size": options.hidden,
                "num_attention_heads": 1,
                "seq_length": options.tokens,
                "vocab_size": 128,
                "init_std": 0.2,
                "layers": ["moe"],
                "moe": {
                    "num_experts": options.experts,
                    "top_k": options.top_k,
                    "ffn_hidden_size": options.ffn,
                    "shared_experts": shared,
                },
            },
            "data": {"synthetic": True},
            "train": {"steps": 1, "global_batch_size": 1, "micro_batch_size": 1, "seed": 1},
            "precision": {"dtype": dtype},
            "parallel": {"dp": 1},
        }
    )


def ours(config: Config, topology: Topology) -> tuple[Side, Tensors]:
    """Build our layer in flat buffers of its own; return it with its weights by name."""
    config = resolve_recompute(config, topology.sizes)
    (chunk,), held = build_chunks(config, topology, open_kernels(config, topology), stages_of(config))
    layer = next(module for module in chunk.modules() if isinstance(module, MoE))
    inside = tuple(f"{layer.name}.{part}." for part in ("router", "experts", "shared"))
    parameters = {name: parameter for name, parameter in held.items() if name.startswith(inside)}
    records = [parameter.record for parameter in parameters.values()]
    axes = {name: axis for name in REDUCE_AXES if (axis := topology.optional_axis(name))}
    layouts = layout_parameters(records, dp=1, expert_dp=1, bucket_numel=2**30)
    # Main grads in the dtype of the weights, as autograd gives them to the other side.
    precision = config.precision.model_copy(update={"gradients": "bf16"})
    buffers = GradBuffers(layouts, parameters, precision, topology.device, axes, {"tp": topology.axis("tp")})
    initialize(parameters.values(), config.train.seed)
    keys = DropoutKeys(DropoutSites(config.train.seed), [0], None)

    def run(x: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.detach().requires_grad_()
        buffers.start(num_microbatches=1)
        out = layer(x, keys)
        out.backward(grad)
        buffers.finish()
        return out, x.grad

    def gradients() -> Tensors:
        return {name: each.bound_main_grad() for name, each in parameters.items()}

    return Side(run, gradients), {name: each.value.detach() for name, each in parameters.items()}


def theirs(config: Config, weights: Tensors, dispatch: str) -> Side:
    """Build Megatron-Core's layer with the same weights; inside of `on_cpu` alone."""
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.moe import moe_utils, token_dispatcher
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    model, moe, dtype = config.model, config.model.moe, DTYPES[config.precision.dtype]
    assert moe is not None
    # Its module looks for a GEMM of Transformer Engine by a name that it has not defined without that package.
    moe_utils.te_general_gemm = None
    stream = HostStream()
    token_dispatcher.MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = stream
    torch.cuda.current_stream = lambda: stream  # type: ignore[assignment,return-value]
    settings = TransformerConfig(
        num_layers=1,
        hidden_size=model.hidden_size,
        num_attention_heads=1,
        ffn_hidden_size=moe.ffn_hidden_size,
        num_moe_experts=moe.num_experts,
        moe_ffn_hidden_size=moe.ffn_hidden_size,
        moe_shared_expert_intermediate_size=moe.shared_size or None,
        moe_router_topk=moe.top_k,
        moe_router_load_balancing_type="none",
        moe_router_dtype="fp64" if dtype == torch.float64 else "fp32",
        moe_token_dispatcher_type=dispatch,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        bias_activation_fusion=False,
        add_bias_linear=False,
        use_cpu_initialization=True,
        params_dtype=dtype,
    )
    layer = build_module(get_moe_module_spec(use_te=False, num_experts=moe.num_experts), config=settings).to(dtype)
    names = dict(layer.named_parameters())
    parts = {LAYER + "router.weight": ["router.weight"]}
    for ours, linear in (("gate_up", "linear_fc1"), ("down", "linear_fc2")):
        parts[f"{LAYER}experts.{ours}.weight"] = [
            f"experts.local_experts.{expert}.{linear}.weight" for expert in range(moe.num_experts)
        ]
        if moe.shared_size:
            parts[f"{LAYER}shared.{ours}.weight"] = [f"shared_experts.{linear}.weight"]
    with torch.no_grad():
        for ours, of in parts.items():
            for name, value in zip(of, weights[ours].reshape(len(of), *names[of[0]].shape), strict=True):
                names[name].copy_(value)

    def run(x: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.detach().requires_grad_()
        for parameter in names.values():
            parameter.grad = None
        out, _ = layer(x)
        out.backward(grad)
        return out, x.grad

    def gradients() -> Tensors:
        return {
            ours: torch.stack([names[name].grad for name in of]).view(weights[ours].shape) for ours, of in parts.items()
        }

    return Side(run, gradients)


def difference(a: Side, b: Side, x: torch.Tensor, grad: torch.Tensor) -> float:
    """Return the largest relative difference of outputs, gradients of the input, and gradients of the weights."""
    (out, grad_x), (their_out, their_grad_x) = a.run(x, grad), b.run(x, grad)
    mine, other = a.gradients(), b.gradients()
    pairs = [(out, their_out), (grad_x, their_grad_x), *((mine[name], other[name]) for name in other)]
    assert mine.keys() == other.keys()
    return max(float((one - two).norm() / two.norm()) for one, two in pairs)


def draw(config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw tokens and the gradient of the output: [s, 1, h]."""
    generator = torch.Generator().manual_seed(7)
    shape, dtype = (config.model.seq_length, 1, config.model.hidden_size), DTYPES[config.precision.dtype]
    x, grad = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    return x, grad


def compare(config: Config, topology: Topology, dispatch: str, num_pairs: int) -> Result:
    """Check the two layers in float64, then time them in the configuration's dtype, the order turning from pair to pair.

    Raises:
        ValueError: they differ by more than rounding.
    """
    exact = with_value(config, "precision.dtype", "float64")
    mine, weights = ours(exact, topology)
    apart = difference(mine, theirs(exact, weights, dispatch), *draw(exact))
    if not apart <= LARGEST_DIFFERENCE:
        raise ValueError(f"{dispatch}: the layers differ by {apart:.1e} in float64: their times cannot be compared.")
    mine, weights = ours(config, topology)
    other, (x, grad) = theirs(config, weights, dispatch), draw(config)
    calls = {"ours": lambda: mine.run(x, grad), "theirs": lambda: other.run(x, grad)}
    one, two = in_turn(calls, num_pairs, warm_up=3, device=topology.device).values()
    speed = median_interval([b.wall / a.wall for a, b in zip(one, two, strict=True)])
    cpu = median_interval([b.cpu / a.cpu for a, b in zip(one, two, strict=True)])
    return Result(dispatch, apart, num_pairs, speed, cpu, median(a.wall for a in one), median(b.wall for b in two))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.moe_layer",
        description=(__doc__ or "").split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--experts", type=int, default=8, help="experts of the layer")
    parser.add_argument("--top-k", type=int, default=2, help="experts of a token")
    parser.add_argument("--hidden", type=int, default=256, help="hidden size")
    parser.add_argument("--ffn", type=int, default=512, help="inner width of an expert")
    parser.add_argument("--shared", type=int, default=0, help="shared experts")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a pass")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--pairs", type=int, default=31, help="pairs of timed passes")
    parser.add_argument("--json", type=Path, default=Path("runs/benchmarks/moe_layer.jsonl"), help="appended to")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Compare with both forms of their dispatch; print the ratios, and append a line."""
    options, console = parse(argv), Console(soft_wrap=True)
    config, results = config_of(options, options.dtype), []
    with join(config, RankEnvironment.from_variables({})) as rank:
        with on_cpu():
            pass
        make_on_cpu()
        for dispatch in ("allgather", "alltoall"):
            result = compare(config, rank.topology, dispatch, options.pairs)
            results.append(result)
            console.print(
                f"megatron-core, {dispatch}: passes per second, ours / theirs   {result.speed_ratio}, "
                f"in CPU time {result.cpu_ratio}   ({result.our_seconds * 1e3:.2f} and {result.their_seconds * 1e3:.2f} ms); "
                f"in float64 they differ by at most {result.largest_difference:.1e}"
            )
    append_record(options.json, "moe_layer", argv, {"results": [asdict(result) for result in results]})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
