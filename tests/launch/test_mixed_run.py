"""The shipped recipe with three kinds of tasks, for real: sums, a reasoning-gym family and a game of several turns."""

from pathlib import Path
from typing import Any

import pytest
from loop_builders import run_loop

from areal_lite.config.recipe import load_config
from areal_lite.types import GIVEN

SMALL = [
    "run.steps=20", "run.eval_every=10", "queue.groups_per_step=6", "queue.samples_per_group=4", "rollout.slots=24",
    "model.warm_start.steps=60", "model.warm_start.batch_size=16", "model.warm_start.num_layers=2",
    "data.mix.sums.eval_size=8", "data.mix.gym.eval_size=8", "data.mix.game.eval_size=8", "weights.parity_every=5",
    "verifier.timeout_s=30",
]  # fmt: skip
SOURCES = {"sums", "gym", "game"}
VERIFIERS = {"last_number", "reasoning_gym", "guess_number"}


@pytest.mark.loop
@pytest.mark.gym
def test_a_mixed_run_trains_and_tells_its_sources_apart(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty steps; every source is trained on and judged by its own verifier; parity holds over several turns.

    Seen failing with the column `verifier` of the sources passed over, and with an environment's tokens in the loss
    mask (the parity of behaviour and trainer at age 0 breaks: nobody sampled them).
    """
    monkeypatch.chdir(tmp_path)  # the warm start is cached below the working folder
    summary, folder = run_loop(load_config("mixed_cpu", [*SMALL, f"run.dir={tmp_path / 'run'}"]))
    metrics, samples = folder.read("metrics.jsonl"), folder.read("samples.jsonl")
    assert (summary["status"], summary["steps"]) == ("done", 20)
    assert {source for row in metrics for source in row["reward_by_source"]} == SOURCES
    assert set(metrics[-1]["verifiers"]) == VERIFIERS
    assert all(figures["calls"] > 0 and not figures["failures"] for figures in metrics[-1]["verifiers"].values())
    assert set(summary["eval_by_source"]["20"]) == SOURCES
    assert summary["age_max_trained"] <= 2
    assert summary["parity_max_abs_logprob_diff"] < 1e-4
    assert max(row["behav_prox_max_abs_diff_age0"] for row in metrics) < 1e-3
    for row in metrics:  # one mean over all is the mean of the sources, weighted by their samples
        means = row["reward_by_source"].values()
        assert min(means) - 1e-6 <= row["reward_mean"] <= max(means) + 1e-6
    _check_samples(samples)


def _check_samples(samples: list[dict[str, Any]]) -> None:
    """A game has turns and tokens that the environment wrote; nothing else has."""
    found = [(entry["group"].partition("/")[0], sample) for entry in samples for sample in entry["samples"]]
    assert {source for source, _ in found} == SOURCES
    for source, sample in found:
        given = [version for version, _, _ in sample["spans"] if version == GIVEN]
        replies = [message for message in sample.get("messages", []) if message["role"] == "environment"]
        assert len(given) == len(replies)
        assert source == "game" or not replies
    assert any(version == GIVEN for _, sample in found for version, _, _ in sample["spans"])
