"""Checks `areal-lite simulate` against runs that were measured; writes docs/simulation.json.

    python docs/simulated.py                                            against published figures
    python docs/simulated.py runs/modes-arith_cpu runs/modes-...        also against these results of `bench modes`
    python docs/tables.py                                               then updates the tables of docs/simulate.md

Of each benchmark the simulation is calibrated on one run, the first synchronous one with a split of threads, and
predicts all other modes. Of a published sweep it gets one figure, the speed at eta 0, which scales all seconds alike.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from areal_lite.config.recipe import Config, load_config
from areal_lite.launch.bench.harness import surroundings
from areal_lite.launch.bench.modes_figures import MODES
from areal_lite.launch.bench.simulation import Inputs, simulate
from areal_lite.launch.bench.simulation_inputs import inputs_of_recipe, inputs_of_run
from areal_lite.record.run_folder import RunFolder
from areal_lite.sample_queue.ledger import LedgerSettings

OUT = Path(__file__).parent / "simulation.json"
CALIBRATED = "sync-split"
FIGURES = ("samples_per_s", "generator_idle", "trainer_idle")
NOT_SIMULATED = ("sync-colocated", "one-step-off", "drain-eta4")
"""Modes whose engines share the trainer's threads, or drain before a publication."""
SWEEP = {0: 27.1, 1: 47.8, 2: 47.8, 4: 49.0, 8: 51.5, 16: 52.0}
"""Thousand tokens/s by eta: AReaL (arXiv 2505.24298, table 7), 1.5B, 8k context, 8 GPUs."""
SWEEP_RECIPE = [
    "model.path=Qwen/Qwen2.5-1.5B", "model.max_context=8192", "rollout.max_new_tokens=7168", "rollout.slots=256",
    "queue.groups_per_step=32", "queue.samples_per_group=16", "queue.on_stale=keep",
]  # fmt: skip
"""Assumed: `gsm8k_1node`'s 6 engines and 2 ranks, this batch, log-normal lengths of median 1,792 and sigma 1."""
AGES = [
    (120, 240, 2, 0.63, 1.26), (240, 120, 2, 0.92, 3.59), (128, 128, 2, 1.07, 3.09),
    (240, 120, 1, 0.86, 3.40), (120, 120, 1, 0.67, 1.92), (128, 128, 1, 1.14, 2.01),
]  # fmt: skip
"""Samples in flight, samples a step, batches queued, load (speed of generation over that of training), mean age."""


def simulated(inputs: Inputs, config: Config, **queue: Any) -> dict[str, Any]:
    """Simulate a recipe with changes of its queue."""
    settings = config.queue.model_dump() | {"max_ahead": None} | queue
    return dict(simulate(inputs, LedgerSettings(**settings, total_steps=config.run.steps)))


def sweep() -> list[dict[str, Any]]:
    """Simulate the published sweep over eta; speeds are relative to eta 0, so that its scale cancels out."""
    config = load_config("gsm8k_1node", [*SWEEP_RECIPE, "run.steps=60"])
    inputs = inputs_of_recipe(config, gpu="H100")
    found = {eta: simulated(inputs, config, max_staleness=eta)["trained_tokens_per_s"] for eta in SWEEP}
    return [
        {"eta": eta, "published": SWEEP[eta] / SWEEP[0], "simulated": found[eta] / found[0], "tokens_per_s": SWEEP[eta]}
        for eta in SWEEP
    ]


def ages() -> list[dict[str, Any]]:
    """Simulate published mean ages; a sample's is taken as that of its first token, as versions are noted per sample.

    Assumed: log-normal lengths of sigma 0.6, equal seconds per token; the pipeline is what is in flight and queued.
    """
    rows = []
    for in_flight, batch, queued, load, published in AGES:
        inputs = Inputs(slots=in_flight, decode_s=0.01, median=1000, sigma=0.6, longest=8192)
        mean_length = float(next(inputs.draw(np.random.default_rng(0))).mean())
        train_s = load * batch * mean_length * inputs.decode_s / in_flight
        ahead = round(in_flight / batch + queued)
        settings = LedgerSettings(
            max_staleness=ahead, on_stale="keep", groups_per_step=batch, samples_per_group=1, total_steps=200
        )
        found = simulate(inputs.model_copy(update={"train_s": train_s}), settings)
        rows.append({
            "in_flight": in_flight, "batch": batch, "queued": queued, "load": load, "max_ahead": ahead,
            "published": published, "simulated": found["first_token_age_mean"],
        })  # fmt: skip
    return rows


def modes(folder: Path) -> list[dict[str, Any]]:
    """Predict the modes of a benchmark from one run of it; a row per mode, measured beside simulated."""
    results = json.loads((folder / "results.json").read_text())
    inputs, _ = inputs_of_run(folder / f"{CALIBRATED}_0")
    rows = []
    for mode in results["modes"]:
        if (name := mode["mode"]) in NOT_SIMULATED:
            continue
        config = RunFolder(folder / f"{name}_0").recipe()
        assert isinstance(config, Config)
        found = simulated(inputs, config, max_staleness=MODES[name].eta)
        rows.append({
            "recipe": Path(results["recipe"]).stem, "mode": name, "repeats": mode["repeats"],
            "measured": {figure: mode["figures"][figure] for figure in FIGURES},
            "simulated": {figure: found[figure] for figure in FIGURES},
            "off": found["samples_per_s"] / mode["figures"]["samples_per_s"]["median"] - 1,
        })  # fmt: skip
    return rows


def main(folders: list[str]) -> None:
    """Simulate everything, and write it; without folders the rows of earlier benchmarks stay."""
    before = json.loads(OUT.read_text()) if OUT.exists() else {}
    runs = [row for folder in folders for row in modes(Path(folder))] or before.get("runs", [])
    content = {**surroundings(), "sweep": sweep(), "ages": ages(), "runs": runs}
    OUT.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
