"""FP8 GEMMs of linear layers: formats, scaling recipes, and the products of quantised matrices."""
