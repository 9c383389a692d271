"""The verifier `judge`, against a small server that answers as the test says."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import openai
import pytest
from pool_builders import running_pool

from areal_lite.errors import VerifierError, VerifierUnavailable
from areal_lite.types import Prompt
from areal_lite.verify import VerifyResult
from areal_lite.verify.builtin.judge import judge
from areal_lite.verify.protocol import Verifier

PATIENCE_S = 120.0


class Server(ThreadingHTTPServer):
    """Answers every request with what the test says, and keeps what it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.status, self.reply = 200, "Well done.\nScore: 8"
        self.body: dict[str, Any] | None = None
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.pause_s = 0.0
        self.lock = threading.Lock()
        self.under_way = self.most_under_way = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        server = self.server
        content = self.rfile.read(int(self.headers["Content-Length"]))
        with server.lock:
            server.asked.append(json.loads(content))
            server.keys.append(self.headers["Authorization"])
            server.under_way += 1
            server.most_under_way = max(server.most_under_way, server.under_way)
        time.sleep(server.pause_s)
        with server.lock:
            server.under_way -= 1
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": server.reply}}
        body = {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        data = json.dumps(body if server.body is None else server.body).encode()
        self.send_response(server.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


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
    ],
)
def test_the_last_score_counts_on_the_recipes_scale(
    server: Server, reply: str, options: dict[str, Any], reward: float
) -> None:
    """Seen failing with the first score taken."""
    server.reply = reply
    assert ask(server, **options).reward == pytest.approx(reward)


@pytest.mark.parametrize(
    ("reply", "message"),
    [("I cannot judge.", "must hold a score"), ("", "must hold a score"), ("Score: 11", "must be from 0 to 10")],
)
def test_a_reply_without_a_score_is_an_error_not_a_0(server: Server, reply: str, message: str) -> None:
    """Seen failing with 0.0 returned."""
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
        asyncio.run(judge(base_url=f"http://127.0.0.1:{free_port()}/v1", model="m")("", "", ""))
    server.pause_s = 2.0
    with pytest.raises(VerifierUnavailable, match="timed out"):
        ask(server, request_timeout_s=0.2)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


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
    [
        {"template": "no place"},
        {"pattern": "score"},
        {"scale": [10, 0]},
        {"api_key_env": "NO_SUCH_VARIABLE_IS_SET"},
    ],
)
def test_wrong_arguments_fail_when_the_verifier_is_prepared(arguments: dict[str, Any]) -> None:
    with pytest.raises(VerifierError, match=next(iter(arguments))):
        Verifier(judge, {"base_url": "http://127.0.0.1/v1", "model": "m", **arguments})


def score_in_pool(completions: list[str], arguments: dict[str, Any], **settings: Any) -> list[Any]:
    async def run() -> list[Any]:
        options = {"function": "judge", "arguments": arguments, "timeout_s": 60.0} | settings
        async with running_pool(within_s=PATIENCE_S, **options) as pool:
            prompt = Prompt(prompt_id="train/0/0", text="12", token_ids=(1,), answer="3", row={})
            return await pool.score(prompt, completions)

    return asyncio.run(run())


@pytest.mark.slow
def test_the_pool_asks_several_at_once_and_again(server: Server) -> None:
    """Eight calls in one process; with a broken server each is asked at 0, 0.2 and 0.95 s, and is no reward.

    Seen failing, as one at a time, with `judge` called by a function that is not async.
    """
    server.pause_s = 0.2
    arguments = {"base_url": server.url, "model": "m"}
    replies = score_in_pool(["c"] * 8, arguments, concurrency=4)
    assert [reply.reward for reply in replies] == [0.8] * 8
    assert replies[0].feedback == server.reply
    assert server.most_under_way == 4
    server.asked.clear()
    server.pause_s, server.status = 0.0, 503
    (reply,) = score_in_pool(["c"], arguments, unavailable_s=0.95)
    assert (reply.reward, reply.failure, len(server.asked)) == (None, "unavailable", 3)
