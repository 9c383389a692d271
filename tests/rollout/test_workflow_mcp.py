"""Tools of a server of the package mcp, over its input and output, offered to an agent."""

import functools
import sys
from pathlib import Path

import pytest
from agent_builders import HERMES, TOOLS_TEMPLATE, trained, user
from chat_builders import LONG

from areal_lite.config.data import CHAT
from areal_lite.errors import EpisodeError
from areal_lite.rollout.mcp import play

SERVER = '''
import os
from mcp.server import MCPServer

server, noted = MCPServer("shop", log_level="CRITICAL"), []

@server.tool()
def price(fruit: str) -> int:
    """What a fruit costs."""
    noted.append(fruit)
    return {"apple": 3}[fruit] * int(os.environ["FACTOR"])

@server.tool()
def asked() -> str:
    return " ".join(noted)

server.run()
'''


def call(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


@pytest.mark.slow
def test_a_server_s_tools_are_offered_called_and_answered(tmp_path: Path) -> None:
    """Two calls in one turn, a tool that fails, one that is not there; each rollout has a server of its own.

    Seen failing with the tools left out of the request, and with a chat's rendered text as the question.
    """
    file = tmp_path / "shop.py"
    file.write_text(SERVER)
    agent = functools.partial(play, server=f"{sys.executable} {file}", env={"FACTOR": "2"})
    two = call("price", '{"fruit": "apple"}') + call("price", '{"fruit": "sand"}')
    answers = [two, call("prices", "{}"), call("asked", "{}"), "It is 6."]
    chat = [{"role": "system", "content": "Be kind."}, user("What is it?")]
    for row, asked in (({}, "user\n1-9?"), ({CHAT: chat}, "system\nBe kind.<|im_end|>\n<|im_start|>user\nWhat is it?")):
        sample, speaker = trained(agent, answers, sampling=LONG, row=row, **HERMES)
        assert (sample.branches, sample.score) == ((), None)
        first = speaker.tokenizer.decode(sample.prompt_ids)
        assert f"<|im_end|>\n<|im_start|>{asked}<|im_end|>\n<|im_start|>assistant" in first
        assert '"name": "price", "description": "What a fruit costs."' in first
        assert '"properties": {"fruit": ' in first
        told = [message["content"] for message in sample.messages if message["role"] == "tool"]
        assert (told[0], told[3]) == ("6", "apple sand")
        assert "Error executing tool price" in told[1]
        assert "prices" in told[2]
        assert sample.messages[-1]["content"] == "It is 6."


def test_a_server_that_does_not_start_is_a_lost_sample() -> None:
    with pytest.raises(EpisodeError, match="workflow:MCPError: Connection closed"):
        trained(functools.partial(play, server=f"{sys.executable} -c pass"), ["a"], template=TOOLS_TEMPLATE)
