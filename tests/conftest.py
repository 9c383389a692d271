"""One Ray for all integration tests."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A private Ray, started when the first test asks for it."""
    import ray

    ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def loop_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the integration tests keep the model and data that they share."""
    return tmp_path_factory.mktemp("loop")
