"""FP8 GEMMs of linear layers: formats, recipes of scales, and the products of quantised matrices."""
