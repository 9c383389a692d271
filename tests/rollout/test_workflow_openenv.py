"""An environment on a server of the package openenv-core, played by the workflow `gymnasium`."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from episode_builders import UNCUT, Speaker, load, play
from source_builders import load_one

pytestmark = [pytest.mark.openenv, pytest.mark.slow]

SERVER = """
import socket, sys
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

class Move(Action):
    by: int

class Seen(Observation):
    number: int

class Count(Environment[Move, Seen, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()

    def reset(self, seed=None, episode_id=None, **_):
        self.number = seed % 5
        return Seen(number=self.number)

    def step(self, action, timeout_s=None, **_):
        self.number += action.by
        return Seen(number=self.number, reward=1.0 if self.number == 9 else -0.25, done=self.number == 9)

listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
app = create_fastapi_app(Count, Move, Seen, max_concurrent_envs=8)
uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])
"""


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    file = tmp_path / "server.py"
    file.write_text(SERVER)
    with subprocess.Popen([sys.executable, str(file)], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield f"http://127.0.0.1:{server.stdout.readline().strip()}"
        server.kill()


def test_a_server_s_environment_is_played(url: str) -> None:
    """By a field of its action or by all of it; each prompt is the first observation of its seed.

    Seen failing with a reset without the seed.
    """
    env = {"url": url, "observation": "number"}
    source = {"env": "areal_lite.rollout.openenv:OpenEnv", "train_size": 4, "eval_size": 1}
    prompts = load_one({"source": "gymnasium", "arguments": {**source, **env}})
    assert [prompt.text for prompt in prompts] == ["0", "1", "2", "3"]
    for action, said in (("by", "3"), (None, '{"by": 3}')):
        arguments = {"env": source["env"], "arguments": {**env, "action": action}, "max_turns": 5}
        sample = play(Speaker(lambda _: said), load("gymnasium", arguments=arguments), prompts[3], sampling=UNCUT)  # noqa: B023
        assert [message["content"] for message in sample.messages] == [said, "6", said]
        assert sample.total_reward == 0.75
