"""Linear layers: their three products in each form, column- and row-parallel, and the vocab-parallel embedding."""
