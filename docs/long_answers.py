"""Simulates how the policies of `queue.on_stale` treat long answers; writes docs/long-answers.json.

    python docs/long_answers.py && python docs/tables.py        about a minute

One engine (`launch/bench/simulation.py`) decodes one token of each running sample in `1 + n / half` units of time: with
`half` samples running each is half as fast as one alone. A batch is trained in the time that the engine takes to decode
one with full slots. Scoring and publications take no time.
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

from areal_lite.launch.bench.harness import surroundings
from areal_lite.launch.bench.simulation import Inputs, simulate
from areal_lite.sample_queue.ledger import LedgerSettings

CASES = [
    *((policy, ahead, ahead) for ahead in (1, 4) for policy in ("mask", "drop", "wait", "keep")),
    *((policy, eta, ahead) for eta, ahead in ((4, 1), (12, 4), (20, 4), (32, 4)) for policy in ("mask", "wait")),
]
"""Policy, `queue.max_staleness`, `queue.max_ahead`."""
STEPS, GROUPS, SAMPLES, SLOTS = 300, 8, 8, 64
MEDIAN = 64
"""Tokens of a sample."""
SCENES = {
    "memory-bound": {"half": 64.0, "sigma": 1.0, "longest": 2048},
    "compute-bound": {"half": 1.0, "sigma": 1.0, "longest": 2048},
    "heavy tail": {"half": 64.0, "sigma": 1.5, "longest": 8192},
}
"""A GPU whose batch is far from full; a CPU, where the time grows with the batch; and that GPU with longer answers."""


def figures(policy: str, eta: int, ahead: int, *, half: float, sigma: float, longest: float) -> dict[str, Any]:
    """Simulate one case in one scene; times are in units of a decoding step with nothing running."""
    mean = MEDIAN * math.exp(sigma**2 / 2)
    train_s = GROUPS * SAMPLES * mean * (1 + SLOTS / half) / SLOTS
    inputs = Inputs(
        slots=SLOTS, decode_s=1.0, decode_sample_s=1 / half, train_s=train_s,
        median=MEDIAN, sigma=sigma, longest=int(longest),
    )  # fmt: skip
    settings = LedgerSettings.model_validate({
        "max_staleness": eta, "max_ahead": ahead, "on_stale": policy, "total_steps": STEPS,
        "groups_per_step": GROUPS, "samples_per_group": SAMPLES,
    })  # fmt: skip
    found = simulate(inputs, settings)
    return {
        "groups_per_time": found["samples_per_s"] / SAMPLES,
        "shares": found["trained_by_length"],
        "ages": {"mean": found["age_mean"], "max": found["age_max"]},
        "over_bound": found["over_bound"],
    }


def main() -> None:
    """Simulate all policies, and write the figures."""
    rows = []
    for policy, eta, ahead in CASES:
        scenes = {name: figures(policy, eta, ahead, **scene) for name, scene in SCENES.items()}
        rows.append({"policy": policy, "eta": eta, "ahead": ahead, **scenes})
        speeds = "  ".join(f"{name} {1000 * of['groups_per_time']:.2f}" for name, of in scenes.items())
        print(f"{policy} {eta}, {ahead}: groups per 1,000 units of time: {speeds}", file=sys.stderr, flush=True)
    settings = {
        "steps": STEPS, "groups": GROUPS, "samples": SAMPLES, "slots": SLOTS, "median": MEDIAN, "scenes": SCENES
    }  # fmt: skip
    content = {**surroundings(), "settings": settings, "rows": rows}
    (Path(__file__).parent / "long-answers.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
