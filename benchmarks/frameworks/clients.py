# ruff: noqa: D400, D403, D415 - the docstrings are cells of a table
"""Frameworks' clients as users write them; `python clients.py NAME structured|other PACKAGE ...` prints what one did.

They find the endpoint in the environment, and run in the folder of their packages. The model does as the last text
says that it reads: `SAY<<...>>`. The docstring of a client is what docs/agents.md shows: what to write for it.
"""

import asyncio
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

URL, KEY = os.environ.get("OPENAI_BASE_URL", ""), os.environ.get("OPENAI_API_KEY", "")
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
PLAIN, TOOLS = "SAY<<hello>>", f"SAY<<so {CALL}>>"
WORDS = {"plain": "hello", "stream": "hello", "tools": "it is 3", "structured": "3", "overflow": "ok"}
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a"]}
FUNCTION = {"name": "add", "description": "Add two numbers.", "parameters": PARAMETERS}
LONG = "a " * 200_000
NODE = Path("node_modules").absolute()
Checks = dict[str, Callable[[], Any]]


def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: One.
        b: The other.
    """
    assert (a, b) == (1, 2)
    return "SAY<<it is 3>>"


def user(text: str) -> list[dict[str, Any]]:
    """Return a user's message."""
    return [{"role": "user", "content": text}]


def joined(parts: Any) -> str:
    """Join the texts of a stream."""
    return "".join(part or "" for part in parts)


def openai_chat() -> Checks:
    """`OpenAI(base_url=llm.base_url, api_key=llm.api_key)`, then `client.chat.completions`"""
    from openai import OpenAI

    ask = OpenAI().chat.completions.create

    def tools() -> Any:
        messages: list[Any] = user(TOOLS)
        given: Any = [{"type": "function", "function": FUNCTION}]
        answer = ask(model="policy", messages=messages, tools=given).choices[0].message
        (call,) = answer.tool_calls or ()
        result = add(**json.loads(call.function.arguments))  # type: ignore[union-attr]
        messages += [answer, {"role": "tool", "tool_call_id": call.id, "content": result}]
        return ask(model="policy", messages=messages, tools=given).choices[0].message.content

    return {
        "plain": lambda: ask(model="policy", messages=user(PLAIN)).choices[0].message.content,
        "stream": lambda: joined(
            chunk.choices[0].delta.content for chunk in ask(model="policy", messages=user(PLAIN), stream=True)
        ),
        "tools": tools,
    }


def openai_responses() -> Checks:
    """the same client, `client.responses`, with the whole input each time"""
    from openai import OpenAI

    ask = OpenAI().responses.create

    def tools() -> Any:
        items: list[Any] = user(TOOLS)
        given: Any = [{"type": "function", **FUNCTION}]
        response = ask(model="policy", input=items, tools=given)
        items += response.output
        (call,) = [item for item in response.output if item.type == "function_call"]
        items.append(
            {"type": "function_call_output", "call_id": call.call_id, "output": add(**json.loads(call.arguments))}
        )
        return ask(model="policy", input=items, tools=given).output_text

    return {
        "plain": lambda: ask(model="policy", input=PLAIN).output_text,
        "stream": lambda: joined(
            event.delta
            for event in ask(model="policy", input=PLAIN, stream=True)
            if event.type == "response.output_text.delta"
        ),
        "tools": tools,
    }


def anthropic() -> Checks:
    """`Anthropic(base_url=llm.anthropic_base_url, api_key=llm.api_key)`; `tool_runner` too"""
    import anthropic

    client = anthropic.Anthropic()
    asked: Any = {"model": "policy", "max_tokens": 200}

    def stream() -> str:
        with client.messages.stream(**asked, messages=user(PLAIN)) as events:
            return joined(events.text_stream)

    def tools() -> Any:
        runner = client.beta.messages.tool_runner(**asked, messages=user(TOOLS), tools=[anthropic.beta_tool(add)])
        return runner.until_done().content[0].text  # type: ignore[union-attr]

    return {
        "plain": lambda: client.messages.create(**asked, messages=user(PLAIN)).content[0].text,  # type: ignore[union-attr]
        "stream": stream,
        "tools": tools,
    }


