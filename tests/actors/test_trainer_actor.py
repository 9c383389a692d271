"""What a trainer rank says of itself while it works; no Ray, no model."""

import threading
from typing import Any

import pytest

from areal_lite.actors import trainer
from areal_lite.actors.trainer import OfflineTrainerActor
from areal_lite.config.offline import parse_any_config


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> OfflineTrainerActor:
    monkeypatch.setattr(trainer, "log_to_file", lambda *_, **__: None)
    return OfflineTrainerActor(parse_any_config({"command": "sft"}), rank=1, log_folder="")


def test_ping_tells_what_a_rank_does_since_when_and_where(rank: OfflineTrainerActor) -> None:
    """Beside its work, in which the other thread may hang. Seen failing with a ping that only answers."""
    reached, go_on = threading.Event(), threading.Event()

    class Trainer:
        def all_reduce(self) -> dict[str, float]:
            reached.set()
            go_on.wait()
            return {"loss": 1.0}

        step = all_reduce

    rank._trainer = Trainer()
    assert rank.ping() == ""
    answers: list[Any] = []
    working = threading.Thread(target=lambda: answers.append(rank.work("step")))
    working.start()
    reached.wait()
    said = rank.ping()
    go_on.set()
    working.join()
    assert said.startswith("in step since 0 s (wait, areal_lite.actors.trainer:")
    assert answers == [{"loss": 1.0}]
    assert rank.ping() == ""


def test_a_rank_whose_work_failed_is_free(rank: OfflineTrainerActor) -> None:
    with pytest.raises(AttributeError):
        rank.work("evaluate")
    assert rank.ping() == ""
