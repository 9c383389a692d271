"""What a run leaves behind: the keys that tools read, and figures worked out by hand from a scripted run."""

import gzip
import json
import math
import subprocess
import sys
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ledger_builders import FakeClock, make_sample
from report_builders import make_events
from run_folders import new_run_folder, save_run

from areal_lite.config.recipe import Config, parse_config
from areal_lite.events import Event
from areal_lite.record import recorder as recorder_module
from areal_lite.record.lanes import between_publications
from areal_lite.record.metrics import METRICS
from areal_lite.record.recorder import OnlineRecorder, commit_of_code
from areal_lite.record.report.times import lane_shares
from areal_lite.record.run_folder import RunFolder
from areal_lite.types import Group, Prompt, Score, StepReward

METRICS_KEYS = [
    "step", "version", "time_s", "lr", "reward_mean", "loss", "grad_norm", "step_skipped", "entropy", "kl_behav_prox",
    "behav_weight_mean", "behav_weight_masked_fraction", "clip_fraction", "length_mean", "truncated_fraction",
    "tokens_trained", "tokens_masked_stale", "age_mean", "age_max", "trainer_wait_s", "train_s", "publish_s",
    "paused_s", "gen_tokens_per_s", "samples_per_s", "rollout_occupancy", "ledger",
]  # fmt: skip
"""The contract, less what stands only in the rows after it was measured (`MEASURED_KEYS`)."""
PARITY_KEYS = [f"parity_{name}_abs_logprob_diff" for name in ("mean", "p99", "max")]
MEASURED_KEYS = [*PARITY_KEYS, "eval_reward"]
SUMMARY_KEYS = [
    "status", "steps", "version", "wall_s", "samples_per_s", "gen_tokens_per_s", "trained_tokens_per_s",
    "reward_first", "reward_last", "eval", "length_histogram", "age_histogram", "age_max_trained", "max_staleness",
    "ledger", "rollout_occupancy", "rollout_idle_fraction", "trainer_idle_fraction", "paused_fraction",
    "publish_s_median", "pause_s_median", *PARITY_KEYS, "versions", "warnings", "stopped_by",
    "eval_best_step",
]  # fmt: skip
BEGIN = 1000.0
CONFIG: dict[str, Any] = {
    "run": {"steps": 10},
    "rollout": {"slots": 4, "workers": 2},
    "queue": {"groups_per_step": 2, "samples_per_group": 2, "max_staleness": 3},
    "trainer": {"minibatches": 2},
}


