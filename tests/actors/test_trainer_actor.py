"""What a trainer rank says of itself while it works, and a verifier worker about held-out completions; no Ray."""

import threading
from typing import Any

import pytest
import torch
from episode_builders import in_loop
from ledger_builders import make_sample

from areal_lite.actors import trainer
from areal_lite.actors import verifier as module
from areal_lite.actors.trainer import OfflineTrainerActor
from areal_lite.actors.verifier import VerifierActor
from areal_lite.config.offline import parse_any_config
from areal_lite.config.recipe import parse_config
from areal_lite.errors import ConfigError
from areal_lite.train.distributed import join_process_group
from areal_lite.types import Prompt, Score
from areal_lite.verify.protocol import Reply, failed
from areal_lite.verify.verifier_set import VerifierSet


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


def test_a_rank_that_sees_no_gpu_names_the_command_that_shows_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen failing with a ZeroDivisionError."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match=r"trainer rank 1 .* Fix: see areal-lite doctor"):
        join_process_group("127.0.0.1:1", rank=1, world_size=2, device="cuda", timeout_s=1)


# --- a verifier worker ---


@in_loop
async def test_a_held_out_completion_gets_its_agents_score_or_the_verifiers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The total, step rewards included, with parts and metrics; or the failure, of an episode as well.

    Seen failing with the total alone, in a run whose evaluations had no parts; without an agent's own score; and
    (1.0) with `reward` in the total's place.
    """
    replies = {
        "a": Reply(1.0, step_rewards=((3, 0.5),), parts={"right": 1.0}, metrics={"words": 2.0}),
        "b": failed("timeout", ""),
    }

    async def score(self: VerifierSet, prompt: Prompt, texts: list[str], **options: Any) -> list[Reply]:
        assert options == {"held_out": True, "messages": [said]}
        return [replies[text] for text in texts]

    async def start(self: VerifierSet) -> None:
        pass

    for name in ("log_to_file", "decoder_of", "AsyncQueueClient"):
        monkeypatch.setattr(module, name, lambda *_, **__: None)
    monkeypatch.setattr(VerifierSet, "start", start)
    monkeypatch.setattr(VerifierSet, "score", score)
    access: Any = None
    actor = VerifierActor(parse_config({}), name="verifier/0", access=access, log_folder="", model_folder="")
    own = Score(reward=2.0, parts={"kind": 1.0}, metrics={"calls": 3.0})
    said = ({"role": "assistant", "content": "a"},)
    samples = [*(make_sample(text=text, messages=said) for text in "ab"), make_sample().scored(own), None]
    prompts = [Prompt(prompt_id="p/0/1", text="", token_ids=(1,), answer="")] * 4
    await actor.start()
    found = await actor.score(prompts, samples)
    assert [(reply.total, reply.failure) for reply in found] == [
        (1.5, None), (None, "timeout"), (2.0, None), (None, "workflow"),
    ]  # fmt: skip
    assert [dict(reply.parts) for reply in found] == [{"right": 1.0}, {}, {"kind": 1.0}, {}]
    assert [dict(reply.metrics) for reply in found] == [{"words": 2.0}, {}, {"calls": 3.0}, {}]
