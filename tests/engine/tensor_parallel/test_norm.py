"""A branch added to the residual stream and the sum's norm, against autograd through plain operators in float64."""

import pytest
import torch
import torch.nn.functional as F

from tests.harness import compiler
from triaxis.engine.comm.collectives import Axis
from triaxis.engine.comm.ledger import Ledger
from triaxis.engine.config.schema.training import PrecisionConfig
from triaxis.engine.config.values.model_choices import NORMS
from triaxis.engine.kernels.fusion import EAGER, Form, Fusion
from triaxis.engine.kernels.norms import NormKernel
from triaxis.engine.layout.param_layout import layout_parameters
from triaxis.engine.layout.shard_spec import localize
from triaxis.engine.numerics.precision import DTYPES
from triaxis.engine.optimizer.grad_buffer import GradBuffers
from triaxis.engine.tensor_parallel.norm import Norm
from triaxis.engine.tensor_parallel.parameter import ShardedParameter
from triaxis.models.specs import Init, ParamSpec

EPS, SHAPE = 1e-5, (6, 3, 16)

Tensors = list[torch.Tensor]


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Given:
    """Inputs in one dtype, and a norm whose weights are in flat buffers."""

    def __init__(self, name: str, dtype: torch.dtype, fusion: Fusion, factor: float = 1.0) -> None:
        self.x, self.branch = (drawn(seed, *SHAPE).to(dtype).requires_grad_() for seed in (1, 2))
        records = [
            localize(
                ParamSpec(parameter, SHAPE[-1:], Init("ones")),
                tp=1,
                tp_index=0,
                sequence_parallel=False,
            )
            for parameter in NORMS[name].parameters
        ]
        parameters = {record.name: ShardedParameter(record, dtype) for record in records}
        alone = Axis("dp", [0], 0, None, Ledger())
        precision = PrecisionConfig(dtype=next(name for name, each in DTYPES.items() if each == dtype))
        layouts = layout_parameters(records, dp=1, bucket_numel=1)
        cpu = torch.device("cpu")
        self.buffers = GradBuffers(layouts, parameters, precision, cpu, {"dp": alone}, {"tp": alone})
        self.weights = list(parameters.values())
        for seed, weight in enumerate(self.weights, start=3):
            weight.value.data.copy_(drawn(seed, SHAPE[-1]))
        self.name, self.norm = name, Norm(NormKernel(name, EPS, fusion), self.weights, factor)


def grads(dtype: torch.dtype) -> Tensors:
    return [drawn(seed, *SHAPE).to(dtype) for seed in (8, 9)]


def ours(given: Given) -> Tensors:
    """Sum, norm, and the gradients of x, of the branch and of the trained weights."""
    y, normalised = given.norm(given.x, given.branch)
    given.buffers.start(num_microbatches=1)
    torch.autograd.backward((y, normalised), grads(y.dtype))
    given.buffers.finish()
    assert given.x.grad is not None and given.branch.grad is not None
    trained = [weight.bound_main_grad().clone() for weight in given.weights]
    return [y.detach(), normalised.detach(), given.x.grad, given.branch.grad, *trained]


def plain(given: Given, factor: float, dtype: torch.dtype) -> Tensors:
    """The same by autograd, in `dtype`."""
    x, branch = (each.detach().to(dtype).requires_grad_() for each in (given.x, given.branch))
    weights = [weight.value.detach().to(dtype).requires_grad_() for weight in given.weights]
    y = x + factor * branch
    if given.name == "layernorm":
        normalised = F.layer_norm(y, SHAPE[-1:], *weights, eps=EPS)
    else:
        offset = NORMS[given.name].offset
        normalised = F.rms_norm(y, SHAPE[-1:], weights[0] + offset if offset else weights[0], EPS)
    torch.autograd.backward((y, normalised), grads(dtype))
    trained = [weight.grad for weight in weights if weight.requires_grad]
    found = [y.detach(), normalised.detach(), x.grad, branch.grad, *trained]
    return [each for each in found if each is not None]


EVERY_FORM = pytest.mark.parametrize(
    ("name", "form"),
    [
        *((name, "eager") for name in NORMS),
        *(pytest.param(name, "compiled", marks=[compiler(), pytest.mark.slow]) for name in NORMS),
    ],
)
"""Every norm; compiled outside of CI, where `test_elementwise.py` compiles one norm by itself."""


@EVERY_FORM
@pytest.mark.parametrize("factor", [1.0, pytest.param(0.7, marks=pytest.mark.slow)])
def test_sum_norm_and_gradients_are_those_of_plain_operators(name: str, form: Form, factor: float) -> None:
    given = Given(name, torch.float64, Fusion(form), factor)
    for one, other in zip(ours(given), plain(given, factor, torch.float64), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@EVERY_FORM
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_narrower_dtypes_no_further_from_the_truth_than_plain_operators(
    name: str, form: Form, dtype: torch.dtype
) -> None:
    given = Given(name, dtype, Fusion(form))
    exact, theirs = plain(given, 1.0, torch.float64), plain(given, 1.0, dtype)
    # Sums of the same few numbers differ by the order of additions.
    slack = 1.05 if dtype == torch.bfloat16 else 2.0
    for mine, torchs, true in zip(ours(given), theirs, exact, strict=True):
        assert (mine - true).norm() <= slack * (torchs - true).norm() + torch.finfo(dtype).eps * 1e-2 * true.norm()


@pytest.mark.parametrize("name", NORMS)
def test_kept_for_the_backward_are_the_sum_and_the_statistics(name: str) -> None:
    given = Given(name, torch.bfloat16, EAGER)
    saved: Tensors = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        given.norm(given.x, given.branch)
    assert sum(tensor.numel() for tensor in saved) == 6 * 3 * (16 + len(NORMS[name].statistics))
