"""What a trainer rank says of itself while it works; no Ray, no model."""

import threading
from typing import Any

import pytest

from areal_lite.actors import trainer
from areal_lite.actors.trainer import OfflineTrainerActor
from areal_lite.config.offline import parse_any_config


class Rank(OfflineTrainerActor):
    """A trainer whose step runs until the test releases it."""

    reached, go_on = threading.Event(), threading.Event()

    def step(self) -> dict[str, float]:
        self.reached.set()
        self.go_on.wait()
        return {"loss": 1.0}


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Rank:
    monkeypatch.setattr(trainer, "log_to_file", lambda *_, **__: None)
    return Rank(parse_any_config({"command": "sft"}), rank=1, log_folder="")


def test_ping_tells_what_a_rank_does_since_when_and_where(rank: Rank) -> None:
    """Beside its work, in which the other thread may hang. Seen failing with a ping that only answers."""
    assert rank.ping() == ""
    answers: list[Any] = []
    working = threading.Thread(target=lambda: answers.append(rank.work("step")))
    working.start()
    rank.reached.wait()
    said = rank.ping()
    rank.go_on.set()
    working.join()
    assert said.startswith("in step since 0 s (wait, areal_lite.actors.trainer:")
    assert answers == [{"loss": 1.0}]
    assert rank.ping() == ""


def test_a_rank_whose_work_failed_is_free(rank: Rank) -> None:
    with pytest.raises(AttributeError):
        rank.work("evaluate")
    assert rank.ping() == ""
