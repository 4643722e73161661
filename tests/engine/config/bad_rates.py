"""Learning rates that must be refused, in the form of `bad_configs.BAD`."""

from collections.abc import Sequence

BAD_RATES: dict[str, tuple[Sequence[str], dict[str, int], Sequence[str]]] = {
    "a warm-up twice": (
        ["optimizer.warmup_steps=2", "optimizer.warmup_tokens=1024"],
        {},
        ["warmup_tokens = 1024", "warmup_steps = 2 is given too", "warmup_tokens = null", "warmup_steps = 0"],
    ),
    "a warm-up beyond the run": (
        ["optimizer.warmup_tokens=1M"],
        {},
        ["warmup_tokens = 1000000", "at most the 5,120 tokens", "warmup_tokens = 5120"],
    ),
    "a fall of no length": (
        ["optimizer.lr_schedule=wsd"],
        {},
        ["cooldown_tokens = null", "must be given with lr_schedule = wsd", "lr_schedule = constant"],
    ),
    "a fall that a cosine has not": (
        ["optimizer.cooldown_tokens=512"],
        {},
        ["cooldown_tokens = 512", "no effect", "cooldown_tokens = null", "lr_schedule = wsd"],
    ),
    "a shape of no fall": (
        ["optimizer.cooldown_shape=sqrt"],
        {},
        ["cooldown_shape = sqrt", "no effect", "cooldown_shape = linear"],
    ),
    "a fall longer than what is left": (
        ["optimizer.lr_schedule=wsd", "optimizer.warmup_steps=5", "optimizer.cooldown_tokens=4096"],
        {},
        ["cooldown_tokens = 4096", "at most 2,560", "cooldown_tokens = 2560"],
    ),
    "a decay of an inverse root": (
        ["optimizer.lr_schedule=inverse_sqrt", "optimizer.decay_steps=5"],
        {},
        ["decay_steps = 5", "inverse_sqrt", "decay_steps = null"],
    ),
    "a group of nothing": (
        ['optimizer.groups=[{match: "embedding.*"}]'],
        {},
        ["optimizer.groups.0.match = embedding.*", "none of weight_decay, lr_factor and freeze", "leave it out"],
    ),
    "a group that freezes and updates": (
        ['optimizer.groups=[{match: "embedding.*", freeze: true, lr_factor: 0.5}]'],
        {},
        ["optimizer.groups.0.match = embedding.*", "lr_factor would have no effect", "Leave out freeze, or lr_factor"],
    ),
}
