"""FP8 GEMMs for linear layers, with formats, scaling recipes and products."""
