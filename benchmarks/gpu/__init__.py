"""The parts of `python -m benchmarks.gpu_round`, one module each."""
