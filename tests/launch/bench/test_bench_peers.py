"""`bench peers`: its arithmetic, that both sides get the same work, and TRL's process, its packages and its lines.

TRL itself is not installed here; scripts of a few lines stand in for it.
"""

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from episode_builders import make_prompt
from train_builders import make_config, save_tiny_model
from transformers import AutoModelForCausalLM

from areal_lite.cli.main import main
from areal_lite.config.recipe import Config, load_config
from areal_lite.data.tokenizer import EOS, build_char_tokenizer
from areal_lite.errors import ConfigError, StallError, TrainerError
from areal_lite.launch.bench import peers_trl
from areal_lite.launch.bench.handover import Size
from areal_lite.launch.bench.harness import check_comparable
from areal_lite.launch.bench.longtail import draw_length
from areal_lite.launch.bench.peers import (
    SAME_LOSS,
    SAME_SPEED,
    draw_peers,
    drawn_lengths,
    lengths_in_words,
    load_weights,
    of_size,
    our_settings,
    reached,
    samples_per_s,
    seconds_at,
    speeds,
    summarise,
    targets,
    thread_settings,
    trl_settings,
)
from areal_lite.launch.bench.peers_trl import PINS, Learning, ensure_trl, run_trl
from areal_lite.launch.bench.plan import planned_config
from areal_lite.record.columns import cells
from areal_lite.rollout.worker import sample_seed
from areal_lite.sample_queue.groups import GroupRecord
from areal_lite.train.warm_start import build_model

# ---------------------------------------------------------------- arithmetic


def learning(step_s: float, accuracies: dict[int, float], *, steps: int = 20) -> Learning:
    seconds = tuple(step_s * (step + 1) for step in range(steps))
    return Learning(seconds=seconds, accuracies=accuracies, tokens=(30.0,) * steps)


def rows(*, trl_accuracy: float = 0.8) -> list[dict[str, Any]]:
    """Ours 0.5 s a step and 0.75 after 15 of 20 steps; TRL 1 s and 2 s a step, and 0.75 after 12.5 steps of both."""
    fast = learning(0.5, {0: 0.2, 10: 0.7, 20: 0.8})
    slow = [learning(seconds, {0: 0.2, 10: 0.7, 20: trl_accuracy}) for seconds in (1.0, 2.0)]
    runs = {"async": [fast, fast], "sync": [fast, fast], "trl": slow}
    return summarise(runs, accuracy=0.75, samples_per_step=128)


def test_rates_are_those_of_the_steps_that_count() -> None:
    """Of 20 steps 6 to 16 count: 11 steps of 0.5 s. What came before, 100 s here, does not.

    Seen failing with the first step as the beginning.
    """
    seconds = [100.0 + 0.5 * step for step in range(20)]
    seconds[:4] = [10.0, 20.0, 30.0, 40.0]
    assert samples_per_s(seconds, samples_per_step=128) == pytest.approx(128 / 0.5)


def test_time_to_an_accuracy_of_curves_with_known_answers() -> None:
    """0.7 at step 10 and 0.8 at step 20 are 0.75 at step 15; a later fall does not count.

    Seen failing with the first measured step at or above, 20.
    """
    assert reached({0: 0.2, 10: 0.7, 20: 0.8, 30: 0.1}, 0.75) == pytest.approx(15.0)
    assert reached({0: 0.2, 10: 0.7}, 0.75) is None
    assert reached({}, 0.75) is None
    assert reached({0: 0.75}, 0.75) == 0.0
    assert seconds_at([3.0, 5.0, 6.0], 1.5) == 4.0
    assert seconds_at([3.0, 5.0, 6.0], 0.5) == 1.5
    assert seconds_at([3.0, 5.0, 6.0], 3) == 6.0


