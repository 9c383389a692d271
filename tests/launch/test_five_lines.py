"""A new user's first hour: five lines in a file of their own, and a run that learns from them.

Nothing of the package is touched: the folder is a temporary one, and the command is the installed one.
"""

import json
import math
from pathlib import Path

import pytest
from pages import blocks
from user_run import UserRun, adopting_orphans

from areal_lite.config.plugins import find_function

SMALL = (
    "run.steps=3 run.log_samples=4 run.eval_every=0 run.checkpoint_every=0 model.warm_start.steps=60 "
    "model.warm_start.carelessness=0.5 data.arith.train_size=64 data.arith.eval_size=4 data.arith.min_terms=2 "
    "data.arith.max_terms=2 data.arith.max_value=9 rollout.slots=16 rollout.kv_cache_mb=64 "
    "queue.groups_per_step=4 queue.samples_per_group=4 weights.parity_every=0"
)  # fmt: skip


@pytest.mark.loop
def test_the_five_lines_of_the_page_train(tmp_path: Path) -> None:
    """Every reward of the run is what the five lines say about its sample; with `log_samples` all groups are there.

    Seen failing with rewards turned around on their way out of the verifiers.
    """
    (page, *_) = blocks("verifiers.md", "python")
    lines = [line for line in page.text.splitlines() if line and not line.startswith("#")]
    assert len(lines) <= 5
    (tmp_path / "my_verifier.py").write_text(page.text)

    command = f"areal-lite train arith_cpu verifier.function=my_verifier.py:verify run.dir=first {SMALL}"
    with adopting_orphans(), UserRun(command.split(), run_folder=tmp_path / "first") as run:
        assert run.exit_code() == 0, run.output
        assert run.leftovers == []
    assert (run.folder.path / "report.html").stat().st_size > 0
    assert "report: " in run.output.strip().splitlines()[-1]

    verify = find_function(f"{tmp_path / 'my_verifier.py'}:verify", kind="verifier")
    rewards: dict[int, list[float]] = {}
    for group in run.folder.read("samples.jsonl"):
        for sample in group["samples"]:
            expected = verify(group["prompt"], sample["text"], group["answer"])
            assert sample["reward"] == expected, (group["prompt"], sample)
            rewards.setdefault(group["step"], []).append(expected)
    means = {row["step"]: row["reward_mean"] for row in run.folder.read("metrics.jsonl")}
    assert means.keys() == rewards.keys() == {1, 2, 3}
    for step, found in rewards.items():
        assert len(found) == 4 * 4
        assert math.isclose(means[step], sum(found) / len(found), abs_tol=1e-6)
    assert {0.0, 1.0} == {reward for found in rewards.values() for reward in found}
    config = json.loads((run.folder.path / "config.json").read_text())
    assert config["verifier"]["function"] == f"{tmp_path / 'my_verifier.py'}:verify"
