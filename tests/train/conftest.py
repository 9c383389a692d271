"""Models and rows that the tests of the trainers share."""

import pytest
from preset_builders import near_behaviour, save_model_near
from train_builders import make_rows, save_tiny_model

from areal_lite.types import Row


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reference_folder(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model_near(model_folder, tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="module")
def rows(model_folder: str) -> list[Row]:
    """Rows whose behaviour logprobs lie near the model's own, as after a few steps of training."""
    return near_behaviour(make_rows(old_tokens=2), model_folder, noise=0.3)
