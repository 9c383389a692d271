"""Verifiers that ship. Each is found by its name in the entry-point group `areal_lite.verifiers` (pyproject.toml)."""