def litellm() -> Checks:
    """`completion(model="openai/policy", api_base=llm.base_url, api_key=llm.api_key)`"""
    import litellm

    def ask(messages: Any, **options: Any) -> Any:
        return litellm.completion(model="openai/policy", api_base=URL, api_key=KEY, messages=messages, **options)

    def tools() -> Any:
        messages: list[Any] = user(TOOLS)
        given = [{"type": "function", "function": FUNCTION}]
        answer = ask(messages, tools=given).choices[0].message
        (call,) = answer.tool_calls
        result = add(**json.loads(call.function.arguments))
        messages += [answer.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": result}]
        return ask(messages, tools=given).choices[0].message.content

    def overflow() -> str:
        try:
            ask(user(LONG))
        except litellm.ContextWindowExceededError:
            return "ok"
        return "no error"

    return {
        "plain": lambda: ask(user(PLAIN)).choices[0].message.content,
        "stream": lambda: joined(chunk.choices[0].delta.content for chunk in ask(user(PLAIN), stream=True)),
        "tools": tools,
        "overflow": overflow,
    }


def langchain_openai() -> Checks:
    """`ChatOpenAI(model="policy", base_url=llm.base_url, api_key=llm.api_key)`"""
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model="policy")
    return {
        "plain": lambda: model.invoke(PLAIN).content,
        "stream": lambda: joined(chunk.content for chunk in model.stream(PLAIN)),
        "structured": lambda: str(model.with_structured_output(PARAMETERS | {"title": "x"}).invoke('SAY<<{"a": 3}>>')),
    }


def langchain_anthropic() -> Checks:
    """`ChatAnthropic(model="policy", base_url=llm.anthropic_base_url, api_key=llm.api_key)`"""
    from langchain_anthropic import ChatAnthropic

    model: Any = ChatAnthropic(model="policy", base_url=os.environ["ANTHROPIC_BASE_URL"])  # type: ignore[call-arg]
    return {
        "plain": lambda: model.invoke(PLAIN).content,
        "stream": lambda: joined(
            chunk.content if isinstance(chunk.content, str) else chunk.content[0].get("text")
            for chunk in model.stream(PLAIN)
            if chunk.content
        ),
    }


def langgraph() -> Checks:
    """`create_react_agent(ChatOpenAI(...), tools)`"""
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    agent = create_react_agent(ChatOpenAI(model="policy"), [tool(add)])
    return {
        "plain": lambda: agent.invoke({"messages": user(PLAIN)})["messages"][-1].content,
        "stream": lambda: joined(
            chunk[0].content for chunk in agent.stream({"messages": user(PLAIN)}, stream_mode="messages")
        ),
        "tools": lambda: agent.invoke({"messages": user(TOOLS)})["messages"][-1].content,
    }


def openai_agents() -> Checks:
    """`OpenAIChatCompletionsModel("policy", AsyncOpenAI(base_url=..., api_key=...))`, or `OpenAIResponsesModel`"""
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)

    async def run(kind: Any, text: str, is_streamed: bool = False) -> Any:
        model = kind("policy", AsyncOpenAI())
        agent = agents.Agent(name="it", model=model, tools=[agents.function_tool(add)])
        if not is_streamed:
            return (await agents.Runner.run(agent, text)).final_output
        result = agents.Runner.run_streamed(agent, text)
        async for _ in result.stream_events():
            pass
        return result.final_output

    kinds = (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel)
    return {
        "plain": lambda: joined(asyncio.run(run(kind, PLAIN)) for kind in kinds),
        "stream": lambda: joined(asyncio.run(run(kind, PLAIN, True)) for kind in kinds),
        "tools": lambda: joined(asyncio.run(run(kind, TOOLS)) for kind in kinds),
    }


def pydantic_ai() -> Checks:
    """`OpenAIChatModel("policy", provider=OpenAIProvider(base_url=..., api_key=...))`; `PromptedOutput(...)`"""
    from pydantic import BaseModel
    from pydantic_ai import Agent, PromptedOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    class Sum(BaseModel):
        a: int

    model = OpenAIChatModel("policy", provider=OpenAIProvider(base_url=URL, api_key=KEY))
    agent = Agent(model, tools=[add])

    async def stream() -> str:
        async with agent.run_stream(PLAIN) as result:
            return str(await result.get_output())

    return {
        "plain": lambda: agent.run_sync(PLAIN).output,
        "stream": lambda: asyncio.run(stream()),
        "tools": lambda: agent.run_sync(TOOLS).output,
        "structured": lambda: str(Agent(model, output_type=PromptedOutput(Sum)).run_sync('SAY<<{"a": 3}>>').output.a),
    }


def instructor() -> Checks:
    """`instructor.from_openai(OpenAI(...), mode=instructor.Mode.MD_JSON)`"""
    import instructor
    from openai import OpenAI
    from pydantic import BaseModel

    class Sum(BaseModel):
        a: int

    client = instructor.from_openai(OpenAI(), mode=instructor.Mode.MD_JSON)
    said: Any = user('SAY<<```json\n{"a": 3}\n```>>')
    ask: Any = client.chat.completions.create
    return {
        "plain": lambda: ask(model="policy", messages=user(PLAIN), response_model=None).choices[0].message.content,
        "structured": lambda: str(ask(model="policy", messages=said, response_model=Sum).a),
    }


