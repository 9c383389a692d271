"""A run whose samples come from an agent over the public OpenAI SDK."""

from pathlib import Path

import pytest
from loop_agents import TEMPLATE
from loop_builders import loop_config, run_loop
from places import SUPPORT
from transformers import AutoTokenizer

from areal_lite.types import GIVEN

pytestmark = [pytest.mark.loop, pytest.mark.usefixtures("ray_cluster")]


def test_an_agent_of_two_branches_trains(tmp_path: Path) -> None:
    """Engine and trainer agree on every way (I4), no token is over the bound (I1), and evaluation has rewards."""
    rollout = {"workflow": f"{SUPPORT / 'loop_agents.py'}:asks_twice", "max_new_tokens": 12, "turn_timeout_s": 50}
    config = loop_config(
        tmp_path, run={"steps": 3, "dir": str(tmp_path / "run"), "log_samples": 4}, rollout=rollout,
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(config.model.path)
    summary, folder = run_loop(config)
    metrics = folder.read("metrics.jsonl")
    assert (summary["status"], summary["ledger"]["trained"]) == ("done", 3 * 4)
    assert all(row["parity_max_abs_logprob_diff"] < 1e-4 for row in metrics)
    assert all(row["behav_prox_max_abs_diff_age0"] < 1e-4 for row in metrics)
    assert summary["age_max_trained"] <= 2
    assert all(0 < value < 1 for value in summary["eval"].values())
    samples = [sample for group in folder.read("samples.jsonl") for sample in group["samples"]]
    assert all(len(sample["messages"]) == 3 for sample in samples)
    assert any(version == GIVEN for sample in samples for version, _, _ in sample["spans"])
