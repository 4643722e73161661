"""What a step costs the host, in ours and in other training programs, on one card or on the stub of `tests/cuda_stub`."""
