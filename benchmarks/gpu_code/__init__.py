"""GPU code of the engine's fused functions, and the bytes of a step, on a machine without a GPU."""
