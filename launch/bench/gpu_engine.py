"""The parts of `bench gpu-check` that run the whole loop: runs that `areal-lite train` could do, and what they show.

All are short, with fixed seeds. At eta 0 the first step's samples are those of every run of the same model and dtype,
as far as the engine computes the same numbers in every batch; only where they are, gradients are compared.
"""

import math
import os
import statistics
import threading
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil

from areal_lite.config.recipe import PARITY_LIMITS, PARITY_P99, Config
from areal_lite.errors import TrainerError
from areal_lite.launch.bench.gpu_part import Job, read_figures
from areal_lite.launch.bench.harness import training
from areal_lite.launch.run import online
from areal_lite.record.run_files import read_rows, read_summary
from areal_lite.weights.handover import hand_over

GRADIENT_LIMITS = {"float32": 1e-3, "bfloat16": 0.1}
"""Relative difference of the gradient norms of two first steps with the same samples."""
_KILLED_AT = 5
"""The version in whose hand-over the engine dies: by then cuBLAS has allocated the workspaces that it keeps."""
_CORE = "EngineCor"
"""In the name of vLLM's engine core, of which Linux keeps 15 characters."""
_KILLED_AFTER_S = 0.01
"""From the first byte that is sent."""


def any_reward(prompt: str, completion: str, answer: str, **row: Any) -> float:
    """Return a number between 0 and 1 that is the completion's own: gradients need no model that knows anything."""
    return zlib.crc32(completion.encode()) % 101 / 100


def runs(job: Job) -> None:
    """Train the runs of a part, one after another in one Ray session, and judge each as it ends."""
    problems = list[str]()
    with training() as train_one:
        for name in job.part.runs:
            config, folder = job.config(name), job.folder / name
            train_one(config, dir=str(folder))
            figures = figures_of(folder) | _beside_another(job, name, config)
            problems += [f"{name}: {problem}" for problem in problems_of(figures, config)]
            job.report(**{name: figures}, problems=problems)


def large(job: Job) -> None:
    """Train the random model, and leave at the last row: a checkpoint of 20 GB would take longer than all else."""
    from areal_lite.launch.bench.gpu_trainer import random_model

    random_model(job)
    config, folder = job.config("run"), job.folder / "run"

    def leave(row: Mapping[str, Any]) -> None:
        if row["step"] < config.run.steps - 1:
            return
        weights = Path(config.model.path).glob("*.safetensors")
        figures, size_gb = figures_of(folder), sum(file.stat().st_size for file in weights) / 1e9
        copy_gb_s = read_figures(Path(job.out) / "machine").get("copy_gb_s")
        copy = "not compared with a copy, which was not measured"
        if copy_gb_s is not None:
            copy = f"a copy on the device would take {size_gb / copy_gb_s:.3f} s"
        job.report(run=figures, problems=problems_of(figures, config))
        job.report(handover_gb=size_gb, handover_gb_s=size_gb / figures["publish_s"], copy=copy)
        os._exit(0)  # those who are left are ended with this part

    with training() as train_one:
        train_one(config, dir=str(folder), on_step=leave)
    raise TrainerError(f"the run must reach step {config.run.steps - 1}, it ended before")


def dead_engine(job: Job) -> None:
    """Kill the engine while it receives weights; the run must continue with its successor, and lose no memory."""

    def with_a_death(*engines: Any, publish: Callable[[], Any], version: int, **more: Any) -> None:
        def dying() -> Any:
            if version == _KILLED_AT and not read_figures(job.folder).get("killed"):
                cores = [one for one in psutil.Process().children(recursive=True) if _CORE in _words_of(one)]
                threading.Timer(_KILLED_AFTER_S, lambda: [one.kill() for one in cores]).start()
                job.report(killed=len(cores))
            return publish()

        hand_over(*engines, publish=dying, version=version, **more)

    with patch.object(online, "hand_over", with_a_death):
        runs(job)
    folder, found = job.folder / "run", read_figures(job.folder)
    events, _ = read_rows(folder / "events.jsonl")
    back = sum(event["kind"] == "rejoined" for event in events)
    memory = [row.get("gpu_rest_gib") for row in read_rows(folder / "metrics.jsonl")[0]]
    before, after = memory[_KILLED_AT - 2], memory[-1]
    problems = [*found["problems"], *(["an engine had to be killed and replaced, none was"] if not back else [])]
    if before is not None and after > before * 1.01:
        problems.append(f"the rank must hold no more memory than before, {before:.3f} GiB, got {after:.3f}")
    job.report(restarts=back, memory=f"{before}, {after} GiB" if before is not None else "-", problems=problems)


