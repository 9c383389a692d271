"""The trainer on two real ranks (processes, gloo, FSDP2) against one rank on the same batch.

The two ranks get rows of very different lengths, so that they need different numbers of micro-batches and
hold different shares of the tokens.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_processes import run_ranks
from safetensors.torch import load_file
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor
from train_builders import VOCABULARY, make_config, make_rows, make_shard, save_tiny_model

from areal_lite.sample_queue.split import assign_rows
from areal_lite.train import chunked_logits
from areal_lite.train.trainer import Trainer
from areal_lite.types import Row

pytestmark = pytest.mark.slow

REWARDS = np.array([[1, 0, float("nan"), 1], [0, 0, 0, 1], [1, 1, 0, 1]], np.float32)
SEQUENCES = [((2, 3), (4, 5, 6)), ((7,), (8, 1))]
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "pieces": {"trainer": {"reduce_every": "update", "micro_batch_tokens": 20}},
    "bfloat16": {"model": {"compute_dtype": "bfloat16"}},
    "offload": {"trainer": {"offload": True}},
    "decay": {"trainer": {"weight_decay": 5.0}},
}
"""`pieces`, three tokens' logits at a time, and `offload`, which moves nothing on a CPU, are to be like `plain`."""


def batch_rows() -> list[Row]:
    return make_rows(old_tokens=2)


def rows_of_ranks(*, uneven: bool) -> list[list[Row]]:
    """Split as the sample queue does, or with one short row per minibatch on rank 0 and all others on rank 1."""
    rows = batch_rows()
    lengths = [len(row.prompt_token_ids) + row.sample.num_tokens for row in rows]
    minibatches, ranks = assign_rows(lengths, num_minibatches=2, num_ranks=2, seed=0)
    if uneven:
        minibatches = [row.minibatch for row in rows]
        first = [min((i for i in range(12) if minibatches[i] == m), key=lambda i: lengths[i]) for m in range(2)]
        ranks = [0 if index in first else 1 for index in range(12)]
    placed = [dataclasses.replace(row, minibatch=m) for row, m in zip(rows, minibatches, strict=True)]
    return [[row for row, of in zip(placed, ranks, strict=True) if of == rank] for rank in range(2)]


def train(rank: int, world_size: int, model_folder: str, out: str) -> None:
    """Train one step per variant and split, and write what came out."""
    reduced = []
    reduce = torch.distributed.reduce_scatter_single
    if world_size == 2:
        torch.distributed.reduce_scatter_single = lambda **call: reduced.append(call) or reduce(**call)
    for name, sections in VARIANTS.items():
        chunked_logits.CHUNK_ELEMENTS = 3 * VOCABULARY if name == "pieces" else 2**25
        for uneven in (False, True):
            parts = rows_of_ranks(uneven=uneven)
            rows = parts[rank] if world_size == 2 else parts[0] + parts[1]
            config = make_config(**{**sections, "trainer": {**sections.get("trainer", {}), "ranks": world_size}})
            trainer = Trainer(config, model_folder=model_folder, rank=rank)
            reduced.clear()
            if isinstance(trainer.model, FSDPModule):
                group = trainer.model._get_fsdp_state()._fsdp_param_group
                assert isinstance(group.offload_policy, CPUOffloadPolicy) == (name == "offload")
            stats = trainer.train_step(make_shard([_at(row, 0) for row in rows], rewards=REWARDS, version=0, rank=rank))
            folder = Path(out) / f"{name}-{uneven}"
            trainer.export(folder)
            scores = [score.tolist() for score in trainer.score(SEQUENCES)]
            record = {"stats": stats, "scores": scores, "version": trainer.version, "reduced": len(reduced)}
            (folder.parent / f"{name}-{uneven}-{rank}.json").write_text(json.dumps(record))
            # After `score` too, whose forward pass no backward pass follows; seen failing without `reshard`.
            if world_size == 2:
                assert all(isinstance(parameter, DTensor) for parameter in trainer.model.parameters())
                assert all(parameter.dtype == torch.float32 for parameter in trainer.model.parameters())


def _at(row: Row, version: int) -> Row:
    """Move a row's youngest tokens to a version, the older ones beyond the bound of 2 below it."""
    spans = tuple(dataclasses.replace(span, version=version) for span in row.sample.spans)
    return dataclasses.replace(row, sample=dataclasses.replace(row.sample, spans=spans))


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folders = {world_size: tmp_path_factory.mktemp(f"ranks-{world_size}") for world_size in (1, 2)}
    model_folder = save_tiny_model(tmp_path_factory.mktemp("model"))
    run_ranks(train, model_folder, str(folders[2]))
    run_ranks(train, model_folder, str(folders[1]), world_size=1)
    return folders


def record(folder: Path, name: str, *, uneven: bool, rank: int = 0) -> dict[str, Any]:
    return json.loads((folder / f"{name}-{uneven}-{rank}.json").read_text())


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize(
    ("name", "tolerance"),
    [
        ("plain", 2e-5),
        ("bfloat16", 2e-2),
        ("pieces", 2e-5),
        ("offload", 2e-5),
        ("decay", 2e-5),
    ],
)
def test_two_ranks_learn_what_one_learns(outputs: dict[int, Path], name: str, tolerance: float, uneven: bool) -> None:
    """Same weights after two updates.

    Seen failing without the factor that undoes FSDP's average, with each rank's own number of tokens as denominator,
    with gradients of the last piece alone, and (a time-out) without the empty micro-batches.
    """
    same = "plain" if name in ("pieces", "offload") else name
    one = load_file(outputs[1] / f"{same}-{uneven}" / "model.safetensors")
    two = load_file(outputs[2] / f"{name}-{uneven}" / "model.safetensors")
    assert one.keys() == two.keys()
    for key, value in one.items():
        torch.testing.assert_close(two[key], value, atol=tolerance, rtol=1e-3)


@pytest.mark.parametrize("uneven", [False, True])
def test_statistics_are_global(outputs: dict[int, Path], uneven: bool) -> None:
    """Every rank reports the whole batch. Seen failing with the sums of one rank only."""
    one = record(outputs[1], "plain", uneven=uneven)
    for rank in range(2):
        two = record(outputs[2], "plain", uneven=uneven, rank=rank)
        assert two["version"] == 1
        for key, value in one["stats"].items():
            if value is None or isinstance(value, dict):
                assert two["stats"][key] == value, key
            elif not key.endswith("_s"):
                assert two["stats"][key] == pytest.approx(value, rel=1e-3, abs=1e-4), key
        for got, expected in zip(two["scores"], one["scores"], strict=True):
            np.testing.assert_allclose(got, expected, atol=1e-4)


def test_gradients_are_reduced_as_often_as_asked(outputs: dict[int, Path]) -> None:
    """Both layers and the rest once in each of two updates of several passes. Seen failing without the setting."""
    assert [record(outputs[2], "pieces", uneven=True, rank=rank)["reduced"] for rank in range(2)] == [6, 6]
    assert record(outputs[2], "plain", uneven=True)["reduced"] > 6