def smolagents() -> Checks:
    """`OpenAIModel("policy", api_base=..., api_key=..., tool_choice="auto")`; without tools no `tool_choice`"""
    from smolagents import OpenAIModel, ToolCallingAgent, tool

    final = '<tool_call>{"name": "final_answer", "arguments": {"answer": "it is 3"}}</tool_call>'

    @tool
    def add_numbers(a: int, b: int) -> str:
        """Add two numbers.

        Args:
            a: One.
            b: The other.
        """
        return f"SAY<<{final}>>"

    model = OpenAIModel("policy", api_base=URL, api_key=KEY)
    message: Any = [{"role": "user", "content": [{"type": "text", "text": PLAIN}]}]

    def run() -> Any:
        choosing = OpenAIModel("policy", api_base=URL, api_key=KEY, tool_choice="auto")
        agent = ToolCallingAgent(tools=[add_numbers], model=choosing, verbosity_level=0)
        return agent.run(TOOLS.replace("add", "add_numbers"))

    return {
        "plain": lambda: model.generate(message).content,
        "stream": lambda: joined(delta.content for delta in model.generate_stream(message)),
        "tools": run,
    }


def dspy() -> Checks:
    """`dspy.LM("openai/policy", api_base=llm.base_url, api_key=llm.api_key, temperature=1.0)`"""
    import dspy

    model = dspy.LM("openai/policy", api_base=URL, api_key=KEY, temperature=1.0, cache=False)
    fields = "[[ ## answer ## ]]\nhello\n[[ ## completed ## ]]"

    def ask(said: str, adapter: Any = None) -> str:
        with dspy.context(lm=model, adapter=adapter):
            return str(dspy.Predict("question -> answer")(question=f"SAY<<{said}>>").answer)

    return {
        "plain": lambda: ask(fields),
        "structured": lambda: ask('{"answer": "3"}', dspy.JSONAdapter()),
    }


def llama_index() -> Checks:
    """`OpenAILike(model="policy", api_base=..., api_key=..., temperature=1.0, is_chat_model=True, ...)`"""
    from llama_index.core.agent.workflow import FunctionAgent
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    model = OpenAILike(
        model="policy", api_base=URL, api_key=KEY, temperature=1.0, is_chat_model=True, is_function_calling_model=True
    )
    messages = [ChatMessage(role="user", content=PLAIN)]

    async def tools() -> str:
        return str(await FunctionAgent(tools=[add], llm=model).run(TOOLS))

    return {
        "plain": lambda: model.chat(messages).message.content,
        "stream": lambda: joined(chunk.delta for chunk in model.stream_chat(messages)),
        "tools": lambda: asyncio.run(tools()),
    }


def autogen() -> Checks:
    """`OpenAIChatCompletionClient(model="policy", base_url=..., api_key=..., model_info={...})`"""
    from autogen_agentchat.agents import AssistantAgent
    from autogen_core.models import UserMessage
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    able: Any = dict.fromkeys(["vision", "json_output", "structured_output"], False)
    info = able | {"function_calling": True, "family": "unknown"}
    client = OpenAIChatCompletionClient(model="policy", base_url=URL, api_key=KEY, model_info=info)

    async def plain() -> Any:
        return (await client.create([UserMessage(content=PLAIN, source="user")])).content

    async def run(text: str, is_streamed: bool) -> Any:
        options: Any = {"tools": [add], "reflect_on_tool_use": True, "model_client_stream": is_streamed}
        result = await AssistantAgent("it", client, **options).run(task=text)
        return result.messages[-1].content  # type: ignore[union-attr]

    return {
        "plain": lambda: asyncio.run(plain()),
        "stream": lambda: asyncio.run(run(PLAIN, True)),
        "tools": lambda: joined(asyncio.run(run(TOOLS, is_streamed)) for is_streamed in (False, True)),
    }


def mini_swe_agent() -> Checks:
    """`LitellmModel(model_name="openai/policy", model_kwargs={"api_base": ...}, cost_tracking="ignore_errors")`"""
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_model import LitellmModel

    options: Any = {"model_kwargs": {"api_base": URL, "api_key": KEY}, "cost_tracking": "ignore_errors"}
    model = LitellmModel(model_name="openai/policy", **options)

    def run() -> str:
        command = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo it is 3"
        call = json.dumps({"name": "bash", "arguments": {"command": command}})
        templates: Any = {"system_template": "You act.", "instance_template": "{{ task }}"}
        agent = DefaultAgent(model, LocalEnvironment(), **templates)
        return str(agent.run(f"SAY<<so <tool_call>{call}</tool_call>>>"))

    return {"tools": run}


