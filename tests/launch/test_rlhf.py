"""The RLHF chain for real, small: SFT, reward model, PPO on it, DPO on the same pairs; each from the one before.

The shipped recipes themselves, `rlhf_*`, with fewer steps and a smaller model. Whether accuracy rises takes minutes and
is shown by their own runs (docs/rlhf.md); here are the joints: files, figures, Ctrl-C, resume, who reads whose model.
"""

import shlex
from pathlib import Path
from typing import Any

import pytest
from loop_builders import run_loop
from user_run import UserRun

from areal_lite.config.offline import load_any_config
from areal_lite.config.recipe import load_config
from areal_lite.launch.commands.main import main
from areal_lite.record.run_folder import RunFolder

pytestmark = [pytest.mark.loop, pytest.mark.usefixtures("ray_cluster")]

TASK = [f"data.arith.{word}" for word in ("min_terms=2", "max_terms=2", "train_size=600", "eval_size=40")]
SFT = [
    *TASK, "run.steps=60", "run.eval_every=30", "run.checkpoint_every=20", "run.checkpoint_beside=true",
    "trainer.batch_size=32", "model.warm_start.hidden_size=32", "model.warm_start.num_layers=1",
]  # fmt: skip


def run_offline(recipe: str, command: str, *words: str) -> tuple[dict[str, Any], RunFolder]:
    return run_loop(load_any_config(recipe, words, command=command))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rlhf")


@pytest.fixture(scope="module")
def sft(ray_cluster: None, folder: Path) -> tuple[dict[str, Any], RunFolder]:
    return run_offline("rlhf_sft", "sft", *SFT, f"run.dir={folder / 'sft'}")


@pytest.fixture(scope="module")
def reward_model(sft: object, folder: Path) -> tuple[dict[str, Any], RunFolder]:
    words = [*TASK, "run.steps=40", f"model.path={folder / 'sft'}", f"run.dir={folder / 'rm'}"]
    return run_offline("rlhf_reward_model", "reward_model", *words)


def test_sft_leaves_a_whole_run_folder(sft: tuple[dict[str, Any], RunFolder]) -> None:
    summary, folder = sft
    assert summary["status"] == "done"
    assert list(summary["eval"]) == ["0", "30", "60"]
    assert summary["eval"]["60"]["loss"] < 0.7 * summary["eval"]["0"]["loss"]
    rows = folder.read("metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 61))
    assert rows[29]["eval_loss"] == summary["eval"]["30"]["loss"]
    measured = [event for event in folder.read("events.jsonl") if event["kind"] == "eval"]
    assert [set(event["standard_errors"]) for event in measured] == [{"loss", "accuracy"}] * 3
    texts = {"config.json", "metrics.jsonl", "events.jsonl", "trace.json.gz", "summary.json", "report.html"}
    assert {path.name for path in folder.path.iterdir()} == texts | {"logs", "tensorboard", "checkpoints"}
    assert [path.name for path in folder.logs.iterdir()] == ["trainer-0.log"]
    with_model = [path.parent.name for path in folder.checkpoints.glob("step-*/model")]
    assert with_model == ["step-000060"], "the last checkpoint alone holds a model"


@pytest.mark.usefixtures("copied")
def test_ctrl_c_saves_and_the_command_it_prints_goes_on_bit_for_bit(
    sft: tuple[dict[str, Any], RunFolder], folder: Path
) -> None:
    """Stopped somewhere, continued by the very words on the screen: every loss is the uninterrupted run's.

    Seen failing with the order of rows begun anew after a resume.
    """
    words = ["areal-lite", "sft", "rlhf_sft", *SFT, "run.checkpoint_every=1", f"run.dir={folder / 'stopped'}"]
    with UserRun(words, run_folder=folder / "stopped") as run:
        run.wait_for_steps(7)
        run.press_ctrl_c()
        run.ends_with(130)
        command = run.output.partition("Resume with:")[2].strip()
    stopped_at = len(RunFolder(folder / "stopped").read("metrics.jsonl"))
    assert 7 <= stopped_at < 60
    assert main(shlex.split(command)[1:]) == 0
    mine, theirs = (RunFolder(folder / name).read("metrics.jsonl") for name in ("stopped", "sft"))
    figures = ["step", "loss", "accuracy", "grad_norm", "lr", "eval_loss"]
    assert [[row.get(name) for name in figures] for row in mine] == [
        [row.get(name) for name in figures] for row in theirs
    ]


def test_the_reward_model_starts_from_the_sft_run_and_learns_the_order(
    reward_model: tuple[dict[str, Any], RunFolder],
) -> None:
    summary, _ = reward_model
    assert summary["eval"]["0"] == {"loss": pytest.approx(0.6931, abs=1e-4), "accuracy": 0.5, "margin": 0.0}
    assert summary["eval"]["40"]["accuracy"] > 0.7


def test_ppo_learns_from_the_learned_reward_and_is_judged_by_the_true_one(
    reward_model: tuple[dict[str, Any], RunFolder], folder: Path
) -> None:
    """Rewards are scores, accuracies shares of problems; nothing failed. Seen failing with one verifier for both."""
    words = [
        *TASK, "run.steps=3", f"run.dir={folder / 'ppo'}", f"model.path={folder / 'sft'}", "run.log_samples=4",
        f"verifier.arguments={{model: {folder / 'rm'}}}", "queue.groups_per_step=4", "queue.samples_per_group=4",
        "rollout.slots=16", "rollout.max_new_tokens=16", "rollout.kv_cache_mb=64",
    ]  # fmt: skip
    summary, run = run_loop(load_config("rlhf_ppo", words))
    assert summary["status"] == "done"
    assert summary["ledger"]["trained"] == 12
    assert summary["ledger"]["failed"] == 0
    assert all((40 * accuracy) % 1 == pytest.approx(0, abs=1e-9) for accuracy in summary["eval"].values())
    rewards = [sample["reward"] for row in run.read("samples.jsonl") for sample in row["samples"]]
    assert any(abs(reward - round(reward)) > 1e-3 for reward in rewards)


def test_dpo_prefers_what_was_chosen_and_eval_measures_its_accuracy(
    sft: object, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The policy starts as its own reference; another command reads the model out of the run."""
    words = [*TASK, "run.steps=40", f"model.path={folder / 'sft'}", f"run.dir={folder / 'dpo'}", "trainer.lr=1e-3"]
    summary, _ = run_offline("rlhf_dpo", "dpo", *words)
    assert summary["eval"]["0"]["accuracy"] == pytest.approx(0.5, abs=0.1)
    assert summary["eval"]["40"]["accuracy"] > 0.7
    assert summary["eval"]["40"]["margin"] > 0
    capfd.readouterr()
    rollout = ["rollout.max_new_tokens=16", "rollout.slots=16", "rollout.kv_cache_mb=64"]
    assert main(["eval", str(folder / "dpo"), "--recipe", "rlhf_ppo", *TASK, *rollout]) == 0
    output, errors = capfd.readouterr()
    assert output.startswith("held-out accuracy, greedy: ")
    assert "(40 problems)" in output
    assert errors == ""
