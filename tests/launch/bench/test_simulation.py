"""The simulated run: closed forms, relations that any run has, and calibration on a log of known seconds.

At the end, the workload of benchmarks: lengths from a log-normal distribution, decoded for real whatever the model
says.
"""

import json
import math
import statistics
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from episode_builders import load, play
from run_folders import new_run_folder
from scripted_engine import ScriptedEngine
from typer.testing import CliRunner

from areal_lite.config.recipe import load_config
from areal_lite.launch.bench.longtail import draw_length
from areal_lite.launch.bench.simulation import Inputs, simulate
from areal_lite.launch.bench.simulation_inputs import inputs_of_run
from areal_lite.launch.commands.main import app
from areal_lite.launch.commands.simulate import read_inputs
from areal_lite.rollout.engine import Sampling
from areal_lite.rollout.runner import Workflows
from areal_lite.sample_queue.ledger import LedgerSettings
from areal_lite.types import StopReason

EVEN = {"sigma": 0.0, "median": 100, "slots": 32, "decode_s": 0.01, "train_s": 2.0}
"""All samples have 100 tokens, and decode in a second."""


def figures(inputs: Mapping[str, Any], *, steps: int = 30, **queue: Any) -> dict[str, Any]:
    """Simulate 4 groups of 8 samples a step."""
    settings = {"groups_per_step": 4, "samples_per_group": 8, "max_staleness": 0, "total_steps": steps, **queue}
    return dict(simulate(Inputs.model_validate(inputs), LedgerSettings.model_validate(settings)))


@pytest.mark.parametrize(
    ("changes", "eta", "step_s", "generators_idle", "trainer_idle"),
    [
        ({}, 0, 3.0, 2 / 3, 1 / 3),
        ({"verify_s": 1.0}, 0, 4.0, 3 / 4, 2 / 4),
        ({"pause_s": 0.5}, 0, 3.5, 2 / 3.5, 1 / 3.5),
        ({"decode_sample_s": 0.01 / 32}, 0, 4.0, 2 / 4, 2 / 4),
        # Two engines get two groups each; a second wave waits for slots.
        ({"decode_sample_s": 0.01 / 16, "engines": 2}, 0, 4.0, 2 / 4, 2 / 4),
        ({"slots": 16}, 0, 4.0, 2 / 4, 2 / 4),
        ({"prompt_tokens": 50, "prefill_s": 0.005}, 0, 4.0, 2 / 4, 2 / 4),  # four prompts, a quarter of a second each
        ({"prompt_tokens": 50, "train_s": 0.0, "train_token_s": 2 / (32 * 150)}, 0, 3.0, 2 / 3, 1 / 3),
        ({}, 1, 2.0, 1 / 2, 0.0),
        ({"train_s": 0.5}, 1, 1.0, 0.0, 1 / 2),
    ],
)
def test_equal_lengths_have_a_closed_form(
    changes: dict[str, Any], eta: int, step_s: float, generators_idle: float, trainer_idle: float
) -> None:
    """Synchronous: the sum of the parts; at eta 1 the longer one. Seen failing with a pause for engines alone."""
    found = figures(EVEN | changes, max_staleness=eta)
    assert found["step_s"] == pytest.approx(step_s, rel=1e-3)
    assert found["samples_per_s"] == pytest.approx(32 / step_s, rel=1e-3)
    assert found["generator_idle"] == pytest.approx(generators_idle, abs=2e-3)
    assert found["trainer_idle"] == pytest.approx(trainer_idle, abs=2e-3)


def test_context_slows_decoding_down() -> None:
    """8 samples of t tokens each cost 8 t x a step: half a second over 100 tokens for x = 1 / (8 * 100^2).

    Seen failing with the context of a stretch's begin for all of it: equal lengths then decode as if they had none.
    """
    found = figures(EVEN | {"decode_context_s": 1 / (8 * 100**2), "slots": 8, "train_s": 0.0}, steps=10)
    assert found["step_s"] == pytest.approx(4 * 1.5, rel=1e-3)  # four groups, one after another


def test_ages_and_masks_follow_from_the_lengths() -> None:
    """A sample of k steps has k versions; the bound masks its first tokens; a slow verifier makes all tokens older.

    Seen failing with one span per sample, and with the scores of a group given to the oldest one that waited for some.
    """
    mixed = EVEN | {"lengths": {10: 9, 100: 1}, "train_s": 0.1}
    wide = {"max_staleness": 4, "steps": 100}
    found, bound = (figures(mixed, **wide, on_stale=policy) for policy in ("keep", "mask"))
    assert found["age_max"] > 4 == bound["age_max"]
    assert found["masked"] == 0 < bound["masked"]
    assert bound["masked"] == pytest.approx(found["over_bound"], abs=0.05)
    quarters = bound["masked_by_quarter"]
    assert quarters == sorted(quarters, reverse=True)
    assert quarters[0] > 2 * quarters[3]
    few_long = EVEN | {"lengths": {10: 3, 60: 4, 1000: 1}, "train_s": 0.5}
    soon, late = (figures(few_long | {"verify_s": verify_s}, **wide, on_stale="keep") for verify_s in (0.0, 5.0))
    assert late["age_mean"] > soon["age_mean"]


