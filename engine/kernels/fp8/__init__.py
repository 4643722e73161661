"""FP8 GEMMs for linear layers: formats, scaling recipes and products."""