def qwen_agent() -> Checks:
    """`Assistant(llm={"model": "policy", "model_server": ..., "generate_cfg": {"use_raw_api": True}}, ...)`"""
    from qwen_agent.agents import Assistant
    from qwen_agent.tools.base import BaseTool

    class Add(BaseTool):  # type: ignore[misc]
        name, description, parameters = "add", "Add two numbers.", PARAMETERS

        def call(self, params: Any, **_: Any) -> str:
            return add(**self._verify_json_format_args(params))

    def run(text: str, **config: Any) -> Any:
        llm = {"model": "policy", "model_server": URL, "api_key": KEY, "model_type": "oai", "generate_cfg": config}
        *_, last = Assistant(llm=llm, function_list=[Add()]).run(user(text))
        return last[-1]["content"]

    return {"stream": lambda: run(PLAIN), "tools": lambda: run(TOOLS) + run(TOOLS, use_raw_api=True)}


def turns(program: str, tool: str, /, *, environment: dict[str, str] | None = None, **arguments: Any) -> Checks:
    """Turns of a command-line agent, each with a home and working folder of its own, which has the file `note`."""

    def run(text: str) -> str:
        home = tempfile.mkdtemp()
        Path(home, "note").write_text("SAY<<it is 3>>")
        own = {"HOME": home, "PATH": f"{NODE / '.bin'}:{os.environ['PATH']}", **(environment or {})}
        options: Any = {"env": os.environ | own, "cwd": home, "capture_output": True, "text": True}
        done = subprocess.run(program, shell=True, input=text, timeout=400, **options)
        return done.stdout if done.returncode == 0 else done.stderr[-300:]

    call = json.dumps({"name": tool, "arguments": arguments})
    return {"stream": lambda: run(PLAIN), "tools": lambda: run(f"SAY<<so <tool_call>{call}</tool_call>>>")}


def claude_code() -> Checks:
    """`claude -p --model policy --allowedTools=Bash`"""
    return turns("claude -p --model policy --allowedTools=Bash", "Bash", command="cat note", description="Read.")


def codex() -> Checks:
    """`codex exec -m policy -c web_search=disabled -c model_provider=own -c 'model_providers.own={base_url=...}' -`"""
    provider = f'{{name="own", base_url="{URL}", env_key="OPENAI_API_KEY"}}'
    command = "codex exec -m policy -c web_search=disabled -c model_provider=own -c "
    command += shlex.quote(f"model_providers.own={provider}")
    command += " --sandbox danger-full-access --skip-git-repo-check -"
    return turns(command, "exec_command", cmd="cat note")


def opencode() -> Checks:
    """`opencode run -m own/policy`; `own` is an `@ai-sdk/openai-compatible` provider in `OPENCODE_CONFIG_CONTENT`"""
    options = {"baseURL": "{env:OPENAI_BASE_URL}", "apiKey": "{env:OPENAI_API_KEY}"}
    own = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": {"policy": {}}}
    environment = {"OPENCODE_CONFIG_CONTENT": json.dumps({"provider": {"own": own}})}
    command = "opencode run -m own/policy"
    return turns(command, "bash", environment=environment, command="cat note", description="Read.")


def qwen_code() -> Checks:
    """`qwen --auth-type openai --yolo`"""
    words = {"command": "cat note", "is_background": False, "description": "Read."}
    return turns("qwen --auth-type openai --yolo", "run_shell_command", **words)


def installed(package: str) -> str:
    """Return a package's version, of Python or else of npm: `openai` is both."""
    try:
        return version(package)
    except PackageNotFoundError:
        return str(json.loads((NODE / package / "package.json").read_text())["version"])


def main(name: str, is_structured: bool, packages: list[str]) -> None:
    """Run a client's checks: those of structured output, or the others."""
    made = globals()[name]
    checks = {name: check for name, check in made().items() if (name == "structured") == is_structured}
    result: dict[str, Any] = {"write": made.__doc__, "versions": {package: installed(package) for package in packages}}
    for check, run in checks.items():
        try:
            answer = run()
            result[check] = "ok" if WORDS[check] in str(answer) else f"answered {answer!s:.200}"
        except BaseException as error:
            result[check] = f"{type(error).__name__}: {error!s:.300}"
    print(json.dumps(result), flush=True)
    os._exit(0)  # whatever threads a framework leaves behind


if __name__ == "__main__":
    os.chdir(tempfile.mkdtemp())
    main(sys.argv[1], sys.argv[2] == "structured", sys.argv[3:])