def test_ratios_are_those_inside_a_repeat() -> None:
    """256 samples/s beside 128 and 64; 7.5 s to it beside 15 and 30. Seen failing with ours over TRL's time."""
    ours, _, trl = rows()
    assert ours["samples_per_s"] == [pytest.approx(256.0)] * 2
    assert ours["speed_over_trl"] == pytest.approx([2.0, 4.0])
    assert ours["seconds_to"] == pytest.approx([7.5, 7.5])
    assert ours["sooner_than_trl"] == pytest.approx([2.0, 4.0])
    assert ours["curves"][0][1] == [10, pytest.approx(5.0), 0.7]
    assert trl["speed_over_trl"] == trl["sooner_than_trl"] == [1.0, 1.0]
    expected = ["areal-lite, eta 4", "256", "3.00", "7.5, 15", "3.00", "0.800", "30.0"]
    assert list(cells("peers", [ours]))[1] == expected
    assert [one["median"] for one in targets(rows(), accuracy=0.75)] == pytest.approx([3.0, 3.0])


def test_an_accuracy_that_was_not_reached_makes_no_ratio_and_no_target() -> None:
    ours, _, trl = rows(trl_accuracy=0.74)
    assert trl["seconds_to"] == [None, None]
    assert ours["sooner_than_trl"] == []
    assert [line[3:5] for line in cells("peers", [ours, trl])][1:] == [["7.5, 15", "-"], ["-, -", "-"]]
    assert [one["measure"] for one in targets([ours, trl], accuracy=0.75)] == ["samples/s over TRL"]


def test_the_picture_shows_every_side(tmp_path: Path) -> None:
    draw_peers(rows(), accuracy=0.75, path=tmp_path / "peers.svg")
    drawn = (tmp_path / "peers.svg").read_text()
    assert all(label in drawn for label in ("areal-lite, eta 4", "areal-lite, eta 0", "TRL"))


# ---------------------------------------------------------------- the same work on both sides


def planned(side: Any = "sync") -> Config:
    changes = our_settings(side, thread_settings(side, cores=2)[0], steps=12, every=5, seed=7)
    return planned_config("arith_cpu", "run", [changes])


def trl_arguments(per_device: int) -> dict[str, Any]:
    return trl_settings(planned(), per_device=per_device)


def test_both_sides_learn_with_the_same_figures() -> None:
    config, arguments = planned(), trl_arguments(128)
    assert config.samples_per_step == arguments["per_device_train_batch_size"]
    assert (config.run.steps, config.run.seed) == (arguments["max_steps"], arguments["seed"]) == (12, 7)
    assert config.trainer.lr == arguments["learning_rate"] == 3e-5
    assert (config.trainer.beta1, config.trainer.beta2) == (arguments["adam_beta1"], arguments["adam_beta2"])
    assert config.queue.samples_per_group == arguments["num_generations"] == 8
    assert config.rollout.max_new_tokens == arguments["max_completion_length"] == 48
    assert config.rollout.temperature == arguments["temperature"]


@pytest.mark.parametrize("per_device", [128, 32])
def test_both_sides_make_one_optimiser_step_from_each_batch(per_device: int) -> None:
    """Seen failing with gradient_accumulation_steps 1, where TRL would take four steps on a batch in quarters."""
    for config in (planned("async"), planned("sync")):
        assert (config.trainer.minibatches, config.objective.proximal) == (1, "reuse")
    arguments = trl_arguments(per_device)
    assert arguments["per_device_train_batch_size"] * arguments["gradient_accumulation_steps"] == 128
    assert arguments["steps_per_generation"] == arguments["gradient_accumulation_steps"]
    assert arguments["num_iterations"] == 1


