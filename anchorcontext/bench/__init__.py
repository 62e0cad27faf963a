"""Benchmarks: each against named baselines in the same run, each writes its own page section."""
