"""Whole runs over the NCCL transport, with a stand-in for the communicator: vLLM's engines, FSDP2 ranks, Ray.

Everything but NCCL is real; what happens on GPUs is shown by tests with the marker `gpu` alone.
"""

import functools
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nccl_stand_in
import pytest
from loop_builders import PARITY, loop_config, run_loop
from nccl_stand_in import StandInRolloutActor, StandInTrainerActor, ask_for
from ray import cloudpickle
from train_builders import save_tiny_model

from areal_lite.config.recipe import Config
from areal_lite.launch.run import cluster, online

pytestmark = [pytest.mark.loop, pytest.mark.usefixtures("ray_cluster")]

STEPS = 8


for module in (nccl_stand_in, sys.modules[__name__]):  # Ray's processes cannot import what stands beside the tests
    cloudpickle.register_pickle_by_value(module)


def over_nccl(config: Config) -> Config:
    """Choose what a recipe may not choose on a CPU."""
    return config.model_copy(update={"weights": config.weights.model_copy(update={"transport": "nccl"})})


def test_a_run_over_nccl_loses_engines_in_transfers_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three engines one dies in the middle of a transfer, later another hangs; both ranks and the third finish.

    None comes back: which one is rank 2 of the group, and breaks, must not depend on how long a start takes.
    """
    save_tiny_model(tmp_path / "model", tie_embeddings=False, max_context=128, num_key_value_heads=2)
    monkeypatch.setattr(cluster, "OnlineTrainerActor", StandInTrainerActor)
    monkeypatch.setattr(online, "Cluster", functools.partial(cluster.Cluster, rollout_actor=StandInRolloutActor))
    run: dict[str, Any] = {
        "steps": STEPS,
        "dir": str(tmp_path / "run"),
        "checkpoint_every": 0,
        "max_worker_restarts": 0,
    }
    trainer = {"ranks": 2, "mesh": {"context": 2}}
    rollout = {"workers": 3, "slots": 16, "max_new_tokens": 16, "kv_cache_mb": 64}
    config = loop_config(tmp_path, run=run, trainer=trainer, rollout=rollout, weights={"timeout_s": 15})

    def on_step(row: Mapping[str, Any]) -> None:
        if fault := {2: "die", 4: "hang"}.get(row["step"]):
            ask_for(fault, rank=2, folder=tmp_path / "run" / "logs")

    _, folder = run_loop(over_nccl(config), on_step)
    rows = folder.read("metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert max(row["parity_max_abs_logprob_diff"] for row in rows) < PARITY
    lost = {event["worker"]: event["reason"] for event in folder.read("events.jsonl") if event["kind"] == "lost"}
    assert lost.keys() == {"rollout/1", "rollout/2"}
    assert lost["rollout/1"].startswith("update_weights: EngineError: the engine-core process died")
    assert lost["rollout/2"].startswith("it must finish update_weights within weights.timeout_s=15 s")