def test_a_recipe_without_a_counterpart_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Through the command, before anything is installed or started."""
    check_comparable(load_config("arith_cpu"), "peers", SAME_LOSS)
    with pytest.raises(ConfigError, match=r"objective\.aggregation=token_mean"):
        check_comparable(load_config("arith_cpu", ["objective.aggregation=sequence_mean"]), "peers", SAME_LOSS)
    assert main(["bench", "peers", "mixed_cpu", "--out", str(tmp_path)]) == 1
    assert "bench peers compares recipes with" in capsys.readouterr().err
    assert main(["bench", "peers", "--accuracy", "75"]) == 2
    assert re.search(r"--accuracy.*less than or equal to 1", capsys.readouterr().err, re.DOTALL)


# ---------------------------------------------------------------- speed alone


def test_rates_of_drawn_lengths_are_those_of_full_queues_and_of_all_turns_but_the_first() -> None:
    """Eta 4: 11 of 20 steps, of 0.5 s and 100 tokens a sample; in turns all but the first, of 1 and 4 s and 80 tokens.

    What else was done, 10 s a step of 1000 tokens, does not count. Seen failing with the same steps on every side, and
    with the tokens of all steps.
    """

    def run(counted: slice, step_s: float, tokens: Any) -> Learning:
        each, lengths = np.full(20, 10.0), np.full(20, 1000.0)
        each[counted], lengths[counted] = step_s, tokens
        return Learning(seconds=tuple(np.cumsum(each)), accuracies={}, tokens=tuple(lengths))

    turns, uneven = slice(1, None), np.r_[260.0, np.full(18, 70.0)]  # 80 in the mean
    runs = {
        "async": [run(slice(5, 16), 0.5, 100.0)] * 2,
        "trl": [run(turns, seconds, uneven) for seconds in (1.0, 4.0)],
    }
    ours, trl = speeds(runs, samples_per_step=64)
    assert ours["samples_per_s"] == pytest.approx([128.0, 128.0])
    assert ours["tokens_per_s"] == pytest.approx([12800.0, 12800.0])
    assert trl["tokens_per_s"] == pytest.approx([5120.0, 1280.0])
    assert ours["speed_over_trl"] == pytest.approx([2.5, 10.0])
    case = {"lengths": "64, sigma 0.9", "parameters": 9_800_000, "setting": "1+2"}
    _, shown = cells("peers speed", [case | ours])
    assert shown == ["64, sigma 0.9", "9.8", "areal-lite, eta 4", "1+2", "128.00", "12800", "6.25\n2.50-10.00"]


def drawn_config(**changes: Any) -> Config:
    return planned_config("longtail_cpu", "run", [{"run.seed": 3, "queue.samples_per_group": 2}, changes])


def test_both_sides_have_samples_of_the_same_lengths() -> None:
    """TRL's are those that the workflow draws for the queue's groups. Seen failing with the prompt's id alone."""
    prompts = [replace(make_prompt(), prompt_id=f"train/0/{place}") for place in range(2)]
    ids = [GroupRecord(prompt_id=one.prompt_id, attempt=0, sequence=0, admitted_version=0).group_id for one in prompts]
    expected = [
        draw_length(sample_seed(3, group_id, index), median=64, sigma=0.9, longest=512)
        for group_id in ids
        for index in range(2)
    ]
    assert drawn_lengths(drawn_config(), prompts) == expected
    assert len(set(expected)) > 1


