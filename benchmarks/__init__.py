"""Benchmarks of jrope: each `bench_*` module answers one question; see README.md."""
