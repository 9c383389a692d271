"""Agents that are programs: their input, their output, and how they end."""

import asyncio
import functools
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from agent_builders import trained
from episode_builders import Speaker, in_loop, load, make_prompt, run
from http_server import answering
from user_run import alive, wait_until

from areal_lite.config.recipe import parse_config
from areal_lite.errors import EpisodeError
from areal_lite.rollout.agents import Llm
from areal_lite.rollout.commands import run_command
from areal_lite.rollout.runner import complete_greedily
from areal_lite.types import Sample

ASKS = """
import json, os, sys, urllib.request
task = json.loads(sys.stdin.readline())
body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": task["prompt"]}]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
)
said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
"""


def play(tmp_path: Path, program: str, **options: Any) -> Sample:
    file = tmp_path / "agent.py"
    file.write_text(ASKS + program)
    command = functools.partial(run_command, command=f"{sys.executable} {file}", **{"memory_mb": 4096} | options)
    sample, _ = trained(command, ["12"])
    return sample


@pytest.mark.parametrize(
    ("printed", "reward"),
    [("print('hm'); print(float(said == task['answer']))", 1.0), ('print(\'{"reward": 0.5, "brief": 1}\')', 0.5)],
)
def test_a_program_prints_its_reward_last(tmp_path: Path, printed: str, reward: float) -> None:
    """Seen failing with the first line."""
    sample = play(tmp_path, printed)
    assert sample.score is not None
    assert (sample.score.reward, sample.text) == (reward, "12")


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("print('hm'); print('about 1')", r"ValueError: the last line .* got 'about 1'"),
        ("", r"ValueError: the last line .* got ''"),
        ("print('\"good\"')", r"ValueError: an agent must return its reward"),
        ("print(1); exit('no tools')", r"ChildProcessError: .* exit code 0, got 1; its stderr ends with 'no tools'"),
        ("import no_such_thing", r"ChildProcessError: .*Traceback.*ModuleNotFoundError: No module named"),
        ("x = bytearray(3 * 2**30); print(1)", r"ChildProcessError: .*MemoryError"),
    ],
)
def test_a_program_that_fails_is_a_lost_sample_that_quotes_it(tmp_path: Path, program: str, message: str) -> None:
    """Seen failing (memory) without the limit, and (exit code) with the reward it printed before."""
    with pytest.raises(EpisodeError, match=f"workflow:{message}"):
        play(tmp_path, program, memory_mb=1024)


def test_a_program_asks_no_proxy_for_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a sync client. Seen failing without the variable: on many a cluster each call went to the proxy."""
    monkeypatch.setenv("NO_PROXY", "")  # so that both are as they were afterwards
    monkeypatch.setenv("no_proxy", "intern")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    play(tmp_path, "found = [os.environ[name] for name in ('NO_PROXY', 'no_proxy')]\n"
                   "assert found == ['intern,127.0.0.1'] * 2, found; print(1)")  # fmt: skip


def test_no_more_episodes_run_at_once_than_may() -> None:
    """An evaluation begins all its prompts at once; programs are 8 unless the recipe says otherwise.

    Seen failing without the gate.
    """
    running: list[int] = [0]

    async def counts(engine: Any, row: Any) -> list[Any]:
        running.append(running[-1] + 1)
        await asyncio.sleep(0.01)
        running.append(running[-1] - 1)
        return [await engine.generate(engine.prompt_ids)]

    workflows = replace(load(max_episodes=2), default="counts", loaded={"counts": (counts, {})})
    prompts = [make_prompt()] * 6
    samples = run(lambda: complete_greedily(Speaker(lambda _: "a"), prompts, max_new_tokens=9, workflows=workflows))
    assert None not in samples
    assert max(running) == 2
    assert parse_config({"rollout": {"workflow_command": "true"}}).rollout.most_episodes == 8


ORPHAN = """
import os, subprocess, sys, time
child = ("import os, time; os.fork() and os._exit(0); os.setsid(); name = {file!r} + '.new'; "
         "open(name, 'w').write(str(os.getpid())); os.rename(name, {file!r}); time.sleep(3600)")
subprocess.Popen([sys.executable, "-c", child])
while not os.path.exists({file!r}):
    time.sleep(0.01)
"""


@pytest.mark.parametrize("ending", ["time.sleep(3600)", "print(1)"])
@in_loop
async def test_all_that_a_program_started_ends_with_it(tmp_path: Path, ending: str) -> None:
    """One that forks into another session, and never ends or ends at once.

    Seen failing with its own process alone killed.
    """
    file, program = tmp_path / "pid", tmp_path / "agent.py"
    program.write_text(ORPHAN.format(file=str(file)) + ending)
    llm = Llm(base_url="", api_key="a-key-of-this-test-alone", anthropic_base_url="")
    playing = asyncio.create_task(run_command({}, llm, command=f"{sys.executable} {program}", memory_mb=4096))
    while not file.exists():
        await asyncio.sleep(0.01)
    if "sleep" in ending:
        playing.cancel()
    await asyncio.wait([playing])
    wait_until(lambda: not alive(int(file.read_text())), "end of the process left behind")


LOOKS = """
found = []
for place in {places!r}:
    try:
        open(place).close()
        found.append(place)
    except OSError:
        pass
try:
    open("agent.py", "a")
    found.append("writes")
except OSError:
    pass
try:
    urllib.request.urlopen({address!r}, b"0", timeout=5)
    found.append("network")
except OSError:
    pass
open("/tmp/notes", "w")
print(json.dumps({{"reward": float(said == "12"), "seen": len(found) + ("AREAL_SECRET" in os.environ)}}))
"""


@pytest.mark.sandbox
def test_a_program_in_the_sandbox_reaches_the_model_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other file, server, variable or process. Without the sandbox all are visible.

    Seen failing with the network shared, and with the whole file system in view.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AREAL_SECRET", "1")
    with answering() as server:
        program = LOOKS.format(places=[__file__, f"/proc/{os.getpid()}/environ"], address=server.url)
        seen = [play(tmp_path, program, is_sandboxed=is_sandboxed).score for is_sandboxed in (True, False)]
    assert [(score and score.reward, score and score.parts["seen"]) for score in seen] == [(1.0, 0.0), (1.0, 5.0)]
