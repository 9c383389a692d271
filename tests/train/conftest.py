"""Models that the tests of the trainers share."""

import pytest
from preset_builders import save_model_near
from train_builders import save_tiny_model


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reference_folder(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model_near(model_folder, tmp_path_factory.mktemp("reference"))
