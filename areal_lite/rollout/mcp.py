"""The agent `mcp`: a chat model that calls the tools of a Model Context Protocol server."""

import json
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from areal_lite.config.data import CHAT
from areal_lite.rollout.agents import Llm

if TYPE_CHECKING:
    from mcp import Client


async def play(
    task: Mapping[str, Any], llm: Llm, *, server: str, env: Mapping[str, str] | None = None, max_turns: int = 8
) -> None:
    """Let the model call tools until it answers without a call; the verifier scores the transcript.

    Args:
        server: A command, started for each rollout, that communicates over its input and output; or the URL of a
            running server, `http://...`.
        env: Environment variables of the command, beside PATH, HOME and the like.
        max_turns: Turns of the model.
    """
    from mcp import Client, StdioServerParameters, stdio_client

    command, *rest = shlex.split(server)
    parameters = StdioServerParameters(command=command, args=rest, env=env and dict(env))
    async with Client(server if "://" in command else stdio_client(parameters)) as client:
        tools = await _tools(client)
        messages: list[Any] = [*(task.get(CHAT) or [{"role": "user", "content": task["prompt"]}])]
        for _ in range(max_turns):
            response = await llm.client.chat.completions.create(model=llm.model, messages=messages, tools=tools)
            message = response.choices[0].message.model_dump(exclude_none=True)
            messages.append(message)
            if "tool_calls" not in message:
                break
            for one in message["tool_calls"]:
                result = await _result(client, **one["function"])
                messages.append({"role": "tool", "tool_call_id": one["id"], "content": result})


async def _tools(client: "Client") -> list[Any]:
    found, cursor = [], None
    while True:
        page = await client.list_tools(cursor=cursor)
        found += page.tools
        if (cursor := page.next_cursor) is None:
            break
    functions = ({"name": one.name, "description": one.description, "parameters": one.input_schema} for one in found)
    return [{"type": "function", "function": function} for function in functions]


async def _result(client: "Client", name: str, arguments: str) -> str:
    """Return a result's text, or the error, so that the model may try again."""
    from mcp import MCPError

    try:
        result = await client.call_tool(name, json.loads(arguments))
    except (MCPError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "\n".join(part.text for part in result.content if part.type == "text")
