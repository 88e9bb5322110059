"""Parts of benchmarks.simulate: the real scheduler in virtual time, against services that are only costs."""
