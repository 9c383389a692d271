"""An environment of the package `verifiers`: remainders by 7, in two tries. Recipes name it by its module."""

import sys
from collections.abc import Iterable

import verifiers.v1 as vf

__all__ = ["Plain", "Remainders"]

PROGRAM = """
import json, sys, urllib.request
base, key, model, *said = sys.argv[1:]
messages = [{"role": "user", "content": said[0]}]
for number in range(2):
    body = json.dumps({"model": model, "messages": messages, "max_tokens": 4}).encode()
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    answer = json.load(urllib.request.urlopen(urllib.request.Request(base + "/chat/completions", body, headers)))
    messages += [answer["choices"][0]["message"], {"role": "user", "content": "2"}]
"""


class Data(vf.TaskData):
    answer: str


class Remainder(vf.Task[Data]):
    @vf.reward(weight=2.0)
    async def share(self, trace: vf.Trace) -> float:
        """How much of what was said last are right digits."""
        said = trace.branches[-1].messages[-1].content or ""
        return said.count(self.data.answer) / (len(said) + 1)

    @vf.metric
    async def tries(self, trace: vf.Trace) -> float:
        return float(len(trace.calls))


class Config(vf.TasksetConfig):
    last: int = 40


class Remainders(vf.Taskset[Remainder, Config]):
    def load(self) -> Iterable[Remainder]:
        for number in range(self.config.last):
            if number == 39:
                raise AssertionError("read further than asked")
            yield Remainder(Data(prompt=str(number), answer=str(number % 7)), self.config.task)


class Plain(vf.Harness[vf.HarnessConfig]):
    """A program that calls the model by the standard library; those of the package fetch what they need."""

    NEEDS_CONTAINER = EXECUTES_CODE = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
        tool_interception_url: str | None = None,
    ) -> vf.ProgramResult:
        return await runtime.run_program(
            [sys.executable, "-c", PROGRAM, endpoint, secret, ctx.model, str(data.prompt)], {}
        )
