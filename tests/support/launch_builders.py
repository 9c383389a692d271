"""Jobs for the tests of `areal-lite launch`."""

from typing import Any

from areal_lite.config.reading import parse_section
from areal_lite.launch.clusters.job import Job
from areal_lite.launch.clusters.profile import Profile

CLUSTER: dict[str, Any] = {
    "nodes": 4,
    "gpus_per_node": 8,
    "shared": "/shared",
    "network": "10.1.0.0/16",
    "env": {"HF_HUB_OFFLINE": "1"},
    "enter": "source /shared/venv/bin/activate",
    "ssh": {"hosts": ["a", "b", "c", "d"]},
    "ray": {"jobs": "http://head:8265"},
    "kubernetes": {
        "image": "registry.example/areal-lite:gpu",
        "claim": "home",
        "patch": {
            "spec": {"rayClusterSpec": {"headGroupSpec": {"template": {"spec": {"nodeSelector": {"pool": "rl"}}}}}}
        },
    },
}
"""A profile that every kind can use."""


def make_profile(**changed: Any) -> Profile:
    return parse_section({**CLUSTER, **changed}, Profile)


def make_job(kind: str = "ssh", words: str = "train gsm8k_1node", *, folder: str = "/shared/me", **changed: Any) -> Job:
    profile = changed.pop("profile", None) or make_profile()
    return Job(
        **{"name": "run-1", "kind": kind, "folder": folder, "words": words.split(), "profile": profile, **changed}
    )
