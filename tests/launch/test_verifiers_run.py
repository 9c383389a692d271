"""A run whose prompts and samples come from an environment of the package verifiers."""

from pathlib import Path

import pytest
from loop_agents import TEMPLATE
from loop_builders import loop_config, run_loop
from places import SUPPORT
from transformers import AutoTokenizer

pytestmark = [pytest.mark.loop, pytest.mark.verifiers, pytest.mark.usefixtures("ray_cluster")]


def test_an_environment_trains(tmp_path: Path) -> None:
    """Its rewards are those of the samples, its metrics and evaluation are there, and engine and trainer agree (I4)."""
    env = {"taskset": {"id": "remainders"}, "agent": {"runtime": {"type": "subprocess"}}}
    config = loop_config(
        tmp_path,
        run={"steps": 3, "dir": str(tmp_path / "run"), "log_samples": 4, "env": {"PYTHONPATH": str(SUPPORT)}},
        data={"source": "verifiers", "path": None, "eval_path": None,
              "arguments": {"env": env, "train_size": 16, "eval_size": 4}},
        rollout={"workflow": "verifiers", "workflow_arguments": {"env": env}, "turn_timeout_s": 50},
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(config.model.path)
    summary, folder = run_loop(config)
    assert (summary["status"], summary["ledger"]["trained"]) == ("done", 3 * 4)
    assert all(row["parity_max_abs_logprob_diff"] < 1e-4 for row in folder.read("metrics.jsonl"))
    assert all(0 <= value < 2 for value in summary["eval"].values())
    samples = [sample for group in folder.read("samples.jsonl") for sample in group["samples"]]
    assert all([m["role"] for m in sample["messages"]] == ["assistant", "user", "assistant"] for sample in samples)