def test_generate_ends_every_row_at_its_length_and_no_sooner(tmp_path: Path) -> None:
    """Two calls of a model that would end anywhere. Seen failing with the end allowed before, and one token late."""
    folder = save_tiny_model(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    lengths, end = [3, 1, 7, 2, 5, 2], 1
    processor = peers_trl.end_rows_at(iter(lengths), end=end)
    found = []
    for prompt_BP in (torch.full((4, 6), 5), torch.full((2, 3), 5)):
        out_BT = model.generate(
            prompt_BP, attention_mask=torch.ones_like(prompt_BP), logits_processor=[processor(prompt_BP)],
            do_sample=True, max_new_tokens=9, eos_token_id=end, pad_token_id=0,
        )  # fmt: skip
        found += [row.tolist().index(end) + 1 for row in out_BT[:, prompt_BP.shape[1] :]]
        assert out_BT.shape[1] - prompt_BP.shape[1] == max(lengths[: len(found)][-len(prompt_BP) :])
    assert found == lengths


@pytest.mark.parametrize(("size", "millions"), [(Size(320, 8), 10), (Size(640, 12), 60)])
def test_a_size_makes_a_model_of_random_weights(size: Size, millions: float) -> None:
    config = drawn_config(**of_size(size))
    with torch.device("meta"):
        model = build_model(config, build_char_tokenizer("0123456789+=?"))
    assert sum(one.numel() for one in model.parameters()) == pytest.approx(1e6 * millions, rel=0.05)
    assert config.model.warm_start.steps == 0


def test_drawn_lengths_are_compared_by_speed_and_a_size_needs_them(capsys: pytest.CaptureFixture[str]) -> None:
    """Through the command, before anything starts. Seen failing with a size given to any recipe."""
    check_comparable(drawn_config(), "peers", SAME_SPEED)
    assert [lengths_in_words(drawn_config(**{"rollout.workflow_arguments.sigma": sigma})) for sigma in (0.9, 0)] == [
        "64, sigma 0.9",
        "64 each",
    ]
    assert main(["bench", "peers", "--size", "320x8"]) == 1
    assert re.search(r"expected drawn lengths.*got\s+single_turn", capsys.readouterr().err, re.DOTALL)
    assert main(["bench", "peers", "longtail_cpu", "objective.aggregation=sequence_mean"]) == 1
    assert "objective.aggregation=token_mean" in capsys.readouterr().err


# ---------------------------------------------------------------- accuracy


class Copier:
    """A model that answers a prompt with the character before `=`, and knows only single-character prompts."""

    def __init__(self) -> None:
        self.training, self.seen_training = True, list[bool]()

    def eval(self) -> None:
        self.training = False

    def train(self, mode: bool) -> None:
        self.training = mode

    def generate(self, *, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        self.seen_training.append(self.training)
        return torch.cat([input_ids, input_ids[:, -3:-2], torch.ones_like(input_ids[:, :1])], dim=1)


def test_greedy_accuracy_of_a_model_that_is_right_in_two_of_three() -> None:
    """Prompts of different lengths in batches of two. Seen failing with padding on the right."""
    model, tokenizer = Copier(), build_char_tokenizer("0123456789+=?")
    assert tokenizer.eos_token == EOS
    problems = [("5=?", "5"), ("1+1+3=?", "3"), ("1+2=?", "3")]
    found = peers_trl.greedy_accuracy(model, tokenizer, problems, max_new_tokens=2, batch_size=2)
    assert found == pytest.approx(2 / 3)
    assert (model.training, model.seen_training) == (True, [False, False])


@pytest.mark.filterwarnings("ignore:.*the intent is to save:UserWarning")
def test_a_snapshot_has_the_weights_of_the_trainer(tmp_path: Path) -> None:
    """The trainer's weights are doubled and saved; a model of the first weights then has them."""
    from areal_lite.train.trainer import Trainer

    folder = save_tiny_model(tmp_path / "model")
    trainer = Trainer(make_config(), model_folder=folder, rank=0)
    with torch.no_grad():
        for parameter in trainer._learner.model.parameters():
            parameter.mul_(2)
    trainer.snapshot()(tmp_path / "saved")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    before = {name: value.clone() for name, value in model.named_parameters()}
    load_weights(model, tmp_path / "saved")
    for name, value in model.named_parameters():
        assert torch.equal(value, 2 * before[name]), name


# ---------------------------------------------------------------- TRL's process

TELLING = """
import json, pathlib, sys
path = pathlib.Path(sys.argv[1])
print("somebody else's line")
with (path.parent / "told.jsonl").open("a") as told:
    print(json.dumps({"step": 0, "accuracy": 0.25}), file=told)
    for step in range(1, json.loads(path.read_text())["grpo"]["max_steps"] + 1):
        print(json.dumps({"step": step, "seconds": 0.5 * step, "tokens": 10.0 * step}), file=told)
    print(json.dumps({"step": 2, "accuracy": 0.5}), file=told)
"""


def trl_process(program: str, folder: Path, *, progress: Any = lambda step: None) -> Learning:
    settings, command = {"grpo": {"max_steps": 2}, "threads": 1}, [sys.executable, "-c", program]
    return run_trl(settings, packages=folder / "packages", folder=folder, progress=progress, command=command)


def test_what_the_process_tells_is_read_and_nothing_else(tmp_path: Path) -> None:
    """A run before told of more steps. Seen failing with its rows left in the file."""
    done: list[int] = []
    (tmp_path / "told.jsonl").write_text('{"step": 9, "seconds": 1.0, "tokens": 1.0}\n' * 9)
    told = trl_process(f"{TELLING}import time; time.sleep(0.5)", tmp_path, progress=done.append)
    assert told == Learning(seconds=(0.5, 1.0), accuracies={0: 0.25, 2: 0.5}, tokens=(10.0, 20.0))
    assert done[-1] == 2
    assert "somebody else's line" in (tmp_path / "log").read_text()


def test_the_process_finds_its_packages_and_takes_nothing_from_the_hub(tmp_path: Path) -> None:
    """Seen failing with the path left as it is."""
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "only_there.py").write_text("import os; assert os.environ['HF_HUB_OFFLINE'] == '1'")
    assert trl_process(f"import only_there{TELLING}", tmp_path).tokens == (10.0, 20.0)


def test_a_process_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(TrainerError, match=r"(?s)got 3:.*out of luck"):
        trl_process("import sys; print('out of luck', file=sys.stderr); sys.exit(3)", tmp_path)
    with pytest.raises(TrainerError, match="must do 2 steps, it ended after 0"):
        trl_process("", tmp_path)


def test_a_process_that_hangs_is_given_up_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes its last file after 30 s, if it lives. Seen failing without the kill."""
    monkeypatch.setattr(peers_trl, "_SILENCE_S", 0.2)
    late, before = tmp_path / "late", psutil.Process().children()
    with pytest.raises(StallError, match="within 0 s"):
        trl_process(f"import time; time.sleep(30); open({str(late)!r}, 'w')", tmp_path)
    assert not late.exists()
    assert set(psutil.Process().children()) <= set(before)


# ---------------------------------------------------------------- TRL's packages


def test_the_packages_are_installed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call starts nothing. Seen failing with the folder always made."""
    commands: list[list[str]] = []

    def run(command: list[str], *, doing: str, packages: Path | None = None) -> None:
        commands.append(command)
        if packages is None:
            Path(command[command.index("--target") + 1]).mkdir()

    monkeypatch.setattr(peers_trl, "_run", run)
    said: list[str] = []
    folder = ensure_trl(tmp_path, say=said.append)
    assert folder.is_dir()
    assert all(f"{name}-{pin}" in folder.name for name, pin in PINS.items())
    install, check = commands
    assert {"--no-deps", *(f"{name}=={pin}" for name, pin in PINS.items())} <= set(install)
    assert check == list(peers_trl.COMMAND)
    assert ensure_trl(tmp_path, say=said.append) == folder
    assert (len(commands), len(said)) == (2, 1)
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize("failing", [0, 1])
def test_what_is_half_made_is_made_anew(failing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut off while installing, or found broken afterwards. Seen failing with packages put in place at once."""
    calls: list[str] = []

    def run(command: list[str], *, doing: str, packages: Path | None = None) -> None:
        calls.append(doing)
        if packages is None:
            Path(command[command.index("--target") + 1]).mkdir()
        if len(calls) == 1 + failing:
            raise ConfigError("no network")

    monkeypatch.setattr(peers_trl, "_run", run)
    with pytest.raises(ConfigError, match="no network"):
        ensure_trl(tmp_path, say=lambda line: None)
    assert list(tmp_path.iterdir()) == []
    assert ensure_trl(tmp_path, say=lambda line: None).is_dir()
    assert len(calls) == 3 + failing


def test_an_install_that_fails_says_what_was_tried(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)must be able to count.*no such number.*run this again"):
        peers_trl._run([sys.executable, "-c", "raise SystemExit('no such number')"], doing="count")
    with pytest.raises(ConfigError, match="must be able to count"):
        peers_trl._run([str(tmp_path / "nothing")], doing="count")
