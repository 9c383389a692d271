"""Gaming a learned reward: a reward model from few noisy pairs, RL against it with and without KL, the truth watched.

    python examples/reward_watch/gaming.py

The figures are in docs/rlhf.md. It runs in the present folder; the policy is the demo's.
"""

import argparse
import json
import math
import os
import platform
import random
import time
from pathlib import Path
from typing import Any

import areal_lite
from areal_lite.config.data import ArithConfig
from areal_lite.data.arith import preference_pairs

TASK = {"min_terms": 3, "max_terms": 5, "max_value": 9, "minus_share": 0.2}
PAIRS, SWAPPED = 64, 0.25
"""Pairs of a right and a careless solution, and the share of them whose order is wrong."""
PENALTIES = {"without KL": 1e-9, "with KL": 0.1}
"""Weights of the KL to the initial policy; the first is small enough to measure it alone."""
PATIENCE = {
    "run.start_timeout_s": 1800, "run.stall_timeout_s": 900, "weights.timeout_s": 300, "queue.lease_timeout_s": 120,
}  # fmt: skip
"""Time limits for a machine that does much else."""


def write_pairs(path: Path, *, seed: int) -> None:
    """Write noisy preference pairs."""
    rng = random.Random(seed)
    pairs = preference_pairs(ArithConfig(**TASK), "train", carelessness=0.6)[:PAIRS]
    with path.open("w") as file:
        for prompt, *solutions in pairs:
            chosen, rejected = reversed(solutions) if rng.random() < SWAPPED else solutions
            file.write(json.dumps({"prompt": prompt, "chosen": chosen, "rejected": rejected}) + "\n")


def train_reward_model(pairs: Path, folder: Path, *, seed: int) -> None:
    """Train a reward model on all pairs, from the policy that it will judge."""
    areal_lite.run("rlhf_reward_model", {
        "run.dir": str(folder), "run.seed": seed, "run.steps": 60, "run.eval_every": 0,
        "model.path": "builtin:arith", "model.warm_start": {"steps": 400, "carelessness": 0.6},
        "data": {"source": "jsonl", "path": str(pairs), "eval_fraction": 0, "arith": TASK},
        "trainer.batch_size": 32,
    })  # fmt: skip


def train_policy(reward_model: Path, folder: Path, *, kl_coef: float, seed: int, steps: int) -> areal_lite.Run:
    """Train the demo's policy on the learned reward, and watch the true one."""
    return areal_lite.run("arith_cpu", {
        "run.dir": str(folder), "run.seed": seed, "run.steps": steps, "run.eval_every": 8, "run.log_samples": 8,
        "data.arith.eval_size": 128, "queue.max_staleness": 2, "queue.groups_per_step": 8, "rollout.slots": 128,
        "trainer.lr": 2e-4,
        "verifier": {"function": "reward_model", "arguments": {"model": str(reward_model)}, "timeout_s": 60},
        "objective": {"kl": "loss", "kl_estimator": "k3", "kl_coef": kl_coef},
        **PATIENCE,
        "reward_watch": {"verifiers": {"truth": {"function": "last_number", "timeout_s": 60}}, "share": 1.0},
    })  # fmt: skip


def figures_of(run: areal_lite.Run) -> dict[str, Any]:
    """Return a row per evaluation, and what the watch found: the first warning of the run, if there is one."""
    events = [json.loads(line) for line in (run.path / "events.jsonl").read_text().splitlines()]
    trained = {row["step"]: row for row in run.metrics}
    rows = []
    for event in events:
        if event["kind"] == "eval":
            row = trained.get(event["step"], {})  # before the first step there is none
            rows.append({
                "step": event["step"], "reward": event["accuracy"], "truth": event["metrics"]["watch/truth"],
                "root_kl": math.sqrt(max(row.get("kl_ref", 0.0) * row.get("length_mean", 0.0), 0.0)),
                "entropy": row.get("entropy"), "length": row.get("length_mean"),
            })  # fmt: skip
    named = ("best_step", "step", "text")
    warning = next((event for event in events if event["kind"] == "warning" and "verifier" in event), None)
    return {"rows": rows, "warning": warning and {name: warning[name] for name in named}}


def main() -> None:
    """Train the reward model and both policies, and write their figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("reward-watch.json"))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    words, start = parser.parse_args(), time.monotonic()
    folder = Path(f"runs/gaming-{time.strftime('%Y%m%d-%H%M%S')}").resolve()
    folder.mkdir(parents=True)
    write_pairs(folder / "pairs.jsonl", seed=words.seed)
    train_reward_model(folder / "pairs.jsonl", folder / "reward-model", seed=words.seed)
    runs = {}
    for name, kl_coef in PENALTIES.items():
        place = folder / name.replace(" ", "-")
        run = train_policy(folder / "reward-model", place, kl_coef=kl_coef, seed=words.seed, steps=words.steps)
        runs[name] = {"kl_coef": kl_coef, **figures_of(run)}
    content = {
        "commit": run.summary["commit"], "source": run.summary["source"], "machine": platform.machine(),
        "cores": os.cpu_count(),
        "pairs": PAIRS, "swapped": SWAPPED, "seed": words.seed, "minutes": (time.monotonic() - start) / 60,
        "runs": runs,
    }  # fmt: skip
    words.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
