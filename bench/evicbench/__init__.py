"""Benchmarks and demonstrations of sglang-evicpress: `bench/show.py` runs them, one room for each area."""
