"""Benchmarks: one file each, around one harness."""
