"""Column- and row-parallel linear layers, and the vocab-parallel embedding; their products by torch, in FP8, or by TE."""
