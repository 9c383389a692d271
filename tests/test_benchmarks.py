"""The scripts in benchmarks/: each measures for real, very briefly, and its rows fill its table."""

import itertools
import json
import multiprocessing
import subprocess
import sys
from pathlib import Path
from typing import Any

import bench_agents
import bench_handover
import bench_peers
import bench_rollout
import bench_train
import measuring
import one_engine
import peers_trl
import pytest
import ray
import torch
from loop_builders import loop_config, write_recipe
from places import ROOT
from rank_processes import PRELOADED
from scripted_engine import ScriptedEngine
from train_builders import save_tiny_model
from transformers import AutoModelForCausalLM

from areal_lite.data.encode import load_tokenizer
from areal_lite.errors import ConfigError, TrainerError
from areal_lite.record.columns import cells
from areal_lite.record.report import write_bench

for module in (one_engine, bench_rollout, bench_handover):  # scripts, which Ray's workers cannot import here
    ray.cloudpickle.register_pickle_by_value(module)
SMALL = ["model.warm_start.steps=0", "model.warm_start.hidden_size=64", "model.warm_start.num_layers=1"]


def shown(folder: Path, benchmark: str) -> list[list[str]]:
    """The rows of a table as the terminal shows them, of the file that the script left; its page has them too."""
    results = json.loads((folder / "results.json").read_text())
    assert results["columns"] == measuring.COLUMNS[benchmark]
    _, *rows = cells(results["columns"], results["rows"])
    page = write_bench(folder).read_text()
    assert all(f"<td>{row[0].splitlines()[0]}" in page for row in rows)
    return list(rows)


