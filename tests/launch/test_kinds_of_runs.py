"""Runs of other kinds than the sums of `test_loop.py`: agents, an environment of a package, a mixture in bfloat16."""

from pathlib import Path

import pytest
from families import save_family
from loop_agents import TEMPLATE
from loop_builders import loop_config, run_loop
from places import SUPPORT
from transformers import AutoTokenizer

from areal_lite.config.recipe import Config
from areal_lite.types import GIVEN

pytestmark = [pytest.mark.loop, pytest.mark.usefixtures("ray_cluster")]


def give_template(config: Config) -> None:
    """Give the model of a recipe a template of chats."""
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(config.model.path)


def test_an_agent_of_two_branches_trains(tmp_path: Path) -> None:
    """Over the public SDK. Engine and trainer agree on every way (I4), no token is over the bound (I1), and evaluation
    has rewards."""
    rollout = {"workflow": f"{SUPPORT / 'loop_agents.py'}:asks_twice", "max_new_tokens": 12, "turn_timeout_s": 50}
    run = {"steps": 3, "dir": str(tmp_path / "run"), "log_samples": 4}
    config = loop_config(tmp_path, run=run, rollout=rollout)
    give_template(config)
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


@pytest.mark.verifiers
def test_an_environment_of_the_package_verifiers_trains(tmp_path: Path) -> None:
    """Its rewards are those of the samples, its metrics and evaluation are there, and engine and trainer agree (I4)."""
    env = {"taskset": {"id": "remainders"}, "agent": {"runtime": {"type": "subprocess"}}}
    config = loop_config(
        tmp_path,
        run={"steps": 3, "dir": str(tmp_path / "run"), "log_samples": 4, "env": {"PYTHONPATH": str(SUPPORT)}},
        data={"source": "verifiers", "path": None, "eval_path": None,
              "arguments": {"env": env, "train_size": 16, "eval_size": 4}},
        rollout={"workflow": "verifiers", "workflow_arguments": {"env": env}, "turn_timeout_s": 50},
    )  # fmt: skip
    give_template(config)
    summary, folder = run_loop(config)
    assert (summary["status"], summary["ledger"]["trained"]) == ("done", 3 * 4)
    assert all(row["parity_max_abs_logprob_diff"] < 1e-4 for row in folder.read("metrics.jsonl"))
    assert all(0 <= value < 2 for value in summary["eval"].values())
    samples = [sample for group in folder.read("samples.jsonl") for sample in group["samples"]]
    assert all([m["role"] for m in sample["messages"]] == ["assistant", "user", "assistant"] for sample in samples)


def test_a_mixture_in_bfloat16_whose_routers_choose_for_themselves_passes(tmp_path: Path) -> None:
    """Sharp weights, so that another expert is another answer. Seen failing with a limit of 1 nat for the maximum."""
    save_family("Qwen3-MoE", str(tmp_path / "model"))
    sections = {"model": {"compute_dtype": "bfloat16"}, "trainer": {"lr": 1e-5}}
    summary, folder = run_loop(loop_config(tmp_path, run={"steps": 3, "dir": str(tmp_path / "run")}, **sections))
    assert summary["status"] == "done"
    assert [row["parity_mean_abs_logprob_diff"] > 0 for row in folder.read("metrics.jsonl")] == [True] * 3