def test_relations_of_any_run() -> None:
    """More asynchrony, engines or slots never slow a run down; `wait` trains the long samples that `drop` loses, and is
    the slowest. Seen failing with every policy simulated as `drop`.
    """
    scene = {"sigma": 1.0, "slots": 16, "decode_sample_s": 0.001, "train_s": 1.0}
    speeds = [figures(scene, max_staleness=eta)["samples_per_s"] for eta in (0, 1, 2, 4)]
    assert all(more > 0.97 * less for less, more in pairwise(speeds))  # each run measures steps of its own
    assert speeds[-1] > 1.5 * speeds[0]
    sizes = [figures(scene | change)["samples_per_s"] for change in ({}, {"engines": 2})]
    assert all(more > less for less, more in pairwise(sizes))
    heavy = scene | {"sigma": 1.5}
    policies = ("mask", "keep", "wait", "drop")
    mask, keep, strict, dropped = (figures(heavy, max_staleness=4, on_stale=policy) for policy in policies)
    assert strict["masked"] == dropped["masked"] == 0
    longest = "1025-4096"
    assert min(strict["trained_by_length"][longest]) > 0.8
    assert max(dropped["trained_by_length"][longest]) < 0.6
    assert strict["samples_per_s"] < dropped["samples_per_s"] < mask["samples_per_s"]
    assert mask["samples_per_s"] == pytest.approx(keep["samples_per_s"], rel=0.05)
    eager, short = (figures(heavy, max_staleness=30, max_ahead=ahead, on_stale="wait") for ahead in (None, 1))
    assert short["age_max"] < eager["age_max"]


def test_calibration_finds_the_seconds_of_a_log(tmp_path: Path) -> None:
    """A log written with known seconds gives them back; GPUs are the recipe's, not the run's.

    Seen failing with pauses counted as decoding, with the time between a stop and a resume as verification, and with
    the cost of the run's GPUs.
    """
    overrides = [f"run.dir={tmp_path}/run", "rollout.workers=1", "trainer.ranks=2"]
    folder = new_run_folder(load_config("arith_cpu", overrides))
    rng, now, rows, events = np.random.default_rng(0), 100.0, [], list[dict[str, Any]]()

    def emit(lane: str, kind: str, **ids: Any) -> None:
        events.append({"time": now, "lane": lane, "kind": kind, **ids})

    for step in range(1, 13):
        emit("trainer", "wait")
        lengths = np.sort(rng.integers(10, 200, 8)).tolist()
        start, samples, done = now, [], 0
        emit("rollout/0", "running", n=len(lengths))
        for place, length in enumerate(lengths):
            now += (length - done) * (0.02 + 0.005 * (len(lengths) - place))
            done = length
            if place == 3:
                emit("rollout/0", "pause")
                now += 0.25
                emit("rollout/0", "resumed")
            samples.append({"end": now, "tokens": length, "spans": [[step - 1, 0, length]]})
            emit("rollout/0", "running", n=len(lengths) - place - 1)
        emit("rollout/0", "group", group=f"g{step}", start=start, samples=samples)
        generated, now = now, now + 0.5
        emit("verifier/0", "verify", group_id=f"g{step}", start=generated, end=now)
        emit("trainer", "train")
        now += 0.01 * sum(lengths)
        emit("trainer", "trained")
        now += 0.25
        emit("trainer", "published", version=step)
        rows.append({"step": step, "tokens_trained": sum(lengths), "tokens_masked_stale": 0})
    emit("rollout/0", "group", group="late", start=now, samples=[])
    emit("controller", "gap")
    now += 9000
    emit("verifier/0", "verify", group_id="late", start=now, end=now)
    folder.append("events.jsonl", events)
    folder.append("metrics.jsonl", [*rows, {"step": 13}])
    found, config = inputs_of_run(folder.path)
    assert config.trainer.ranks == 2
    assert found.decode_s == pytest.approx(0.02, rel=0.05)
    assert found.decode_sample_s == pytest.approx(0.005, rel=0.05)
    assert found.pause_s == pytest.approx(0.25, rel=0.01)
    assert found.verify_s == pytest.approx(0.5, rel=0.01)
    assert found.train_token_s == pytest.approx(0.01, rel=0.15)
    assert sum(found.lengths.values()) == 96
    split = ["run.device=cuda", "model.compute_dtype=auto", "rollout.workers=3", "trainer.ranks=4"]
    for transport, gpus in (("nccl", 7), ("ipc", 4)):
        config = load_config("arith_cpu", [*split, f"weights.transport={transport}"])
        assert [read_inputs(config, run=run, gpu="H100", profile=None).gpus for run in (folder.path, None)] == [
            gpus
        ] * 2


