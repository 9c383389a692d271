"""Benchmarks: plans of many runs, and what they show. Runs themselves are `areal_lite.launch`'s business."""
