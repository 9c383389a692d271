"""The check of GPUs: its runner with stand-in parts, its real parts in their form for a CPU, and its page."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from places import ROOT, SUPPORT

from areal_lite.config.recipe import Config
from areal_lite.errors import ConfigError
from areal_lite.launch.bench.gpu_check import Check
from areal_lite.launch.bench.gpu_engine import compared, figures_of, problems_of
from areal_lite.launch.bench.gpu_part import Job, table
from areal_lite.launch.bench.gpu_trainer import idle_share


def check_stand_ins(out: Path, minutes: float, *names: str) -> tuple[int, dict[str, dict[str, Any]], str]:
    """A check of the stand-in parts: its exit code, its rows, and what it printed."""
    paths = os.pathsep.join([str(SUPPORT), str(ROOT)])
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "stand_in_parts.py"), str(out), str(minutes), *names],
        env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    rows = json.loads((out / "results.json").read_text())["rows"] if (out / "results.json").is_file() else []
    return done.returncode, {row["name"]: row for row in rows}, done.stdout + done.stderr


@pytest.mark.slow
def test_a_part_that_fails_hangs_or_dies_is_a_verdict_and_the_next_one_starts(tmp_path: Path) -> None:
    """Seen failing with SIGTERM for SIGKILL (it waited forever), without the search for orphans (`sleep` lived on),
    and with the figures read before the part's end.
    """
    code, rows, said = check_stand_ins(tmp_path, 1000)
    assert code == 1, said
    outcomes = {name: row["outcome"] for name, row in rows.items()}
    assert outcomes.pop("hangs") == "killed: it had not ended after 1 s"
    assert outcomes.pop("dies").startswith("failed: it ended with -9")
    assert outcomes.pop("long").startswith("skipped: planned for 1e+09 s, ")
    assert outcomes == {
        "raises": "failed: ValueError: no such kernel",
        "misses": "failed: expected 4, got 3",
        "silent": "failed: it reported no figure",
        "leaves": "passed",
        "passes": "passed",
        "gpu": "left out: it needs a GPU",
    }
    assert rows["raises"]["figures"]["found"] == 5  # what was measured before
    assert rows["passes"]["figures"] == {"speed": {"first": 1.0, "second": 2.0}}
    assert not psutil.pid_exists(rows["leaves"]["figures"]["pid"])
    assert (tmp_path / "gpu-check.md").is_file()
    assert (tmp_path / "logs.tar.gz").is_file()


@pytest.mark.slow
def test_a_check_ends_in_its_time_and_continues_where_it_stopped(tmp_path: Path) -> None:
    """Seen failing with the part's own limit where less time is left, and with parts that passed run again.

    And with a failure that a skip replaced, with rows of other versions kept, and with a traceback for a broken file.
    """
    _, rows, said = check_stand_ins(tmp_path, 0.03, "for-ever", "long", "passes")
    assert rows["for-ever"]["outcome"] == "killed: it had not ended after 2 s", said
    assert {rows[name]["outcome"].partition(":")[0] for name in ("long", "passes")} == {"skipped"}
    code, rows, said = check_stand_ins(tmp_path, 1000, "passes")
    assert (code, rows["passes"]["outcome"]) == (0, "passed"), said
    assert rows["for-ever"]["outcome"].startswith("killed")  # the rows of earlier calls stay
    log = tmp_path / "passes" / "log.txt"
    log.write_text("as it was")
    assert check_stand_ins(tmp_path, 1000, "passes")[0] == 0
    assert log.read_text() == "as it was"
    code, _, said = check_stand_ins(tmp_path, 1000, "with-overrides")
    assert (code, "Fix: give another --out" in said) == (1, True)
    assert check_stand_ins(tmp_path, 1000, "misses")[0] == 1
    code, rows, said = check_stand_ins(tmp_path, 0.01, "misses")
    assert (code, rows["misses"]["outcome"]) == (1, "failed: expected 4, got 3"), said
    content = json.loads((tmp_path / "results.json").read_text())
    content["versions"]["torch"] = "1.0"
    for text, key in ((json.dumps(content), "versions.torch"), ("{", "benchmark")):
        (tmp_path / "results.json").write_text(text)
        with pytest.raises(ConfigError, match=f"to be of {key}=.* Fix: give another --out"):
            Check({}, device="cpu", num_gpus=0, out=tmp_path)


def write_run(folder: Path, *, texts: tuple[str, ...] = ("1", "2"), **first: Any) -> Path:
    """A finished run of two steps, as far as it is read."""
    step = {"step": 1, "loss": 0.1, "grad_norm": 0.5, "time_s": 1.0, "train_s": 0.5, "tokens_trained": 100}
    step |= {"gen_tokens_per_s": 10.0, "publish_s": 0.25, "reward_mean": 0.5}
    step |= {f"parity_{kind}_abs_logprob_diff": 1e-6 for kind in ("mean", "p99", "max")}
    folder.mkdir(parents=True)
    rows = [step | first, step | {"step": 2, "time_s": 3.0, "parity_mean_abs_logprob_diff": None}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    samples = [{"text": text, "tokens": len(text), "spans": []} for text in texts]
    (folder / "samples.jsonl").write_text(json.dumps({"step": 1, "group": "a", "samples": samples}) + "\n")
    (folder / "summary.json").write_text(json.dumps({"status": "done"}))
    return folder


@pytest.mark.parametrize(
    ("mine", "found", "problem"),
    [
        ({}, "2 of 2 samples are those of other, the gradient norm differs by 0.0e+00", ""),
        ({"grad_norm": 0.51}, "2 of 2 samples are those of other, the gradient norm differs by 2.0e-02", "0.02"),
        ({"grad_norm": None}, "2 of 2 samples are those of other, the gradient norm differs by nan", "nan"),
        ({"grad_norm": 9, "texts": ("1", "3")}, "1 of 2 samples are those of other: gradients not compared", ""),
        ({"grad_norm": 9, "texts": ("1",)}, "1 of 1 samples are those of other: gradients not compared", ""),
    ],
)
def test_gradients_are_compared_where_all_samples_are_the_same(
    tmp_path: Path, mine: dict[str, Any], found: str, problem: str
) -> None:
    """Seen failing with gradients compared whatever the samples are, and with a comparison that NaN passes."""
    own, other = write_run(tmp_path / "own", **mine), write_run(tmp_path / "other")
    figures = figures_of(own) | compared(own, other, like="other") | {"like": "other"}
    assert figures["compared"] == found
    (said,) = problems_of(figures, Config()) or [""]
    assert said.endswith(f"got a relative difference of {problem}" if problem else "")


def test_a_run_is_not_compared_with_one_that_has_not_ended(tmp_path: Path) -> None:
    """Seen failing with the summary not read: a run that did not start passed."""
    said = {"compared": "not compared: float32/run has not ended"}
    assert compared(write_run(tmp_path / "own"), tmp_path / "other", like="float32/run") == said
    assert figures_of(tmp_path / "other")["steps"] == 0
    problems = problems_of(figures_of(tmp_path / "other"), Config())
    assert problems == [
        f"engine and rank must agree within {limit} nats ({kind}), got None"
        for kind, limit in (("mean", "0.003"), ("p99", "0.021"))
    ]


def test_the_table_names_functions_that_exist_and_runs_that_come_before() -> None:
    """Seen failing with a part moved in front of the one that it is `like`."""
    import pkgutil

    seen = set[str]()
    for name, part in table().parts.items():
        assert callable(pkgutil.resolve_name(part.call))
        seen |= {f"{name}/{run}" for run in part.runs}
        assert part.like is None or part.like in seen
        assert {"cuda"} <= part.planned_s.keys() <= {"cuda", "cpu"}
        limits = table().limit_s | part.limit_s
        assert all(planned <= limits[device] for device, planned in part.planned_s.items())


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_run_of_the_table_is_a_recipe(tmp_path: Path, device: str) -> None:
    """On GPUs too: nothing here needs one. Seen failing with `weights.transport: gloo` on GPUs."""
    for name, part in table().parts.items():
        job = Job(name=name, part=part, device=device, out=str(tmp_path))
        if part.call.endswith(("runs", "large", "dead_engine", "step")) and device in part.planned_s:
            for run in part.runs:
                config = job.config(run)
                assert config.run.device == device
                limit_s = (table().limit_s | part.limit_s)[device]
                assert device == "cpu" or config.run.start_timeout_s < limit_s


def test_idle_is_what_no_interval_covers() -> None:
    """Seen failing with gaps between neighbours in the order of their starts, whatever an earlier one covers."""
    assert idle_share([(0, 10), (1, 2), (3, 4)]) == 0
    assert idle_share([(6, 10), (0, 4), (1, 2)]) == 0.2


def check_on_a_cpu(out: Path, *names: str) -> dict[str, dict[str, Any]]:
    """Type the check with these parts, of a smaller model; return the figures of each."""
    command = [sys.executable, *f"-m areal_lite.launch.commands.main bench gpu-check --cpu --out {out}".split()]
    words = [*(f"--only={name}" for name in names), "model.warm_start.hidden_size=64", "model.warm_start.num_layers=1"]
    done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=1800, check=False)
    rows = json.loads((out / "results.json").read_text())["rows"]
    assert done.returncode == 0, done.stdout + done.stderr + json.dumps(rows)
    return {row["name"]: row["figures"] for row in rows if "figures" in row}


@pytest.mark.slow
def test_parts_without_an_engine_run_on_a_cpu(tmp_path: Path) -> None:
    """A step has 8 rows of 64 tokens; bfloat16 rounds logits near 1 by 0.004 at most, whichever way reads them.

    Seen failing with the tokens of completions alone (480), and with `fused` of other tokens.
    """
    figures = check_on_a_cpu(tmp_path, "step", "logprobs")
    assert [figures["step"][kind]["tokens"] for kind in ("kept", "recomputed")] == [512, 512]
    assert max(found["difference"] for found in figures["logprobs"].values()) < 0.02


@pytest.mark.loop
@pytest.mark.usefixtures("copied")
def test_the_loop_of_a_large_model_runs_on_a_cpu(tmp_path: Path) -> None:
    """Seen failing with the callback of `large` among the settings of the run: it passed, and had measured nothing."""
    figures = check_on_a_cpu(tmp_path, "large")
    assert figures["large"]["run"]["steps"] == 4
    assert figures["large"]["handover_gb_s"] > 0


@pytest.mark.loop
def test_an_engine_killed_in_a_hand_over_is_replaced_on_a_cpu(tmp_path: Path) -> None:
    figures = check_on_a_cpu(tmp_path, "dead-engine")
    assert (figures["dead-engine"]["killed"], figures["dead-engine"]["restarts"]) == (1, 1)
