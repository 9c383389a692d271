"""The verifier `judge`, against a small server that answers as the test says."""

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from http_server import Server, answering

from areal_lite.errors import VerifierError, VerifierUnavailable
from areal_lite.verify import VerifyResult
from areal_lite.verify.builtin.judge import judge
from areal_lite.verify.protocol import Verifier


@pytest.fixture
def server() -> Iterator[Server]:
    with answering() as server:
        yield server


def ask(server: Server, completion: str = "It is 4.", **options: Any) -> VerifyResult:
    return asyncio.run(judge(base_url=server.url, model="m", **options)("2+2=?", completion, "4"))


def test_the_score_and_the_words_come_back(server: Server) -> None:
    """8 of 0..10 is 0.8. The request holds what the recipe says, and the three texts."""
    result = ask(server, temperature=0.5, max_tokens=99)
    assert (result.reward, result.feedback) == (0.8, "Well done.\nScore: 8")
    (request,) = server.asked
    assert (request["model"], request["temperature"], request["max_tokens"]) == ("m", 0.5, 99)
    (message,) = request["messages"]
    assert message["role"] == "user"
    for text in ("2+2=?", "It is 4.", "Reference solution:\n4\n"):
        assert text in message["content"]


@pytest.mark.parametrize(
    ("reply", "options", "reward"),
    [
        ("Score: 3 at first. No:\n**Score: 7**", {}, 0.7),
        ("score = 10", {}, 1.0),
        ("SCORE: 2.5/10", {}, 0.25),
        ("I give it [[3]] of 5", {"pattern": r"\[\[(\d)\]\]", "scale": [1, 5]}, 0.5),
        ("Score: -1", {"scale": [-1, 1]}, 0.0),
        ("Score (0-10): 7", {}, 0.7),
        ("<answer>4</answer> is right. My final score: 4 — to reach score 10 it must show its work.", {}, 0.4),
        ("<think>Score: 2</think>Score: 9\nA score of 10 would need units.", {}, 0.9),
    ],
)
def test_the_last_score_counts_on_the_recipes_scale(
    server: Server, reply: str, options: dict[str, Any], reward: float
) -> None:
    """Seen failing with the first score taken, and with the word read anywhere."""
    server.reply = reply
    assert ask(server, **options).reward == pytest.approx(reward)


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ("I cannot judge.", "must hold a score"),
        ("", "must hold a score"),
        ("Score: 11", "must be from 0 to 10"),
        ("<think>Wrong at first.\nScore: 2? Let me", "must hold a score"),
        ("Maybe score 2? Let me check", "must hold a score.*raise max_tokens"),
    ],
)
def test_a_reply_without_a_score_is_an_error_not_a_0(server: Server, reply: str, message: str) -> None:
    """Seen failing with 0.0 returned, and with thoughts read."""
    server.reply = reply
    with pytest.raises(ValueError, match=message):
        ask(server)


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (429, VerifierUnavailable),
        (500, VerifierUnavailable),
        (400, openai.BadRequestError),
        (401, openai.AuthenticationError),
    ],
)
def test_a_busy_or_broken_server_is_unavailable_and_asked_once(
    server: Server, status: int, error: type[Exception]
) -> None:
    """Asking again is the pool's, which counts it. Seen failing with the client's own retries left on: 3 requests."""
    server.status, server.body = status, {"error": {"message": "no"}}
    with pytest.raises(error):
        ask(server)
    assert len(server.asked) == 1


def test_no_server_and_a_silent_one_are_unavailable(server: Server) -> None:
    with pytest.raises(VerifierUnavailable):
        asyncio.run(judge(base_url="http://127.0.0.1:9/v1", model="m")("", "", ""))  # nobody serves port 9
    server.pause_s = 2.0
    with pytest.raises(VerifierUnavailable, match="timed out"):
        ask(server, request_timeout_s=0.2)


def test_texts_are_put_in_as_they_stand(server: Server) -> None:
    """Braces of a completion are no places. Seen failing with the three texts replaced one after another."""
    ask(server, "{answer} {prompt} {0}", template="[{completion}|{answer}|{other}]")
    assert server.asked[0]["messages"][0]["content"] == "[{answer} {prompt} {0}|4|{other}]"


def test_the_key_comes_from_the_environment(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the named variable's; a recipe holds no key, and no other key is sent along."""
    monkeypatch.setenv("OPENAI_API_KEY", "not this one")
    monkeypatch.setenv("JUDGE_KEY", "secret")
    ask(server)
    ask(server, api_key_env="JUDGE_KEY")
    assert server.keys == ["Bearer none", "Bearer secret"]


@pytest.mark.parametrize(
    "arguments",
    [{"template": "no place"}, {"pattern": "score"}, {"scale": [10, 0]}, {"api_key_env": "NO_SUCH_VARIABLE_IS_SET"}],
)
def test_wrong_arguments_fail_when_the_verifier_is_prepared(arguments: dict[str, Any]) -> None:
    with pytest.raises(VerifierError, match=next(iter(arguments))):
        Verifier(judge, {"base_url": "http://127.0.0.1/v1", "model": "m", **arguments})
