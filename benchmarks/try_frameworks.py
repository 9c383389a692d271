"""Try clients of agent frameworks, as they are, against the endpoint; what they did goes into docs/agents.md.

    PYTHONPATH=tests/support .venv/bin/python benchmarks/try_frameworks.py

It installs the newest packages from PyPI and npm into a temporary folder (about 5 GB), and takes ten minutes; the
clients in JavaScript need npm. `pytest -m frameworks` does the same, and asserts that every check is ok.
"""

import argparse
import asyncio
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agent_builders import TOOLS_TEMPLATE
from episode_builders import Speaker, make_prompt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from areal_lite.config.sections import RolloutConfig
from areal_lite.launch.bench.harness import surroundings
from areal_lite.rollout.commands import run_command
from areal_lite.rollout.endpoint import Endpoint
from areal_lite.rollout.engine import Sampling
from areal_lite.rollout.runner import Workflows

HERE = Path(__file__).with_name("frameworks")
DOCS = Path(__file__).parents[1] / "docs"
PATIENCE_S = 900

CLIENTS = {
    "openai_chat": ["openai"],
    "openai_responses": ["openai"],
    "anthropic": ["anthropic"],
    "litellm": ["litellm"],
    "langchain_openai": ["langchain-openai"],
    "langchain_anthropic": ["langchain-anthropic"],
    "langgraph": ["langgraph", "langchain-openai"],
    "openai_agents": ["openai-agents"],
    "instructor": ["instructor"],
    "smolagents": ["smolagents[openai]"],
    "dspy": ["dspy"],
    "autogen": ["autogen-ext[openai]", "autogen-agentchat"],
    "mini_swe_agent": ["mini-swe-agent"],
    "qwen_agent": ["qwen-agent"],
    "llama_index": ["llama-index-llms-openai-like"],
    "pydantic_ai": ["pydantic-ai-slim[openai]"],
}
ALONE = ("llama_index", "pydantic_ai")
"""Clients that would take older packages of others, or get older ones."""
UNDECLARED = ["soundfile"]
"""What qwen-agent imports without asking for it."""
CHECKS = ("plain", "stream", "tools", "overflow", "structured")
STRUCTURED = ("langchain_openai", "instructor", "dspy", "pydantic_ai")
NODE = {
    "openai_node": ["openai"],
    "anthropic_node": ["@anthropic-ai/sdk"],
    "ai_chat": ["ai", "@ai-sdk/openai"],
    "ai_responses": ["ai", "@ai-sdk/openai"],
}
PROGRAMS = {
    "claude_code": ["@anthropic-ai/claude-code"],
    "codex": ["@openai/codex"],
    "opencode": ["opencode-ai"],
    "qwen_code": ["@qwen-code/qwen-code"],
}
"""Agents of the command line, one turn at a time."""


def byte_tokenizer() -> Any:
    """A token for each byte, as frameworks write what the tests' characters do not cover."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = Tokenizer(models.BPE(vocab={one: number for number, one in enumerate(alphabet)}, merges=[]))
    plain.pre_tokenizer, plain.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<|im_end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = TOOLS_TEMPLATE
    return tokenizer


def said(text: str) -> str:
    """What the last text of a context asks for."""
    asked = re.findall("SAY<<(.*?)>>(?!>)", text.replace("\\n", "\n"), re.DOTALL)
    return asked[-1] if asked else "hello"


def played(command: list[str], *, serve_unconstrained: bool = False) -> dict[str, Any]:
    """Run a client as an agent; return what it prints, with the number of its ways."""

    async def agent(task: Mapping[str, Any], llm: Any) -> float:
        async with asyncio.timeout(PATIENCE_S):
            memory_mb = rollout.command_memory_mb
            result.update(await run_command({}, llm, command=shlex.join(command), memory_mb=memory_mb))
        return 1.0

    async def scenario() -> Any:
        endpoint = Endpoint(rollout)
        workflows = Workflows(
            default="own",
            loaded={"own": (agent, {})},
            turn_timeout_s=PATIENCE_S,
            max_context=150_000,
            endpoint=endpoint,
        )
        sampling = Sampling(max_new_tokens=4000, temperature=1.0)
        try:
            sample = await workflows.sample(engine, make_prompt(), sampling=sampling, seed_of=lambda call: call)
            return sample, dict(endpoint.unconstrained)
        finally:
            await endpoint.close()

    rollout = RolloutConfig(tool_parser="hermes", serve_unconstrained=serve_unconstrained)
    result: dict[str, Any] = {}
    engine = Speaker(said, tokenizer=byte_tokenizer())
    sample, unconstrained = asyncio.run(scenario())
    return result | {"branches": len(sample.branches), "unconstrained": unconstrained}


def install(folder: Path) -> None:
    """Install the clients' packages: one environment for most of them, one for each that stands alone, one of node."""

    def run(*words: str) -> None:
        path = f"{folder}/node_modules/.bin:{os.environ['PATH']}"  # npm chooses packages by the version of its node
        environment = os.environ | {"UV_NATIVE_TLS": "1", "VIRTUAL_ENV": "", "PATH": path}
        subprocess.run(words, check=True, cwd=folder, env=environment, timeout=1800)

    run(sys.executable, "-m", "venv", "uv")
    run("uv/bin/pip", "install", "-q", "uv")
    together = [package for name, packages in CLIENTS.items() if name not in ALONE for package in packages]
    for name, packages in {"together": [*together, *UNDECLARED], **{name: CLIENTS[name] for name in ALONE}}.items():
        run("uv/bin/uv", "venv", "-q", "--python", sys.executable, name)
        run("uv/bin/uv", "pip", "install", "-q", "--python", f"{name}/bin/python", *packages)
    npm = ("npm", "install", "--silent", "--prefix", ".")
    run(*npm, "node@22")
    run(*npm, *{package for packages in (NODE | PROGRAMS).values() for package in packages}, "zod")


def tried(name: str, folder: Path) -> dict[str, Any]:
    """Try a client with the defaults; structured output where constraints are left out."""
    if name in NODE:
        names, command = NODE[name], ["node_modules/.bin/node", str(HERE / "clients.mjs"), name]
    elif name in PROGRAMS:
        names, command = PROGRAMS[name], [sys.executable, str(HERE / "clients.py"), name]
    else:
        python = folder / (name if name in ALONE else "together") / "bin" / "python"
        names, command = [one.partition("[")[0] for one in CLIENTS[name]], [str(python), str(HERE / "clients.py"), name]
    row = {"client": name, **played([*command, "other", *names])}
    assert row.pop("unconstrained") == {}, row
    if name in STRUCTURED:
        further = played([*command, "structured", *names], serve_unconstrained=True)
        row |= {"structured": further["structured"], "left_out": list(further["unconstrained"])}
    return row


def main(folder: Path) -> list[dict[str, Any]]:
    """Try all clients, with their packages in a folder; write the table of the docs, and return its rows."""
    install(folder)
    os.chdir(folder)  # node and the command-line agents are found from there
    rows = []
    for name in (*CLIENTS, *NODE, *PROGRAMS):
        rows.append(tried(name, folder))
        print(json.dumps(rows[-1]), flush=True)
    (DOCS / "frameworks.json").write_text(json.dumps({**surroundings(), "rows": rows}, indent=1) + "\n")
    subprocess.run([sys.executable, DOCS / "tables.py"], check=True)
    return rows


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main(Path(tempfile.mkdtemp()))
