"""What a step costs the host, in ours and in other training programs, on the stub of `tests/cuda_stub`."""
