"""The layout as plain data: which rank holds which layers, parameters and buffers."""
