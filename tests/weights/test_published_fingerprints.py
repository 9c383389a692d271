"""A trainer's fingerprints of what it publishes, on several ranks: rank 0 has those of the whole model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import run_ranks
from train_builders import make_config, save_tiny_model
from transformers import AutoModelForCausalLM

from areal_lite.train.model import load_model
from areal_lite.weights.families import bit_squares
from areal_lite.weights.publisher import WeightPublisher


def check(rank: int, world_size: int, folder: str, mesh: dict[str, int]) -> None:
    config = make_config(trainer={"ranks": world_size, "mesh": mesh}, model={"compute_dtype": "bfloat16"})
    model = load_model(folder, config)
    places: dict[str, Any] = {"host": "127.0.0.1", "ports": range(20000, 22000), "timeout_s": 120.0}
    publisher = WeightPublisher(model, transport="gloo", dtype=torch.bfloat16, rank=rank, **places)
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = {name: int(bit_squares(value.bfloat16())) for name, value in whole.state_dict().items()}
    assert "lm_head.weight" in expected
    found = publisher.squares()
    assert rank or found == expected


@pytest.mark.parametrize("mesh", [{}, {"replicate": 2}, {"tensor": 2}])
def test_rank_0_has_the_sums_of_the_whole_model(tmp_path: Path, mesh: dict[str, int]) -> None:
    """Sharded, copied, split by tensor; a tied output layer has both its names.

    Seen failing with the sums of copies added up, and with the first name alone.
    """
    folder = str(save_tiny_model(tmp_path / "model", tie_embeddings=True, num_key_value_heads=2))
    run_ranks(check, folder, mesh, mesh=mesh)
