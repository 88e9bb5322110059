"""The parts of `python -m benchmarks.tp_run`, one module each."""
