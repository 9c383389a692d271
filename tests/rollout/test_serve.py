"""`areal-lite serve`: what an agent's author tries by hand, with a stand-in for the engine."""

import asyncio
import contextlib
import io
import os
import re
import subprocess
import sys
from typing import Any

import openai
import pytest
from chat_builders import CHATML, make_tokenizer
from episode_builders import Speaker
from rich.console import Console

from areal_lite.config.recipe import parse_config
from areal_lite.errors import EngineError
from areal_lite.launch.commands.serve import on_own_screen, serve_model
from areal_lite.rollout.vllm_engine import VllmEngine

PATIENCE_S = 120


def test_the_printed_address_and_key_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """With OpenAI's own client; the engine is closed at the end. Seen failing without `endpoint.start`."""
    engine = Speaker(["four"], tokenizer=make_tokenizer(CHATML))

    async def start(*_: object, **__: object) -> Any:
        return engine

    monkeypatch.setattr(VllmEngine, "start", start)
    shown = io.StringIO()

    async def scenario() -> str | None:
        config = parse_config({"model": {"max_context": 4000}})
        serving = asyncio.create_task(serve_model(config, "", console=Console(file=shown, width=200)))
        try:
            async with asyncio.timeout(PATIENCE_S):
                while "Ctrl-C" not in shown.getvalue():
                    await asyncio.sleep(0.01)
                url, key = re.findall(r"export OPENAI_\w+=(\S+)", shown.getvalue())
                async with openai.AsyncOpenAI(base_url=url, api_key=key) as client:
                    asked: Any = [{"role": "user", "content": "2+2=?"}]
                    reply = await client.chat.completions.create(model="any", messages=asked)
        finally:
            serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await serving
        return reply.choices[0].message.content

    assert asyncio.run(scenario()) == "four"
    assert engine.calls == ["close"]


def test_the_engines_output_is_on_stderr_after_an_error_only(capfd: pytest.CaptureFixture[str]) -> None:
    """Seen failing with its words on the screen, of an error too, and with an error that keeps them."""
    with on_own_screen() as console:
        os.write(1, b"a warning\n")
        os.write(2, b"another\n")
        console.print("the address")
    assert capfd.readouterr() == ("the address\n", "")
    with contextlib.suppress(EngineError), on_own_screen():
        os.write(2, b"the cause\n")
        raise EngineError("it has ended")
    assert capfd.readouterr() == ("", "the cause\n")


def test_what_was_printed_before_is_on_the_screen() -> None:
    """Also if it goes to a pipe that another process flushes. Seen failing without the flush before."""
    code = (
        "import sys; from areal_lite.launch.commands.serve import on_own_screen\n"
        "sys.stdout.write('said before')\nwith on_own_screen(): sys.stdout.flush()"
    )
    env = os.environ | {"PYTHONUNBUFFERED": ""}
    assert subprocess.check_output([sys.executable, "-c", code], text=True, timeout=300, env=env) == "said before"
