"""Compute the largest error that rounding can explain.

In float64 the bound is a constant. In a narrower dtype, rounding is measured. One process runs in that dtype (the reference), and
again in the next wider dtype from the same rounded weights. A tensor's relative error between these runs is called e.

A layout adds the same numbers in another order, so its rounding error is another random draw of the same size. Tensor parallelism
also rounds the partial sums from t ranks, and each addition of them. Let the partial sums have equal sizes and independent errors.
Rounding one partial sum adds e^2 / t to the variance, and rounding all t adds e^2. The addition that gives a sum of k partial sums
adds e^2 k / t. All these additions together add about e^2 t / 2. Hence

    variance of (layout - reference) <= e^2 (1 + t / 2) + e^2          bound = DRAWS e sqrt(2 + t / 2)

where the last e^2 is the reference's own error, and DRAWS is 3 standard deviations. A small tensor may have a small error by luck.
So e is raised to at least the root mean square of e over all tensors of the same kind in the step. A moment averages the p-th power
of gradients, so its relative error may be p times the gradients' error. So a moment's e is at least p times the gradients' e in
each step so far.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

from triaxis.engine.config.schema.extension_parts import NOT_MOMENTS
from triaxis.engine.config.values.optimizer_kinds import MOMENTS
from triaxis.launch.verify.verdict.deviation import Deviation
from triaxis.launch.verify.verdict.evidence import Evidence, relative, relative_errors
from triaxis.launch.verify.verdict.records import TensorKind

TOLERANCES = {"float64": 1e-9, "fp32": 1e-3}
"""Constant bounds: in float64, and in fp32 for a comparison with an oracle, which rounds in its own way."""

DRAWS = 3.0
"""The bound in standard deviations: a tensor has many rounding errors, so their norm seldom exceeds 3."""


def noise_factor(tp: int) -> float:
    """Return the largest allowed error, as a multiple of the measured rounding."""
    return DRAWS * math.sqrt(2 + tp / 2)


class Bounds:
    """Largest relative errors that rounding explains, for tensors, outputs, losses and gradient norms.

    Args:
        evidence: the layout's evidence; its `noise`, the measured rounding, is used if present.
        tolerance: constant bound if there is no `noise`; unused otherwise.
    """

    def __init__(self, evidence: Evidence, tolerance: float | None) -> None:
        assert evidence.noise is not None or tolerance is not None, "without a measured noise, a tolerance is needed"
        self._evidence, self._tolerance = evidence, tolerance
        # The reference's rerun in a wider dtype, as if it were a layout's only rank.
        self._noise = replace(evidence, ranks=() if evidence.noise is None else (evidence.noise,))
        self._factor = noise_factor(evidence.sizes.tp)

    def tensors(self, step: int, kind: TensorKind) -> Mapping[str, float]:
        """Return bounds on tensors' relative errors, by tensor name, for one step and kind."""
        if self._evidence.noise is None:
            return self._constant(self._evidence.tensors.get((step, kind), {}))
        rounding = self._rounding(step, kind)
        if kind not in NOT_MOMENTS:
            # A moment in an extension's rule counts as a mean of gradients.
            power = MOMENTS[kind].power if kind in MOMENTS else 1
            for at in range(step + 1):
                gradients = self._rounding(at, "gradient")
                rounding = {name: max(e, power * gradients[name]) for name, e in rounding.items()}
        return {name: self._factor * e for name, e in rounding.items()}

    def sites(self) -> Mapping[str, float]:
        """Return bounds on the relative errors of first-forward outputs, by site, such as `layers.3.mlp`."""
        if self._evidence.noise is None:
            return self._constant(self._evidence.sites)
        return {name: self._factor * e for name, e in _at_least_the_mean(self._noise.sites).items()}

    def loss(self, step: int) -> float:
        """Return the bound on the relative error of a step's global-batch loss.

        A mean's error may be small by luck. So the bound covers the largest rounding among the losses up to this step, the first
        step's token losses, and this step's gradients.
        """
        if self._evidence.noise is None:
            return self._only()
        scalars = [self._scalar(at, "loss") for at in range(step + 1)]
        tokens = relative_errors(self._noise.sites).get("token_losses", 0.0)
        return self._factor * max(*scalars, tokens, self._all_gradients(step))

    def grad_norm(self, step: int) -> float:
        """Return the bound on the relative error of a step's gradient norm.

        It covers the gradients' rounding, since two runs' gradients g and g' have | |g| - |g'| | <= |g - g'|.
        """
        if self._evidence.noise is None:
            return self._only()
        return self._factor * max(self._scalar(step, "grad_norm"), self._all_gradients(step))

    def _only(self) -> float:
        assert self._tolerance is not None
        return self._tolerance

    def _constant(self, names: Mapping[str, object]) -> dict[str, float]:
        return dict.fromkeys(names, self._only())

    def _rounding(self, step: int, kind: TensorKind) -> dict[str, float]:
        return _at_least_the_mean(self._noise.tensors.get((step, kind), {}))

    def _scalar(self, step: int, field: str) -> float:
        wanted, got = (getattr(steps[step], field) for steps in (self._evidence.reference, self._noise.ranks[0].steps))
        return relative(abs(got - wanted), abs(wanted))

    def _all_gradients(self, step: int) -> float:
        gradients = self._noise.tensors[step, "gradient"].values()
        error_square = sum(one.error_square for one in gradients)
        return relative(math.sqrt(error_square), math.sqrt(sum(one.wanted_square for one in gradients)))


def _at_least_the_mean(noise: Mapping[str, Deviation]) -> dict[str, float]:
    """Compute tensors' relative errors, each raised to at least the root mean square of all."""
    errors = relative_errors(noise)
    mean = math.sqrt(sum(error**2 for error in errors.values()) / max(1, len(errors)))
    return {name: max(error, mean) for name, error in errors.items()}
