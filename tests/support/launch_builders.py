"""Jobs for the tests of `areal-lite launch`, and recipes whose run dies once."""

import shutil
from pathlib import Path
from typing import Any

import yaml
from loop_builders import loop_config
from places import SUPPORT

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
_CRASH_ONCE = '''
"""An advantage function whose process dies once, in the third step."""
import os
from pathlib import Path

calls = 0


def advantages(returns_NG, **_):
    global calls
    calls += 1
    marker = Path(__file__).with_name("crashed")
    if calls == 3 and not marker.exists():
        marker.touch()
        os._exit(9)
    return (returns_NG - returns_NG.mean(dim=1, keepdim=True)).nan_to_num(0.0).float()
'''


def make_profile(**changed: Any) -> Profile:
    return parse_section({**CLUSTER, **changed}, Profile)


def make_job(kind: str = "ssh", words: str = "train gsm8k_1node", *, folder: str = "/shared/me", **changed: Any) -> Job:
    profile = changed.pop("profile", None) or make_profile()
    return Job(
        **{"name": "run-1", "kind": kind, "folder": folder, "words": words.split(), "profile": profile, **changed}
    )


def crashing_recipe(folder: Path, **run: Any) -> Path:
    """Write a recipe of four steps, a checkpoint each, whose trainer dies once in the third; returns its path."""
    config = loop_config(folder, run={"steps": 4, "checkpoint_every": 1, "max_restarts": 0, **run})
    (folder / "crash_once.py").write_text(_CRASH_ONCE)
    shutil.copy(SUPPORT / "loop_verifiers.py", folder)
    raw = config.model_dump(exclude_unset=True)
    raw["verifier"] = {"function": f"{folder}/loop_verifiers.py:digit_share"}
    raw |= {"objective": {"advantage_function": f"{folder}/crash_once.py:advantages"}}
    raw |= {"launch": {"max_attempts": 2, "pause_s": 0.5}}
    path = folder / "crashing.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path
