"""The first hour on GPUs, in its form for a CPU."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from areal_lite.launch.bench.gpu_check import PARTS, judged


def write_run(folder: Path, **first: Any) -> tuple[str, Path]:
    """A finished run of two steps, as far as it is read."""
    step = {"loss": 0.1, "grad_norm": 0.5, "time_s": 1.0, "train_s": 0.5, "tokens_trained": 100}
    step |= {"gen_tokens_per_s": 10.0, "parity_max_abs_logprob_diff": 1e-6}
    folder.mkdir(parents=True)
    rows = [step | first, step | {"time_s": 3.0, "parity_max_abs_logprob_diff": None}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "summary.json").write_text(json.dumps({"status": "done"}))
    return folder.name, folder


@pytest.mark.parametrize(
    ("name", "first", "outcome"),
    [
        ("two-ranks", {}, "passed"),
        ("two-ranks", {"grad_norm": 0.51}, "failed: the first step's gradient norm must be that of float32, 0.5, got"),
        ("two-ranks", {"grad_norm": float("nan")}, "failed: the first step's gradient norm"),
        ("bfloat16", {"parity_max_abs_logprob_diff": 0.05}, "passed"),
        (
            "bfloat16",
            {"parity_max_abs_logprob_diff": 0.2},
            "failed: engine and rank must agree within 0.1 nats, got 0.2",
        ),
        ("wide-engine", {"parity_max_abs_logprob_diff": float("nan")}, "failed: engine and rank must agree"),
    ],
)
def test_a_part_passes_by_parity_and_by_the_first_step_of_another(
    tmp_path: Path, name: str, first: dict[str, Any], outcome: str
) -> None:
    """Seen failing with comparisons that a NaN passes."""
    rows = judged([write_run(tmp_path / "float32"), write_run(tmp_path / name, **first)])
    assert rows[0]["outcome"] == "passed"
    assert rows[1]["outcome"].startswith(outcome)
    assert (rows[1]["step_s"], rows[1]["trained_per_s"]) == (2.0, 200.0)


def test_a_run_that_did_not_end_is_named(tmp_path: Path) -> None:
    (row,) = judged([("float32", tmp_path / "float32")])
    assert row["outcome"].startswith("failed: it has not ended")


def test_every_part_repeats_one_that_is_run_before() -> None:
    names = list(PARTS)
    assert all(names.index(part.like) < names.index(name) for name, part in PARTS.items() if part.like)


@pytest.mark.loop
def test_the_check_runs_on_a_cpu(tmp_path: Path) -> None:
    """Two trainer ranks do the first step that one does, and the page to send says so."""
    command = [str(Path(sys.executable).with_name("areal-lite")), "bench", "gpu-check", "--cpu", "--out", str(tmp_path)]
    small = ["model.warm_start.hidden_size=64", "model.warm_start.num_layers=1", "data.eval_size=8"]
    only = ["--only", "float32", "--only", "two-ranks"]
    done = subprocess.run([*command, *only, *small], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["name"]: row for row in json.loads((tmp_path / "results.json").read_text())["rows"]}
    assert {name: row["outcome"] for name, row in rows.items()} == {"float32": "passed", "two-ranks": "passed"}
    assert rows["float32"]["grad_norm"] > 0
    page = (tmp_path / "gpu-check.md").read_text()
    assert "two-ranks: FSDP over two ranks" in page
