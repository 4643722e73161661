"""The rules of what happens to activations: recomputed or offloaded, and which of them (no torch here).

See `engine/config/rules.py` for what a rule is.
"""

from collections.abc import Iterator

from engine.config.problems import Problem, Rule, Subject
from engine.config.schema import Config


def recompute_fits_chunk(subject: Subject) -> Iterator[Problem]:
    recompute = subject.config.recompute
    if recompute.granularity != "full":
        if recompute.method != "uniform" or recompute.num_layers != 1:
            yield Problem(
                "recompute.granularity",
                recompute.granularity,
                "method and num_layers belong to granularity = full: here they would have no effect",
                {"recompute.granularity": ["full"]},
                "Or leave them out.",
            )
        return
    per_chunk = _layers_of_the_largest_chunk(subject.config)
    if recompute.num_layers > per_chunk:
        yield Problem(
            "recompute.num_layers",
            recompute.num_layers,
            f"must be at most {per_chunk}, the layers of the largest model chunk: there are no more to recompute",
            {"recompute.num_layers": [per_chunk]},
        )


def _layers_of_the_largest_chunk(config: Config) -> int:
    parallel = config.parallel
    return max(parallel.layers_per_stage or [-(-config.model.num_layers // (parallel.pp * parallel.vpp))])


def recompute_has_its_fields(subject: Subject) -> Iterator[Problem]:
    """`modules` and `memory_gb` stand where they do something."""
    recompute = subject.config.recompute
    is_for_layers = recompute.granularity == "selective" or (
        recompute.granularity == "full" and recompute.method == "block"
    )
    if recompute.modules is not None and not is_for_layers:
        yield Problem(
            "recompute.modules",
            recompute.modules,
            f"belongs to granularity = selective (or full with method = block, for the other layers), not to "
            f"{recompute.granularity}: it would have no effect",
            {"recompute.modules": [None], "recompute.granularity": ["selective"]},
        )
    elif recompute.modules is not None and len(recompute.modules) != len(recompute.parts):
        yield Problem(
            "recompute.modules",
            recompute.modules,
            "must name each module once: it is recomputed or not",
            {"recompute.modules": [sorted(recompute.parts)]},
        )
    elif recompute.modules is not None and not recompute.modules and recompute.granularity == "selective":
        yield Problem(
            "recompute.modules",
            [],
            "must name a module with granularity = selective: nothing would be recomputed",
            {"recompute.modules": [["attention"], ["norm", "activation"]]},
            "Or set recompute.granularity=none and leave them out.",
        )
    needs = recompute.granularity == "auto"
    decides = needs or (recompute.gathered_inputs == "auto" and subject.config.parallel.cuts_sequence)
    if (recompute.memory_gb is None and needs) or (recompute.memory_gb is not None and not decides):
        yield Problem(
            "recompute.memory_gb",
            recompute.memory_gb,
            "must be given with granularity = auto: nobody would know how much has to fit"
            if needs
            else f"is what granularity = auto (and gathered_inputs = auto, where the sequence is cut) has to fit into: with "
            f"{recompute.granularity} it would have no effect",
            {"recompute.granularity": ["none"] if needs else ["auto"], "recompute.memory_gb": [] if needs else [None]},
            "Set recompute.memory_gb to what a device holds, less some GB for operators and communication."
            if needs
            else "",
        )


def recomputed_parts_exist(subject: Subject) -> Iterator[Problem]:
    config = subject.config
    model, parallel, parts = config.model, config.parallel, config.recompute.parts
    others = [name for name in config.recompute.modules or [] if name != "rope"]
    without_rope = {"recompute.modules": [others]} if others else {"recompute.granularity": ["none"]}
    if "rope" in parts and model.position != "rope" and not model.qk_norm:
        yield Problem(
            "recompute.modules",
            config.recompute.modules,
            f"has rope, but with model.position = {model.position} and without qk_norm queries and keys are used as they are "
            "projected: there is nothing to recompute",
            without_rope,
        )
    elif "rope" in parts and config.kernels.attention == "explicit" and "attention" not in parts:
        yield Problem(
            "recompute.modules",
            config.recompute.modules,
            "has rope, but kernels.attention = explicit keeps copies of queries and keys: recomputing what they were copied from "
            "would save nothing",
            {"kernels.attention": ["sdpa"], "recompute.modules": [[*(config.recompute.modules or []), "attention"]]},
        )
    if "norm" in parts and config.recompute.gathered_inputs == "keep" and parallel.cuts_sequence:
        without_norm = [name for name in config.recompute.modules or [] if name != "norm"]
        yield Problem(
            "recompute.modules",
            config.recompute.modules,
            "has norm, but with gathered_inputs = keep nobody keeps what the norms return, only what was gathered of it: "
            "recomputing them would save nothing",
            {"recompute.gathered_inputs": ["regather"]}
            | ({"recompute.modules": [without_norm]} if without_norm else {}),
        )
    if "mlp" in parts and parallel.cuts_sequence:
        yield Problem(
            "recompute.modules",
            config.recompute.modules,
            "has mlp, but with parallel.sequence_parallel its input is cut over the tp ranks: recomputing it would gather the "
            "sequence once more",
            {
                "recompute.modules": [
                    [name if name != "mlp" else "activation" for name in config.recompute.modules or []]
                ],
                "parallel.sequence_parallel": [False],
            },
        )


def offload_is_of_layers(subject: Subject) -> Iterator[Problem]:
    num_layers, per_chunk = subject.config.offload.num_layers, _layers_of_the_largest_chunk(subject.config)
    if num_layers > per_chunk:
        yield Problem(
            "offload.num_layers",
            num_layers,
            f"must be at most {per_chunk}, the layers of the largest model chunk: there are no more to offload",
            {"offload.num_layers": [per_chunk]},
        )


ACTIVATION_RULES: tuple[Rule, ...] = (
    recompute_fits_chunk,
    recompute_has_its_fields,
    recomputed_parts_exist,
    offload_is_of_layers,
)
