"""The verifier `judge`: against a small server that answers as told, and against a real `vllm serve`."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import openai
import pytest
from pool_builders import running_pool
from train_builders import save_tiny_model

from areal_lite.data.tokenizer import PAD
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


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_or_broken_server_is_unavailable_and_asked_once(server: Server, status: int) -> None:
    """Asking again is the pool's, which counts it. Seen failing with the client's own retries left on: 3 requests."""
    server.status, server.body = status, {"error": {"message": "no"}}
    with pytest.raises(VerifierUnavailable, match="does not answer"):
        ask(server)
    assert len(server.asked) == 1


@pytest.mark.parametrize(("status", "error"), [(400, openai.BadRequestError), (401, openai.AuthenticationError)])
def test_a_refused_request_is_no_reason_to_ask_again(server: Server, status: int, error: type[Exception]) -> None:
    server.status, server.body = status, {"error": {"message": "no"}}
    with pytest.raises(error):
        ask(server)


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
        {"pattern": "("},
        {"scale": [10, 0]},
        {"scale": [1]},
        {"max_tokens": 0},
        {"temperature": -1.0},
        {"api_key_env": "NO_SUCH_VARIABLE_IS_SET"},
        {"top_p": 0.5},
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


# --- a real server ---


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A tiny model behind the server of `vllm serve`.

    It knows only digits, and takes all else, which the server tries out at its start, for padding.
    """
    tmp_path = tmp_path_factory.mktemp("vllm")
    folder = save_tiny_model(tmp_path / "model")
    tokenizer = json.loads((tmp_path / "model" / "tokenizer.json").read_text())
    tokenizer["model"]["unk_token"] = PAD
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps(tokenizer))
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    port = free_port()
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--served-model-name", "tiny"),
        *("--host", "127.0.0.1", "--port", str(port), "--chat-template", str(template), "--enforce-eager"),
        *("--dtype", "float32", "--max-model-len", "64", "--kv-cache-memory-bytes", str(192 * 2**20)),
    ]
    settings = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            command, env={**os.environ, **settings}, stdout=log, stderr=log, start_new_session=True
        )
        try:
            wait_for(process, port, tmp_path / "log")
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.terminate()
            try:
                process.wait(timeout=PATIENCE_S)
            finally:
                process.kill()


def wait_for(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + 5 * PATIENCE_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.5)
        else:
            return
    pytest.fail(f"the server did not start:\n{log.read_text()[-3000:]}")


@pytest.mark.loop
def test_a_real_server_judges(vllm: str) -> None:
    """Through the pool: 12 calls, 6 at once. Greedy, so that equal questions get equal scores; the reply is digits.

    A question longer than the model's 64 tokens is refused, and that is a failure, not a 0.
    """
    arguments = {
        "base_url": vllm, "model": "tiny", "template": "{prompt}{completion}{answer}", "pattern": r"(\d)",
        "scale": [0, 9], "max_tokens": 8,
    }  # fmt: skip
    completions = ["4", "56", "4", "789", "4", "5" * 90] * 2
    replies = score_in_pool(completions, arguments, concurrency=6)
    good = [reply for reply, text in zip(replies, completions, strict=True) if len(text) < 90]
    assert all(reply.failure is None and reply.feedback.isdigit() and 0 <= reply.reward <= 1 for reply in good)
    assert [reply.reward for reply in good] == [int(reply.feedback[-1]) / 9 for reply in good]
    assert len({reply.feedback for reply, text in zip(replies, completions, strict=True) if text == "4"}) == 1
    refused = [reply for reply, text in zip(replies, completions, strict=True) if len(text) == 90]
    assert [reply.failure for reply in refused] == ["exception:BadRequestError"] * 2
