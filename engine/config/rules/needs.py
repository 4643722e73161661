"""What a field needs: the conditions without which a value has no effect, or is not allowed."""

from triaxis.engine.config.quantities.context_parallel import decides_what_is_gathered
from triaxis.engine.config.quantities.expert_rows import dispatch_of
from triaxis.engine.config.quantities.head_pieces import may_cut_head
from triaxis.engine.config.rules.rows import Need
from triaxis.engine.config.schema.fp8 import BLOCKS
from triaxis.engine.config.schema.training import DECAYS
from triaxis.engine.config.values.optimizer_kinds import OPTIMIZERS


def _of_optimizer(title: str, name: str) -> Need:
    """Return the rule about a field `name` that not every optimizer reads; `title` is that of one that reads it."""
    return Need(
        f"optimizer.{name}",
        is_met=lambda c: c.optimizer.name == "extension" or name in OPTIMIZERS[c.optimizer.name].fields,
        rule=f"is a field of {title}, and optimizer.name = {{c.optimizer.name}}: it would have no effect",
    )


NEEDS = (
    # The model.
    Need(
        "model.num_kv_heads",
        is_met=lambda c: c.model.mla is None,
        rule="has no meaning with model.mla: every query head has keys and values of its own, all made from one latent",
    ),
    Need(
        "model.head_dim",
        is_met=lambda c: c.model.mla is None,
        rule="has no meaning with model.mla: queries and keys have qk_nope_head_dim + qk_rope_head_dim elements, values v_head_dim",
    ),
    Need(
        "model.qk_norm",
        is_met=lambda c: c.model.mla is None,
        rule="does not go with model.mla: latent attention has a norm on each latent, and none on queries and keys",
    ),
    Need(
        "model.bias",
        values=("all", "qkv"),
        is_met=lambda c: c.model.mla is None,
        rule="does not go with model.mla: its projections, through the latents, have no biases",
        others={"model.bias": ["none"]},
    ),
    Need(
        "model.bias",
        values=("all",),
        is_met=lambda c: c.model.moe is None,
        rule="has biases in every linear layer, and experts have none: which layers are meant would be a guess",
        others={"model.bias": ["none", "qkv"]},
    ),
    Need(
        "model.rotary_share",
        is_met=lambda c: c.model.mla is None,
        rule="has no effect with model.mla: what rotates of a head is model.mla.qk_rope_head_dim",
    ),
    *(
        Need(
            f"model.{name}",
            is_met=lambda c: any(kind.rotary for kind in c.model.kinds),
            rule="has no effect with position = {c.model.position}: nothing rotates",
            others={"model.position": ["rope"]},
        )
        for name in ("rope_scaling", "rotary_share")
    ),
    Need(
        "model.layers",
        values=([],),
        is_met=lambda c: False,
        rule="must name a kind: the kinds of layers would be unknown",
    ),
    Need(
        "model.position",
        values=("learned",),
        is_met=lambda c: c.model.mtp is None,
        rule="does not go with model.mtp: the embedding of a token ahead would need a row of the table, which is on the first "
        "stage",
    ),
    Need(
        "kernels.attention",
        values=("flex",),
        is_met=lambda c: c.kernels.elementwise != "eager" and not c.runtime.deterministic,
        rule="is compiled with the elementwise functions, which this run leaves as they are: it would hold all scores in memory",
        others={"kernels.attention": ["blocks"]},
    ),
    Need(
        "model.attention_dropout",
        is_met=lambda c: c.kernels.attention == "explicit",
        rule="needs kernels.attention = explicit: the fused kernel draws masks of its own, which depend on the layout and cannot "
        "be replayed",
        others={"kernels.attention": ["explicit"]},
    ),
    Need(
        "model.moe.group_score",
        values=("top2",),
        is_met=lambda c: c.model.moe.groups == 1 or c.model.moe.experts_in_group != 1,
        rule="is the sum of a group's best two experts, and a group has one",
        others={"model.moe.group_score": ["max"]},
    ),
    Need(
        "model.moe.row_headroom",
        is_met=lambda c: dispatch_of(c) == "all_gather",
        rule="is the size of a buffer that only dispatch by all_gather has: it would have no effect",
        others={"kernels.dispatch": ["all_gather"]},
    ),
    *(
        Need(
            f"parallel.{name}",
            is_met=lambda c: c.model.moe is not None,
            rule="cuts experts over ranks, and the model has none: model.moe is not given",
        )
        for name in ("ep", "etp")
    ),
    *(
        Need(
            f"kernels.{name}",
            is_met=lambda c: c.model.moe is not None,
            rule="has no effect without experts: model.moe is not given",
        )
        for name in ("experts", "dispatch")
    ),
    *(
        Need(
            key,
            is_met=lambda c: c.model.own.loss is None,
            rule="is read by the engine's own loss, and model.extension gives another one: it would have no effect",
        )
        for key in ("model.z_loss", "recompute.head_tokens")
    ),
    Need(
        "recompute.head_tokens",
        is_met=may_cut_head,
        rule="computes the head's gradient in the forward, and parallel.zero = {c.parallel.zero} reduces a microbatch's gradients "
        "before the next one's: a schedule whose last stage makes another forward before a backward would mix them",
        others={"parallel.zero": [1], "schedule.name": ["1f1b"]},
    ),
    Need(
        "optimizer.lr_schedule",
        values=("extension",),
        is_met=lambda c: c.model.own.schedule is not None,
        rule="needs an Extension(schedule=..) in model.extension: there is none",
    ),
    Need(
        "optimizer.name",
        values=("extension",),
        is_met=lambda c: c.model.own.update is not None,
        rule="needs an Extension(update=..) in model.extension: there is none",
    ),
    # The data, the schedule and the run.
    Need(
        "data.train",
        values=([],),
        is_met=lambda c: c.data.synthetic,
        rule="must name a corpus: there is nothing to learn from",
        others={"data.train": [], "data.synthetic": [True]},
        advice="Set data.train=PREFIX to a corpus of `triaxis prepare`.",
    ),
    Need(
        "data.valid",
        values=([],),
        is_met=lambda c: False,
        rule="must name a corpus or be none: no sample to validate on",
    ),
    Need(
        "data.synthetic_document_length",
        is_met=lambda c: c.data.synthetic,
        rule="has no effect without data.synthetic: documents of a corpus have lengths of their own",
        others={"data.synthetic": [True]},
    ),
    Need(
        "schedule.name",
        is_met=lambda c: c.schedule.file is None,
        rule="must be auto beside schedule.file: of two schedules, which is meant would be a guess",
        others={"schedule.file": [None]},
    ),
    Need(
        "schedule.file",
        is_met=lambda c: not c.schedule.file.text.forward_only,
        rule="is a schedule of forwards only (forward_only=yes): no gradient would be computed",
    ),
    Need(
        "train.phase",
        is_met=lambda c: c.phases,
        rule="names a phase, and the run has none: it would have no effect",
    ),
    *(
        Need(
            f"train.{name}",
            is_met=lambda c: not c.phases,
            rule="the phases are given too, and the last one ends the run: one of both would be ignored",
        )
        for name in ("steps", "tokens")
    ),
    Need(
        "train.steps",
        is_met=lambda c: c.train.tokens is None or c.phases,
        rule="train.tokens = {c.train.tokens} is given too: both say how long the run is, and one would be ignored",
        others={"train.tokens": [None]},
    ),
    Need(
        "train.steps",
        values=(None,),
        is_met=lambda c: c.train.tokens is not None or c.phases,
        rule="train.steps or train.tokens must be given: the run would have no end, and the learning rate no schedule",
        others={"train.steps": []},
        advice="Set one of them.",
    ),
    Need(
        "checkpoint.interval",
        values=("never",),
        is_met=lambda c: len(c.phases) < 2,
        rule="saves nothing, and a run of several phases is saved at the edge of each: the next one begins from there",
        others={"checkpoint.interval": [None, 1000]},
    ),
    Need(
        "checkpoint.load_what",
        is_met=lambda c: c.checkpoint.load is not None,
        rule="says what to take from checkpoint.load, which is null: the run would start from random weights",
        advice="Or give checkpoint.load=PATH.",
    ),
    Need(
        "checkpoint.keep_every",
        is_met=lambda c: c.checkpoint.every is not None,
        rule="must be a multiple of checkpoint.interval = {c.checkpoint.interval}: other steps are never saved, so none of them "
        "would be kept",
    ),
    Need(
        "resilience.on_nonfinite",
        values=("rollback",),
        is_met=lambda c: c.checkpoint.every is not None,
        rule="goes back to a checkpoint, but checkpoint.interval = {c.checkpoint.interval} saves none on the way: the first bad "
        "step would end the run",
        others={"resilience.on_nonfinite": ["stop", "skip"], "checkpoint.interval": [100]},
    ),
    Need(
        "resilience.skip_window",
        is_met=lambda c: c.resilience.skip_above_deviations is not None,
        rule="is the number of updates that skip_above_deviations looks back on, and that is null: it would have no effect",
        others={"resilience.skip_above_deviations": [6.0]},
    ),
    Need(
        "runtime.collectives",
        values=("nccl",),
        is_met=lambda c: c.runtime.device != "cpu",
        rule="moves tensors of GPUs only, but runtime.device = cpu: the first call would fail on every rank",
        others={"runtime.collectives": ["auto", "gloo"], "runtime.device": ["auto", "cuda"]},
    ),
    # The learning rate.
    Need(
        "optimizer.warmup_tokens",
        is_met=lambda c: c.optimizer.warmup_steps == 0,
        rule="warmup_steps = {c.optimizer.warmup_steps} is given too: both say how long the warm-up is, and one would be ignored",
        others={"optimizer.warmup_steps": [0]},
    ),
    Need(
        "optimizer.decay_steps",
        is_met=lambda c: c.optimizer.lr_schedule in (*DECAYS, "extension"),
        rule="has no effect with lr_schedule = {c.optimizer.lr_schedule}, which does not decay from the warm-up on",
        others={"optimizer.lr_schedule": DECAYS},
    ),
    Need(
        "optimizer.min_lr",
        is_met=lambda c: c.optimizer.lr_schedule in (*DECAYS, "extension") or c.optimizer.cooldown_tokens is not None,
        rule="has no effect with lr_schedule = {c.optimizer.lr_schedule} without a cooldown: the learning rate does not fall to it",
        others={"optimizer.lr_schedule": DECAYS},
    ),
    Need(
        "optimizer.cooldown_tokens",
        is_met=lambda c: c.optimizer.lr_schedule not in (*DECAYS, "constant"),
        rule="is the fall at the end of wsd or inverse_sqrt, and lr_schedule = {c.optimizer.lr_schedule}: it would have no effect",
        others={"optimizer.lr_schedule": ["wsd", "inverse_sqrt"]},
    ),
    Need(
        "optimizer.cooldown_tokens",
        values=(None,),
        is_met=lambda c: c.optimizer.lr_schedule != "wsd",
        rule="must be given with lr_schedule = wsd: the length of the last fall would be a guess",
        others={"optimizer.cooldown_tokens": [], "optimizer.lr_schedule": ["constant"]},
        advice="A tenth to a fifth of the run is usual.",
    ),
    Need(
        "optimizer.cooldown_shape",
        is_met=lambda c: c.optimizer.cooldown_tokens is not None or c.optimizer.lr_schedule == "extension",
        rule="is the shape of a fall of cooldown_tokens, which is not given: it would have no effect",
    ),
    # The optimizer and the precision.
    *(_of_optimizer(kind.title, name) for kind in OPTIMIZERS.values() for name in kind.fields),
    *(
        Need(
            f"precision.{name}",
            is_met=lambda c: c.precision.dtype == "bf16",
            rule="is for weights in bf16, but precision.dtype = {c.precision.dtype}: there gradients and optimizer state are as "
            "exact as the weights",
            others={"precision.dtype": ["bf16"]},
        )
        for name in ("masters", "moments", "gradients")
    ),
    Need(
        "precision.loss_scale",
        is_met=lambda c: c.precision.dtype == "fp16",
        rule="is for fp16, and precision.dtype = {c.precision.dtype}, whose gradients fit without one: it would have no effect",
        others={"precision.dtype": ["fp16"]},
    ),
    *(
        Need(
            f"precision.loss_scale.{name}",
            is_met=lambda c: c.precision.loss_scale.static is None,
            rule="is of a scale that changes, and precision.loss_scale.static = {c.precision.loss_scale.static}: it would have "
            "no effect",
            others={"precision.loss_scale.static": [None]},
        )
        for name in ("initial", "window", "hysteresis", "minimum")
    ),
    Need(
        "precision.dtype",
        values=("fp16",),
        is_met=lambda c: c.precision.fp8 is None,
        rule="is not combined with precision.fp8: gradients of fp16 overflow before they are scaled for FP8",
    ),
    Need(
        "precision.fp8.bf16_layers",
        is_met=lambda c: sum(c.precision.fp8.bf16_layers) < c.model.num_layers,
        rule="must leave one of the {c.model.num_layers} layers: none would have FP8 operands, and precision.fp8 no effect",
    ),
    Need(
        "precision.fp8.format",
        values=("hybrid",),
        is_met=lambda c: c.precision.fp8.recipe not in BLOCKS,
        rule="is not combined with precision.fp8.recipe = {c.precision.fp8.recipe}: its GEMMs take e4m3 alone",
        others={"precision.fp8.recipe": ["tensorwise"]},
    ),
    Need(
        "precision.fp8.backend",
        values=("te", "torch"),
        is_met=lambda c: c.precision.dtype != "float64",
        rule="sums in fp32, and precision.dtype = float64 is for exact comparisons: they would not be exact",
        others={"precision.fp8.backend": ["emulated"]},
    ),
    Need(
        "precision.fp8.backend",
        values=("torch",),
        is_met=lambda c: c.precision.fp8.recipe not in BLOCKS or c.runtime.device != "cpu",
        rule="has scales of blocks on GPUs alone, and runtime.device = {c.runtime.device}",
        others={"precision.fp8.backend": ["emulated"], "precision.fp8.recipe": ["tensorwise"]},
    ),
    Need(
        "precision.fp8.gather",
        is_met=lambda c: c.precision.fp8.recipe not in BLOCKS,
        rule="needs one scale for a tensor, and precision.fp8.recipe = {c.precision.fp8.recipe}: numbers that were rounded for "
        "the forward would be rounded once more, in other blocks, for the gradient of the weight",
        others={"precision.fp8.recipe": ["tensorwise"]},
    ),
    Need(
        "precision.fp8.gather",
        is_met=lambda c: c.parallel.sequence_parallel,
        rule="is about what sequence parallelism gathers, and parallel.sequence_parallel is off: it would have no effect",
        others={"parallel.sequence_parallel": [True]},
    ),
    Need(
        "kernels.optimizer",
        values=("apex",),
        is_met=lambda c: c.optimizer.name == "adamw",
        rule="has no kernel for optimizer.name = {c.optimizer.name}: FusedAdam is AdamW",
    ),
    Need(
        "kernels.optimizer",
        values=("apex",),
        is_met=lambda c: c.precision.dtype != "float64",
        rule="computes in fp32, and precision.dtype = float64 is for exact comparisons: they would not be exact",
    ),
    *(
        Need(
            "kernels.optimizer",
            values=("apex",),
            is_met=is_full,
            rule=f"reads no state of precision.{name} = {choice}: its masters and moments are in fp32",
            others={f"precision.{name}": ["full"]},
        )
        for name, choice, is_full in (
            ("masters", "split", lambda c: c.precision.masters == "full"),
            ("moments", "bf16", lambda c: c.precision.moments == "full"),
        )
    ),
    # What is kept for the backward.
    Need(
        "parallel.cp_method",
        values=("ulysses",),
        is_met=lambda c: c.model.mla is None or c.parallel.cp == 1,
        rule="trades tokens for heads of queries, keys and values, which have one size there; with model.mla keys and values are "
        "made from a latent, which is smaller than the heads that would travel",
        others={"parallel.cp_method": ["all_gather", "auto"]},
    ),
    Need(
        "recompute.gathered_kv",
        values=("keep",),
        is_met=lambda c: c.model.mla is None or c.parallel.cp == 1,
        rule="has no effect with model.mla: gathered are latents, which are kept, and keys and values are made from them; "
        "recompute.modules=[attention] makes those again",
    ),
    *(
        Need(
            f"recompute.{name}",
            is_met=lambda c: c.recompute.granularity == "full",
            rule="belongs to granularity = full, and recompute.granularity = {c.recompute.granularity}: it would have no effect",
            others={"recompute.granularity": ["full"]},
        )
        for name in ("method", "num_layers")
    ),
    Need(
        "recompute.granularity",
        values=("full",),
        is_met=lambda c: not c.schedule.defers_weight_gradients,
        rule="recomputes whole layers, but with schedule.name = {c.schedule.name} and schedule.file = {c.schedule.file} the "
        "inputs of their GEMMs wait for the weight gradients: what is recomputed would be kept after all",
        others={"recompute.granularity": ["selective", "none"], "schedule.name": ["auto"], "schedule.file": [None]},
    ),
    Need(
        "recompute.modules",
        is_met=lambda c: c.recompute.takes_modules,
        rule="belongs to granularity = selective (or full with method = block, for the other layers), not to "
        "{c.recompute.granularity}: it would have no effect",
        others={"recompute.granularity": ["selective"]},
    ),
    Need(
        "recompute.memory_gb",
        is_met=lambda c: c.recompute.granularity == "auto" or decides_what_is_gathered(c),
        rule="is what granularity = auto (and gathered_inputs or gathered_kv = auto, where something is gathered) has to fit "
        "into: with {c.recompute.granularity} it would have no effect",
        others={"recompute.granularity": ["auto"]},
    ),
    Need(
        "recompute.memory_gb",
        values=(None,),
        is_met=lambda c: c.recompute.granularity != "auto",
        rule="must be given with granularity = auto: the memory to fit into would be unknown",
        others={"recompute.memory_gb": [], "recompute.granularity": ["none"]},
        advice="Set recompute.memory_gb to what a device holds, less some GB for operators and communication.",
    ),
    Need(
        "recompute.modules",
        values=([],),
        is_met=lambda c: c.recompute.granularity != "selective",
        rule="must name a module with granularity = selective: nothing would be recomputed",
        others={"recompute.modules": [["attention"], ["norm", "activation"]]},
        advice="Or set recompute.granularity=none and leave them out.",
    ),
)
"""What each field needs."""