def _words_of(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join([process.name(), *process.cmdline()])
    return ""


def figures_of(folder: Path) -> dict[str, Any]:
    """Return what a run's rows show: parity, the first step, rates of the steps behind it, and memory."""
    rows, _ = read_rows(folder / "metrics.jsonl")
    later = rows[1:]
    figures: dict[str, Any] = {"steps": len(rows), "status": read_summary(folder).get("status")}
    for kind in ("mean", "p99", "max"):
        known = [row.get(f"parity_{kind}_abs_logprob_diff") for row in rows]
        figures[f"parity_{kind}"] = max((value for value in known if value is not None), default=None)
    if later:
        figures |= {
            "loss": rows[0]["loss"],
            "grad_norm": rows[0]["grad_norm"],
            "step_s": (rows[-1]["time_s"] - rows[0]["time_s"]) / len(later),
            "trained_per_s": sum(row["tokens_trained"] for row in later) / sum(row["train_s"] for row in later),
            "gen_tokens_per_s": statistics.median(row["gen_tokens_per_s"] for row in later),
            "publish_s": statistics.median(row["publish_s"] for row in later),
            "reward_first": statistics.mean(row["reward_mean"] for row in rows[:5]),
            "reward_last": statistics.mean(row["reward_mean"] for row in rows[-5:]),
            "gpu_peak_gib": max(row.get("gpu_peak_gib") or 0 for row in rows) or None,
        }
    return figures


def problems_of(figures: Mapping[str, Any], config: Config) -> list[str]:
    """Return what of a run is not as it must be; a figure that is no number is not."""
    problems, limit = [], PARITY_LIMITS[config.compute_dtype]
    for kind, most in {"mean": limit, "p99": PARITY_P99 * limit}.items():
        if (parity := figures[f"parity_{kind}"]) is None or not parity <= most:
            problems.append(f"engine and rank must agree within {most:g} nats ({kind}), got {parity}")
    difference, limit = figures.get("grad_difference"), GRADIENT_LIMITS[config.compute_dtype]
    if difference is not None and not difference <= limit:
        problems.append(
            f"with the same samples the first step's gradient norm must be that of {figures['like']} within {limit:g}, "
            f"got a relative difference of {difference:.2g}"
        )
    return problems


def _beside_another(job: Job, name: str, config: Config) -> dict[str, Any]:
    like = job.part.like
    if like is None or like == f"{job.name}/{name}":
        return {"compared": "compared with no other run"}
    return {"like": like, **compared(job.folder / name, Path(job.out) / like, like=like)}


def compared(folder: Path, other: Path, *, like: str) -> dict[str, Any]:
    """Compare the first step of two runs: their samples, and where all are the same, the gradient norms."""
    if read_summary(other).get("status") != "done":
        return {"compared": f"not compared: {like} has not ended"}
    (mine, my_norm), (theirs, their_norm) = map(_first_step, (folder, other))
    same = sum(mine[key] == theirs.get(key) for key in mine)
    found = f"{same} of {len(mine)} samples are those of {like}"
    if same < max(len(mine), len(theirs)):
        return {"compared": f"{found}: gradients not compared"}
    difference = abs(my_norm / their_norm - 1) if my_norm and their_norm else math.nan
    return {"compared": f"{found}, the gradient norm differs by {difference:.1e}", "grad_difference": difference}


def _first_step(folder: Path) -> tuple[dict[tuple[str, int], Any], float | None]:
    """Return text and length of each sample of the first step, and the gradient norm."""
    groups = [group for group in read_rows(folder / "samples.jsonl")[0] if group["step"] == 1]
    samples = {
        (group["group"], place): (sample["text"], sample["tokens"])
        for group in groups
        for place, sample in enumerate(group["samples"])
    }
    return samples, read_rows(folder / "metrics.jsonl")[0][0]["grad_norm"]