@pytest.mark.loop
def test_the_queue_carries_groups_by_every_carrier(tmp_path: Path) -> None:
    """As it is typed. Seen failing with a column that names another key."""
    words = ["--repeats", "1", "--seconds", "0.1", "--tokens", "5", "--clients", "3", "--out", str(tmp_path)]
    command = [sys.executable, ROOT / "benchmarks/bench_queue.py", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = shown(tmp_path, "queue")
    assert row[0] == "8 x 5, 3"
    assert all(float(rate) > 0 for rate in row[1:])


@pytest.mark.loop
def test_a_rollout_worker_is_measured_beside_vllm_alone(ray_cluster: None, loop_folder: Path, tmp_path: Path) -> None:
    """A millisecond each. Seen failing where a measurement did not last until a token was counted."""
    recipe = write_recipe(tmp_path / "tiny.yaml", loop_config(loop_folder, run={}, weights={"transport": "gloo"}))
    words = [str(recipe), "rollout.max_new_tokens=64"]
    bench_rollout.main(words, repeats=1, seconds=0.001, warm=0.0, every=0.05, out=tmp_path)
    rows = shown(tmp_path, "rollout")
    assert [row[0] for row in rows] == list(bench_rollout.CASES.values())
    assert all(float(row[1]) > 0 for row in rows)
    assert [row[2] != "-" for row in rows] == [False, False, True, True]


@pytest.mark.loop
def test_hand_overs_of_a_real_engine_are_measured(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every part took some time, and those of the pause fit into it. Seen failing with the pause counted from the start
    of the hand-over.
    """
    monkeypatch.setattr(bench_handover, "WARM", 0)
    monkeypatch.setattr(bench_handover, "BETWEEN_S", 0.05)
    bench_handover.main(["64x2"], repeats=2, requests=4, out=tmp_path)
    (line,) = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert line["size_bytes"] == 4 * line["parameters"] > 0
    for staging, pausing, loading, resuming, paused in zip(*(line[part] for part in bench_handover.PARTS), strict=True):
        assert min(staging, pausing, loading, resuming) > 0
        assert pausing + loading + resuming <= paused
    assert shown(tmp_path, "handover")[0][0].startswith("64x2, ")


@pytest.mark.slow
def test_the_trainer_and_the_padded_loop_compute_the_same_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In processes of their own. Seen failing with the padded loop's mask left out: the script stops with an error."""
    monkeypatch.chdir(tmp_path)
    forks = multiprocessing.get_context("forkserver")  # seven processes that need not import torch again
    forks.set_forkserver_preload(PRELOADED)
    monkeypatch.setattr(bench_train.multiprocessing, "get_context", lambda *_: forks)
    words = ["longtail_cpu", *SMALL, "rollout.max_new_tokens=32", "rollout.workflow_arguments.median=8"]
    bench_train.main(
        [*words, "queue.groups_per_step=2", "queue.samples_per_group=4"], repeats=1, steps=1, rows=2, out=tmp_path
    )
    assert [row[0].split(",")[0] for row in shown(tmp_path, "train")] == ["areal-lite", "padded", "fastest"] * 2
    steps = {"areal-lite": bench_train.Step(1.0, 100, 100, 2.0), "padded": bench_train.Step(1.0, 100, 100, 2.004)}
    with pytest.raises(TrainerError, match="do not compute the same"):
        bench_train.run_steps(steps, lambda side, _: steps[side], repeats=1, steps=1)
    with pytest.raises(ConfigError, match=r"trainer\.ranks=1, got 2"):
        bench_train.main(["longtail_cpu", "trainer.ranks=2"], out=tmp_path)


@pytest.mark.slow
def test_agents_and_the_workflow_hold_the_same_dialogue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the engine. Seen failing with an agent that leaves out the environment's character."""
    asked: list[set[tuple[int, int]]] = [set()]

    class Engine(ScriptedEngine):
        async def generate(self, prompt_ids: Any, sampling: Any) -> Any:
            asked[-1].add((self.tokenizer.decode(prompt_ids).count("?"), sampling.max_new_tokens))
            return await super().generate(prompt_ids, sampling)

        async def reset(self) -> None:  # behind each case
            asked.append(set())

    async def start(config: Any, *, model_folder: str) -> Engine:
        return Engine(token_s=0.001, eos_id=-1, tokenizer=load_tokenizer(model_folder, config.model))

    monkeypatch.setattr(bench_agents.VllmEngine, "start", start)
    monkeypatch.setattr(bench_agents, "WARM_S", 0.1)
    monkeypatch.chdir(tmp_path)
    bench_agents.main(SMALL, repeats=1, seconds=0.2, out=tmp_path)
    rows = shown(tmp_path, "agents")
    assert [(row[0], float(row[1])) for row in rows] == bench_agents.CASES
    assert all(float(row[2]) > 0 for row in rows)
    turns = {(number, bench_agents.TURN_TOKENS) for number in (1, 2, 3)}  # the prompt ends in a question mark too
    assert asked == [*[turns] * len(rows), set()]


def test_trl_and_ours_are_compared_by_the_same_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins train: ours takes 0.5 s a step, TRL 1 s.

    Seen failing with ours over TRL's time, and with a traceback for two recipes.
    """
    grpo: list[dict[str, Any]] = []

    def learn(step_s: float, steps: int) -> peers_trl.Learning:
        return peers_trl.Learning(seconds=tuple(itertools.accumulate([step_s] * steps)), tokens=(30.0,) * steps)

    def ours(_runs: Any, config: Any, _folder: Path) -> peers_trl.Learning:
        assert (config.trainer.minibatches, config.objective.proximal) == (1, "reuse")
        return learn(0.5, config.run.steps)

    def theirs(settings: dict[str, Any], **_: Any) -> peers_trl.Learning:
        grpo.append(settings["grpo"])
        return learn(1.0, settings["grpo"]["max_steps"])

    monkeypatch.setattr(bench_peers, "ensure_trl", lambda cache, say: tmp_path)
    monkeypatch.setattr(bench_peers, "run_trl", theirs)
    monkeypatch.setattr(bench_peers.Runs, "run_ours", ours)
    monkeypatch.chdir(tmp_path)
    bench_peers.main(SMALL, repeats=2, steps=20, out=tmp_path)
    assert {each["per_device_train_batch_size"] * each["gradient_accumulation_steps"] for each in grpo} == {128}
    assert [row[-1] for row in shown(tmp_path, "peers speed")] == ["2.00", "2.00", "1.00"]
    bench_peers.main(["longtail_cpu", *SMALL], size="64x1", repeats=1, steps=12, out=tmp_path)
    assert [row[-1] for row in shown(tmp_path, "peers speed")] == ["2.00", "2.00", "1.00"]
    with pytest.raises(ConfigError, match=r"compares recipes with"):
        bench_peers.main(["mixed_cpu"], out=tmp_path)
    with pytest.raises(ConfigError, match=r"expected one recipe, got arith_cpu, longtail_cpu"):
        bench_peers.main(["arith_cpu", "longtail_cpu"], out=tmp_path)


def test_generate_ends_every_row_at_its_length_and_no_sooner(tmp_path: Path) -> None:
    """Two calls of a model that would end anywhere. Seen failing with the end allowed before, and one token late."""
    model = AutoModelForCausalLM.from_pretrained(save_tiny_model(tmp_path), dtype=torch.float32)
    lengths, end = [3, 1, 7, 2, 5, 2], 1
    processor = peers_trl.end_rows_at(iter(lengths), end=end)
    found = []
    for prompt_BP in (torch.full((4, 6), 5), torch.full((2, 3), 5)):
        out_BT = model.generate(
            prompt_BP, attention_mask=torch.ones_like(prompt_BP), logits_processor=[processor(prompt_BP)],
            do_sample=True, max_new_tokens=9, eos_token_id=end, pad_token_id=0,
        )  # fmt: skip
        found += [row.tolist().index(end) + 1 for row in out_BT[:, prompt_BP.shape[1] :]]
    assert found == lengths
