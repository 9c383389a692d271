"""Servers of the Model Context Protocol: an agent that is offered their tools, and calls them as a chat model does."""

import json
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from areal_lite.rollout.agents import Llm

if TYPE_CHECKING:
    from mcp import Client


async def play(
    task: Mapping[str, Any], llm: Llm, *, server: str, env: Mapping[str, str] | None = None, max_turns: int = 8
) -> None:
    """Let the model call tools until it answers without a call; the verifier gets the transcript.

    Args:
        server: A command, which is started anew for each rollout and speaks over its input and output; or the address
            of a server that runs, `http://...`.
        env: Of the command, beside PATH, HOME and the like.
        max_turns: Turns of the model's.
    """
    from mcp import Client, StdioServerParameters, stdio_client

    command, *rest = shlex.split(server)
    started = StdioServerParameters(command=command, args=rest, env=env and dict(env))
    async with Client(server if "://" in command else stdio_client(started)) as client:
        tools = await _offered(client)
        messages: list[Any] = [{"role": "user", "content": task["prompt"]}]
        for _ in range(max_turns):
            response = await llm.client.chat.completions.create(model=llm.model, messages=messages, tools=tools)
            said = response.choices[0].message.model_dump(exclude_none=True)
            messages.append(said)
            if "tool_calls" not in said:
                break
            for one in said["tool_calls"]:
                told = await _result(client, **one["function"])
                messages.append({"role": "tool", "tool_call_id": one["id"], "content": told})


async def _offered(client: "Client") -> list[Any]:
    found, cursor = [], None
    while True:
        page = await client.list_tools(cursor=cursor)
        found += page.tools
        if (cursor := page.next_cursor) is None:
            break
    functions = ({"name": one.name, "description": one.description, "parameters": one.input_schema} for one in found)
    return [{"type": "function", "function": function} for function in functions]


async def _result(client: "Client", name: str, arguments: str) -> str:
    """Return a result's text, or the error, which the model may read and try again."""
    from mcp import MCPError

    try:
        result = await client.call_tool(name, json.loads(arguments))
    except (MCPError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "\n".join(part.text for part in result.content if part.type == "text")
