"""A corpus in a file of numpy: token ids in one row, a document after every end-of-document token."""

import numpy as np
from numpy.typing import NDArray

from triaxis import Extension

END = 256


class Memmap:
    """The documents of a .npy file, which no rank reads whole: numpy maps it, and an item is a slice."""

    def __init__(self, path: str) -> None:
        self.tokens = np.load(path, mmap_mode="r")
        self.bounds = np.concatenate([[0], np.flatnonzero(self.tokens == END) + 1])

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def lengths(self) -> NDArray[np.int64]:
        """Count the tokens of each document, its end included."""
        return np.diff(self.bounds)

    def __getitem__(self, number: int) -> NDArray[np.uint16]:
        """Return the ids of a document."""
        return self.tokens[self.bounds[number] : self.bounds[number + 1]]


extension = Extension(corpora={"memmap": Memmap})