def make_stats(**changes: Any) -> dict[str, Any]:
    defaults: dict[str, Any] = {metric.name: 0.5 for metric in METRICS if metric.reduction}
    return defaults | {"age_histogram": {0: 30, 1: 10}, "tokens_trained": 40, "age_max": 1, "step_skipped": 0} | changes


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return parse_config(CONFIG | {"run": {"steps": 10, "dir": str(tmp_path / "run")}})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()
    clock.now = BEGIN
    monkeypatch.setattr("areal_lite.record.recorder.time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr("areal_lite.record.recorder.now", clock)
    return clock


@pytest.fixture
def folder(config: Config) -> RunFolder:
    return new_run_folder(config)


@pytest.fixture
def recorder(config: Config, folder: RunFolder, clock: FakeClock) -> OnlineRecorder:
    return OnlineRecorder(config, folder)


def do_step(recorder: OnlineRecorder, step: int, *, tokens: float = 0.0, **changes: Any) -> dict[str, Any]:
    timings = {"trainer_wait_s": 1.0, "train_s": 2.0, "publish_s": 0.25}
    return recorder.step(
        make_stats(**changes), step=step, tokens_generated=tokens, ledger={"trained": 2 * step}, **timings
    )


def event(time: float, lane: str, kind: str, **ids: Any) -> Event:
    return {"time": BEGIN + time, "lane": lane, "kind": kind, **ids}


def read_json(folder: RunFolder, name: str) -> Any:
    """Strictly: neither NaN nor Infinity is JSON."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} in {name}")

    return json.loads((folder.path / name).read_text(), parse_constant=refuse)


def note_parity(recorder: OnlineRecorder, largest: float) -> None:
    recorder.parity(mean=largest / 4, p99=largest / 2, max=largest)


# --- the contract ---


def test_every_promised_key_is_in_the_row_and_in_the_summary(recorder: OnlineRecorder, folder: RunFolder) -> None:
    """Seen failing with `paused_s` and with `trained_tokens_per_s` renamed, and with a trace that is not packed."""
    recorder.evaluation(0, 0.25, by_source={"arith": 0.25})
    note_parity(recorder, 1e-6)
    row = do_step(recorder, 1)
    assert [key for key in METRICS_KEYS + MEASURED_KEYS if key not in row] == []
    assert folder.read("metrics.jsonl") == [row]
    recorder.summary("done", ledger={"trained": 2})
    summary = read_json(folder, "summary.json")
    assert [key for key in SUMMARY_KEYS if key not in summary] == []
    assert summary["versions"]["torch"].startswith("2.")
    with gzip.open(folder.path / "trace.json.gz", "rt") as file:
        assert json.load(file).keys() == {"traceEvents", "displayTimeUnit"}
    assert list((folder.path / "tensorboard").iterdir())


def test_a_run_that_ended_before_its_first_step_has_a_summary(recorder: OnlineRecorder, folder: RunFolder) -> None:
    summary = recorder.summary("failed: StallError: no progress", ledger={})
    assert [key for key in SUMMARY_KEYS if key not in summary] == []
    assert (summary["steps"], summary["version"], summary["reward_first"]) == (0, 0, None)
    assert read_json(folder, "summary.json")["status"] == "failed: StallError: no progress"


def test_what_is_not_a_number_is_null_and_what_is_infinite_is_not(recorder: OnlineRecorder, folder: RunFolder) -> None:
    """A parity that is infinite or NaN must not look like one that was not measured.

    Seen failing with NaN written as it is, alone and within a mapping, with infinity as null (the summary then named no
    parity at all), and with a NaN parity as null.
    """
    note_parity(recorder, math.inf)
    changes = {"behav_prox_max_abs_diff_age0": math.inf, "grad_norm": -math.inf, "loss_metrics": {"a": math.nan}}
    do_step(recorder, 1, loss=math.nan, **changes)
    note_parity(recorder, math.nan)
    do_step(recorder, 2)
    recorder.summary("done", ledger={})
    row, second = folder.read("metrics.jsonl")
    assert second["parity_max_abs_logprob_diff"] == sys.float_info.max
    assert row["loss"] is row["loss_metrics"]["a"] is None
    assert "NaN" not in (folder.path / "metrics.jsonl").read_text()
    assert row["behav_prox_max_abs_diff_age0"] == row["parity_max_abs_logprob_diff"] == sys.float_info.max
    assert row["grad_norm"] == -sys.float_info.max
    assert read_json(folder, "summary.json")["parity_max_abs_logprob_diff"] == sys.float_info.max


def test_the_commit_is_that_of_the_packages_own_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or worktree, whose `.git` is a file. Seen failing with that of a user's repository around the environment."""
    git, tree = ["git", "-C", str(tmp_path), "-c", "user.name=me", "-c", "user.email=me@here"], tmp_path / "tree"
    for words in (["init"], ["commit", "--allow-empty", "-m", "first"], ["worktree", "add", str(tree)]):
        subprocess.run([*git, *words], check=True, capture_output=True)
    monkeypatch.delenv("AREAL_LITE_COMMIT", raising=False)
    found = list[str | None]()
    for root in (tmp_path, tree, tmp_path / "venv"):
        (root / "areal_lite" / "record").mkdir(parents=True)
        monkeypatch.setattr(recorder_module, "__file__", str(root / "areal_lite" / "record" / "recorder.py"))
        found.append(commit_of_code())
    assert found[0] == found[1] is not None
    assert found[2] is None


# --- figures ---

#       rollout/0: 4 samples of 4 slots from 0 to 18, paused 10 .. 11 (receives 10.5 .. 10.75); then nothing runs
#       rollout/1: 2 samples from 0 to 15, then lost
#       trainer: waits 0 .. 2, 8 .. 13; trains between; publishes 6 .. 8
SCRIPT = [
    event(0.0, "rollout/0", "running", n=4),
    event(0.0, "rollout/1", "running", n=2),
    event(0.0, "trainer", "wait"),
    event(2.0, "trainer", "train"),
    event(6.0, "trainer", "trained"),
    event(8.0, "trainer", "published"),
    event(8.0, "trainer", "wait"),
    event(10.0, "rollout/0", "pause"),
    event(10.5, "rollout/0", "paused"),
    event(10.75, "rollout/0", "update_received"),
    event(10.875, "rollout/0", "update_loaded"),
    event(11.0, "rollout/0", "resumed"),
    event(13.0, "trainer", "train"),
    event(15.0, "controller", "lost", worker="rollout/1"),
    event(18.0, "rollout/0", "running", n=0),
]


def play(recorder: OnlineRecorder, clock: FakeClock, *, until: float, step: int, **changes: Any) -> dict[str, Any]:
    """Tell what happened since the last step, then complete a step."""
    now = BEGIN + until
    recorder.feed([item for item in SCRIPT if clock.now <= item["time"] < now])
    clock.now = now
    return do_step(recorder, step, **changes)


def test_rates_and_occupancy_of_one_step(recorder: OnlineRecorder, clock: FakeClock) -> None:
    """From 4 to 12 s: 8 s with 4 and 2 of 2 * 4 slots running, 4 samples trained, 800 tokens generated.

    Seen failing with occupancy over the slots of one worker, and with rates since the start.
    """
    play(recorder, clock, until=4.0, step=1, tokens=1000.0)
    row = play(recorder, clock, until=12.0, step=2, tokens=1800.0)
    assert row["time_s"] == pytest.approx(12.0)
    assert row["gen_tokens_per_s"] == pytest.approx(800 / 8)
    assert row["samples_per_s"] == pytest.approx(4 / 8)
    assert row["rollout_occupancy"] == pytest.approx((4 + 2) / 8)
    assert row["paused_s"] == pytest.approx(1.0)
    assert row["train_s"] == 2.0


def test_shares_lie_between_the_first_and_the_last_step(recorder: OnlineRecorder, clock: FakeClock) -> None:
    """From 4 to 20 s: 16 s; what was before the first trained step (a start-up) does not count.

    rollout/0: idle 2 s, paused 1 s (0.5 call, 0.25 transfer, 0.125 reload, 0.125 stamp), slot seconds 14 * 4;
    rollout/1: lost for 5 s, slot seconds 11 * 2. The trainer waits 8 .. 13. Rates: 8 samples, 1600 tokens in 16 s.

    Seen failing with shares since the start, and with the lost worker's samples running forever.
    """
    play(recorder, clock, until=4.0, step=1, tokens=1000.0)
    play(recorder, clock, until=12.0, step=2, tokens=1800.0)
    play(recorder, clock, until=20.0, step=3, tokens=2600.0)
    summary = recorder.summary("done", ledger={})
    assert summary["rollout_idle_fraction"] == pytest.approx((2 / 16 + 0) / 2)
    assert summary["rollout_occupancy"] == pytest.approx((14 * 4 + 11 * 2) / (16 * 8))
    assert summary["trainer_idle_fraction"] == pytest.approx(5 / 16)
    assert summary["paused_fraction"] == pytest.approx((1 / 16 + 0) / 2)
    parts = {name: summary[f"paused_fraction_{name}"] for name in ("pausing", "transferring", "reloading", "stamping")}
    assert parts == pytest.approx(
        {"pausing": 0.5 / 32, "transferring": 0.25 / 32, "reloading": 0.125 / 32, "stamping": 0.125 / 32}
    )
    assert summary["samples_per_s"] == pytest.approx(8 / 16)
    assert summary["gen_tokens_per_s"] == pytest.approx(1600 / 16)
    assert summary["trained_tokens_per_s"] == pytest.approx(2 * 40 / 16)
    assert summary["wall_s"] == pytest.approx(20.0)
    assert summary["pause_s_median"] == pytest.approx(1.0)
    assert summary["publish_s_median"] == 0.25


@pytest.mark.parametrize(
    "ids", [("scaled", {"dismissed": ["rollout/1"]}), ("lost", {"worker": "rollout/1", "state": "dead"})]
)
def test_a_worker_that_has_left_is_in_no_share(
    recorder: OnlineRecorder, clock: FakeClock, ids: tuple[str, dict[str, Any]]
) -> None:
    """Two ran all slots until 4 s, then one half of them. Seen failing with the other's slots counted on."""
    recorder.feed([event(0.0, f"rollout/{number}", "running", n=4) for number in range(2)])
    recorder.feed([event(4.0, "controller", ids[0], **ids[1]), event(4.0, "rollout/0", "running", n=2)])
    rows = []
    for step, clock.now in ((1, BEGIN + 4), (2, BEGIN + 8), (3, BEGIN + 12)):
        rows.append(do_step(recorder, step))
    assert [row["rollout_occupancy"] for row in rows[1:]] == pytest.approx([0.5, 0.5])
    recorder.feed([event(12.0, "rollout/0", "running", n=0)])
    clock.now = BEGIN + 20
    do_step(recorder, 4)
    assert recorder.shares()["rollout_idle_fraction"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("steps", "first", "last"), [(1, 1, 1), (2, 1, 2), (12, 1, 12), (30, 2, 29), (100, 5.5, 95.5), (300, 5.5, 295.5)]
)
def test_rewards_of_both_ends_are_means_of_a_tenth_of_the_steps(
    recorder: OnlineRecorder, steps: int, first: float, last: float
) -> None:
    """Ten at most, and never the same ones: a reward that rises by 1 a step.

    Seen failing with ten steps at each end of a run of 12, whose 1 and 12 are 5.5 and 7.5 then, and with the first and
    the last row alone.
    """
    for step in range(1, steps + 1):
        do_step(recorder, step, reward_mean=float(step))
    summary = recorder.summary("done", ledger={})
    assert (summary["reward_first"], summary["reward_last"]) == pytest.approx((first, last))


def test_the_worst_parity_of_all_stands_in_the_summary(recorder: OnlineRecorder) -> None:
    """One measured after the last row as well. Seen failing with the last one instead of the largest."""
    for step, difference in enumerate([1e-6, 3e-5, 2e-6], start=1):
        note_parity(recorder, difference)
        do_step(recorder, step)
    assert recorder.summary("done", ledger={})["parity_max_abs_logprob_diff"] == 3e-5
    note_parity(recorder, 4e-5)
    summary = recorder.summary("done", ledger={})
    assert [summary[key] for key in PARITY_KEYS] == [1e-5, 2e-5, 4e-5]


def test_samples_are_readable(recorder: OnlineRecorder, folder: RunFolder) -> None:
    """Seen failing with a reward without that of the step, in which `replay` then found a difference."""
    prompt = Prompt(prompt_id="train/0/1", text="7+25=?", token_ids=(1, 2), answer="32")
    score = Score(reward=np.float32(1.0), step_rewards=(StepReward(token=1, value=0.5),))
    sample = make_sample(versions=(3, 3, 4), text="7+25=32#32", score=score)
    failed = make_sample(versions=(4,), text="?", score=Score(failure="timeout"))
    recorder.samples(5, [Group(group_id="train/0/1#0", prompt=prompt, samples=(sample, failed))])
    (row,) = folder.read("samples.jsonl")
    assert (row["step"], row["group"], row["prompt"], row["answer"]) == (5, "train/0/1#0", "7+25=?", "32")
    assert row["samples"] == [
        {"text": "7+25=32#32", "reward": 1.5, "failure": None, "stop_reason": "stop", "tokens": 3,
         "spans": [[3, 0, 2], [4, 2, 3]], "step_rewards": [[1, 0.5]]},
        {"text": "?", "reward": None, "failure": "timeout", "stop_reason": "stop", "tokens": 1, "spans": [[4, 0, 1]]},
    ]  # fmt: skip


# --- a resumed run ---


def test_a_resumed_run_continues_where_the_first_one_ended(
    config: Config, folder: RunFolder, recorder: OnlineRecorder, clock: FakeClock
) -> None:
    """Rows, time, evaluations, histograms, rewards and rates of both parts; the second one has fewer workers.

    Seen failing with the clock restarted, with the slots of workers that only the first part had, with ages and lengths
    of the second part only, with the parts of the first part's evaluation forgotten, and with the evaluation's start
    among its figures: the terminal showed a held-out accuracy of 1795716364.
    """
    samples = [{"end": 1.0, "tokens": 20, "spans": []}]
    group = event(1.0, "rollout/0", "group", group="g", start=0.0, samples=samples)
    kept = {"accuracy": 0.25, "parts": {"right": 0.5}, "metrics": {}, "rewards": {"a": 1.0}, "watched": {"truth": {}}}
    figures = {"start": 1.5, "problems": 4, **kept}
    recorder.feed([group, event(2.0, "controller", "eval", step=0, **figures)])
    recorder.feed([event(2.0, f"rollout/{place}", "running", n=4) for place in range(2)])
    for step in (1, 2):
        clock.now += 10.0
        do_step(recorder, step, tokens=100.0 * step, reward_mean=0.0)
    recorder.summary("interrupted", ledger={"trained": 4})

    clock.now += 5000.0
    again = OnlineRecorder(config, folder)
    assert again.evaluations == {0: kept}
    assert [row["step"] for row in again.recent] == [1, 2]
    again.feed([group, event(5020.0, "rollout/0", "running", n=4)])
    for step in (3, 4):
        clock.now += 10.0
        row = do_step(again, step, tokens=50.0 * (step - 2), reward_mean=1.0)
    assert row["time_s"] == pytest.approx(40.0)
    again.evaluation(4, 0.5, by_source={"arith": 0.5}, parts={}, metrics={"words": 3.0})
    summary = again.summary("done", ledger={"trained": 8})
    assert [row["step"] for row in folder.read("metrics.jsonl")] == [1, 2, 3, 4]
    assert summary["eval"] == {"0": 0.25, "4": 0.5}
    assert summary["eval_best_step"] == 4
    assert (summary["eval_parts"], summary["eval_metrics"]) == ({"0": {"right": 0.5}}, {"4": {"words": 3.0}})
    assert (summary["steps"], summary["version"]) == (4, 4)
    assert summary["wall_s"] == pytest.approx(40.0)
    assert (summary["reward_first"], summary["reward_last"]) == (0.0, 1.0)
    assert summary["age_histogram"] == {"0": 120, "1": 40}
    assert summary["length_histogram"] == {"16": 2}
    assert summary["gen_tokens_per_s"] == pytest.approx((100 + 50) / 20)
    assert row["rollout_occupancy"] == 1.0
    assert summary["samples_per_s"] == pytest.approx(4 / 10)


@pytest.mark.parametrize("further", [0, 1, 2])
def test_speeds_of_a_resumed_run_are_of_all_steps_but_the_first_after_each_start(
    config: Config, recorder: OnlineRecorder, clock: FakeClock, further: int
) -> None:
    """Three lives, of 3, 1 and some steps: 10 s, 100 tokens generated and 40 trained a step, 60 s for the first ones.

    Seen failing with the last life's steps alone: all speeds were 0 where it had one step or none, and a run that ended
    again at once overwrote its summary with them.
    """
    for steps in (3, 1, further):
        for step in range(steps):
            clock.now += 10.0 if step else 60.0
            recorder.feed(
                [{"time": clock.now, "lane": "trainer", "kind": "published", "version": len(recorder.recent) + 1}]
            )
            do_step(recorder, len(recorder.recent) + 1, tokens=100.0 * (step + 1))
        summary = recorder.summary("interrupted", ledger={})
        speeds = [summary[f"{name}_per_s"] for name in ("samples", "gen_tokens", "trained_tokens")]
        assert speeds == pytest.approx([4 / 10, 100 / 10, 40 / 10])
        clock.now += 5000.0
        recorder = OnlineRecorder(config, RunFolder(Path(str(config.run.dir))))


def test_page_and_summary_tell_the_same_shares_after_a_resume(
    config: Config, folder: RunFolder, recorder: OnlineRecorder, clock: FakeClock
) -> None:
    """Of both lives, and nothing of the hour between, in which a step takes longer then: seen failing with the second
    life's alone in the summary, and with the hour in the page's.
    """
    log = make_events(steps=6, workers=1)
    for steps, dead in ((range(3), 0.0), (range(3, 6), 3600.0)):
        recorder = OnlineRecorder(config, folder) if dead else recorder
        for step in steps:
            clock.now = BEGIN + dead + step + 1
            now = [row for row in log if step < row["time"] <= step + 1 and not (dead and row["kind"] == "trained")]
            recorder.feed([row | {"time": BEGIN + dead + row["time"]} for row in now])
            do_step(recorder, step + 1)
    summary = recorder.summary("done", ledger={"trained": 12})
    page = lane_shares(between_publications(folder.iterate("events.jsonl")))
    assert page["trainer"]["training"] > 0.75
    for lane, state, name in (
        ("trainer", "training", "trainer_training_fraction"), ("trainer", "waiting", "trainer_idle_fraction"),
        ("trainer", "publishing", "trainer_publishing_fraction"), ("rollout/0", "pausing", "paused_fraction"),
    ):  # fmt: skip
        assert page[lane][state] == pytest.approx(summary[name], abs=0.01), name


@pytest.mark.slow
def test_a_longer_event_log_takes_no_more_memory(config: Config, folder: RunFolder, clock: FakeClock) -> None:
    """At a resume, and for summary and trace. Seen failing with the log read whole: six times what it grows by."""
    samples = [{"end": BEGIN + 1.0, "tokens": 9, "spans": [[0, 0, 4], [1, 4, 9]]} for _ in range(8)]
    group = event(1.0, "rollout/0", "group", group="arith/0/1#0", start=BEGIN, samples=samples)
    save_run(folder, 1, lambda path: path.touch(), queue=b"")
    config = config.model_copy(update={"run": config.run.model_copy(update={"resume": str(folder.path)})})
    found = []
    for count in (10, 10, 2000):  # the first one imports what it needs
        folder.append("events.jsonl", [group] * count)
        tracemalloc.start()
        again = RunFolder.resume(config)
        again.go_on(config)
        OnlineRecorder(config, again).summary("done", ledger={})
        found.append((tracemalloc.get_traced_memory()[1], (folder.path / "events.jsonl").stat().st_size))
        tracemalloc.stop()
    _, (less, small), (more, large) = found
    assert more - less < (large - small) / 2
