"""An extension with an update rule: AdamW once more, its moments under names of their own."""

from triaxis import Extension
from triaxis.engine.optimizer.updates import AdamW


class Mine(AdamW):
    moments = ("mean", "square")


extension = Extension(update=Mine)
