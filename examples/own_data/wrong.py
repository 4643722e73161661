"""The corpus of numpy, other on every rank."""

import os

import numpy as np
from numpy.typing import NDArray
from own_data import Memmap

from triaxis import Extension


class WrongMemmap(Memmap):
    """Turns the tokens of a document by the number of the rank."""

    def __getitem__(self, number: int) -> NDArray[np.uint16]:
        """Return the ids of a document, from another one on each rank."""
        return np.roll(super().__getitem__(number), int(os.environ.get("RANK", "0")))


extension = Extension(corpora={"memmap": WrongMemmap})