def test_the_command_shows_what_limits_and_writes_a_page(tmp_path: Path) -> None:
    """A grid over a profile's GPUs: the fastest settings, all rows in the file; wrong input ends in a sentence.

    Seen failing with simulations without end, with tracebacks of numpy, and with assumed engines that were printed,
    and not simulated.
    """
    profile = tmp_path / "profile.yaml"
    profile.write_text("nodes: 1\ngpus_per_node: 4\n")
    words = ["simulate", "gsm8k_1node", "model.path=Qwen/Qwen3-1.7B", "queue.groups_per_step=4", "--profile"]
    run = CliRunner().invoke(
        app, [*words, str(profile), "--grid", "--assume", "price_per_gpu_hour=2", "--out", f"{tmp_path}/out"]
    )
    assert run.exit_code == 0, run.output
    assert "limit" in run.output
    rows = json.loads((tmp_path / "out" / "results.json").read_text())["rows"]
    assert {(row["ranks"], row["engines"]) for row in rows} == {(1, 3), (2, 2), (3, 1)}
    assert {row["eta"] for row in rows} == {0, 1, 2, 4, 8}
    for row in rows:
        assert row["gpu_hours_per_step"] == pytest.approx(4 * row["step_s"] / 3600)
        assert row["cost_per_step"] == pytest.approx(2 * row["gpu_hours_per_step"])
        assert math.isclose(row["trained_tokens_per_s"], 1e6 * 4 / 3600 / row["gpu_hours_per_million_tokens"])
    assert "trained tokens/s" in (tmp_path / "out" / "report.html").read_text()
    for wrong, message in (
        (["--assume", "decode=1"], "decode"),
        (["--assume", "engines=2"], "--assume engines changes nothing"),
        (["--from", str(tmp_path)], "expected a run folder, got"),
        (["--gpu", "H1000"], "--gpu must be one of"),
        (["objective.preset=dapo", "--assume", "equal_rewards=1"], "equal_rewards: input should be less than 1, got 1"),
        ([word for name in ("", "_sample", "_context") for word in ("--assume", f"decode{name}_s=0")], "above 0"),
        (["--assume", "lengths={10: 0}"], "lengths.10: input should be greater than 0, got 0"),
        (["--assume", "lengths={2000000: 1}"], "less than or equal to 1048576, got"),
    ):
        failed = CliRunner().invoke(app, [*words, str(profile), *wrong])
        assert failed.exit_code == 1
        assert message in failed.output


# --- the workload of benchmarks ---


WORKFLOW = "areal_lite.launch.bench.longtail:drawn_length"
EOS = 1
ROOM = Sampling(max_new_tokens=40, temperature=1.0)


def workflows(median: float = 20, sigma: float = 0.9) -> Workflows:
    return load(WORKFLOW, arguments={"median": median, "sigma": sigma})


def test_lengths_are_log_normal() -> None:
    """Median 64; at sigma 0.9 a length exceeds 64*exp(0.9) = 157 with probability 0.159, and 64*exp(1.8) with 0.023.

    5000 draws: the standard error of a share of 0.16 is 0.005. Seen failing with the median taken for the mean.
    """
    lengths = [draw_length(seed, median=64, sigma=0.9, longest=10_000) for seed in range(5000)]
    assert statistics.median(lengths) == pytest.approx(64, rel=0.05)
    assert statistics.fmean(length > 64 * np.exp(0.9) for length in lengths) == pytest.approx(0.159, abs=0.02)
    assert statistics.fmean(length > 64 * np.exp(1.8) for length in lengths) == pytest.approx(0.023, abs=0.01)


def test_a_length_is_of_its_seed_alone_and_within_bounds() -> None:
    first = [draw_length(seed, median=3, sigma=2.0, longest=7) for seed in range(200)]
    assert first == [draw_length(seed, median=3, sigma=2.0, longest=7) for seed in range(200)]
    assert set(first) == set(range(1, 8))
    assert {draw_length(seed, median=5, sigma=0.0, longest=7) for seed in range(9)} == {5}


def test_a_sample_has_its_drawn_length_whatever_the_model_says() -> None:
    """`play` gives seed 100, and the stand-in ends one of nine tokens. Seen failing with `ignore_end` not handed on."""
    for median in (5, 20, 35):
        sample = play(ScriptedEngine(), workflows(median), sampling=ROOM)
        assert sample.num_tokens == draw_length(100, median=median, sigma=0.9, longest=40)
        assert sample.stop_reason is StopReason.LENGTH
    assert EOS in play(ScriptedEngine(), workflows(sigma=0.0, median=40), sampling=ROOM).token_ids[:-1]
