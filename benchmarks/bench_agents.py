"""Tokens/s of an agent over the endpoint, against the same dialogue as a workflow (about 5 minutes).

    python benchmarks/bench_agents.py

One engine with 32 slots, filled by the rollout worker with the prompts of a recipe (default arith_cpu); there is no
queue, no verifier and no trainer. A dialogue has a few short turns, and the environment's word after each is a single
character, which takes 0, 0.1 or 1 s. Both sides have the same dialogue: `multi_turn`, and an agent with `llm.client`;
or, in the third case, with such a client over a socket. Also shows how full a slow environment leaves the engine.
"""

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import measuring

from areal_lite.config.recipe import Config, load_config
from areal_lite.data.cursor import make_cursor
from areal_lite.data.encode import load_tokenizer
from areal_lite.data.prompts import load_sources
from areal_lite.events import EventBuffer
from areal_lite.launch.bench.harness import CONSOLE, ratios
from areal_lite.launch.run.train import prepare_model
from areal_lite.rollout.runner import Workflows
from areal_lite.rollout.vllm_engine import VllmEngine
from areal_lite.rollout.worker import RolloutWorker
from areal_lite.rollout.workflows import multi_turn
from areal_lite.types import Group, Lease, Prompt
from areal_lite.watchdog import Watchdog

TURNS, TURN_TOKENS = 3, 16
"""Of the model's in a dialogue; tokens of one at most."""
ROOM = TURNS * (TURN_TOKENS + 1)
WARM_S = 3.0
"""Seconds of each measurement that do not count."""
_REPLY, _POLL_S = "?", 0.02
Case = tuple[str, float]
"""`workflow`, `agent` or `socket`, and the seconds its environment takes for each word."""
CASES: list[Case] = [("workflow", 0.0), ("agent", 0.0), ("socket", 0.0)]
CASES += [(side, latency_s) for latency_s in (0.1, 1.0) for side in ("workflow", "agent")]


def main(
    words: measuring.Words = None,
    repeats: measuring.Repeats = 3,
    seconds: measuring.Seconds = 10.0,
    out: measuring.Out = Path("runs/bench-agents"),
) -> None:
    """Measure agents over the endpoint beside a built-in workflow, on the same engine."""
    (recipe,), overrides = measuring.split_words(words, default=["arith_cpu"])
    ours = ["rollout.slots=32", f"rollout.max_new_tokens={ROOM}", f"model.max_context={ROOM + 64}"]
    config = load_config(recipe, [*ours, *overrides])
    folder = prepare_model(config, console=CONSOLE)
    prompts = load_sources(config, load_tokenizer(folder, config.model), "train")
    with asyncio.Runner() as runner:
        engine = runner.run(VllmEngine.start(config, model_folder=str(folder)))

        async def measure(case: Case) -> tuple[float, float]:
            lender = _Lender(make_cursor(config, prompts).next)
            figures = await _measure(config, case, seconds, engine=engine, lender=lender)
            await engine.reset()
            await engine.resume()
            return figures

        try:
            measured = measuring.in_turns(CASES, repeats=repeats, measure=lambda case: runner.run(measure(case)))
        finally:
            runner.run(engine.close())
    rows = summarise(measured)
    settings = {"recipe": recipe, "overrides": overrides, "repeats": repeats, "measured_s": seconds, "warm_s": WARM_S,
                "turns": TURNS, "turn_tokens": TURN_TOKENS}  # fmt: skip
    found = {(row["side"], row["latency_s"]): row for row in rows}
    targets = [
        measuring.target("an agent over the built-in workflow, tokens/s", found["agent", 0.0]["over"], at_least=0.9),
        measuring.target("slots full, environment of 1 s", found["agent", 1.0]["full"], at_least=0.8),
    ]
    measuring.finish("agents", "dialogues of one engine", rows, settings=settings, out=out, targets=targets)


def summarise(measured: Mapping[Case, Sequence[tuple[float, float]]]) -> list[dict[str, Any]]:
    """Return a row per case: tokens/s and share of full slots of all repeats, and the agent's over the workflow's."""
    rates = {case: [rate for rate, _ in repeats] for case, repeats in measured.items()}
    return [
        {
            "side": side,
            "latency_s": latency,
            "tokens_per_s": rates[side, latency],
            "full": [full for _, full in repeats],
            "over": ratios(rates[side, latency], rates["workflow", latency]) if side != "workflow" else [],
        }
        for (side, latency), repeats in measured.items()
    ]


async def _measure(
    config: Config, case: Case, measured_s: float, *, engine: Any, lender: "_Lender"
) -> tuple[float, float]:
    """Return tokens/s and the share of slots that were taken."""
    rollout, clock, (side, latency_s) = config.rollout, asyncio.get_running_loop().time, case
    workflows = _workflows(config, side, latency_s)
    client: Any = lender  # in the place of one
    worker = RolloutWorker(client, engine, config, events=EventBuffer("rollout/0"), workflows=workflows)
    if side != "workflow":
        workflows.endpoint.start()
    begin = clock() + WARM_S
    working = asyncio.ensure_future(worker.run())
    seen, began, watchdog = list[int](), 0, Watchdog(config.run.stall_timeout_s)
    try:
        while (now := clock()) < begin + measured_s or not lender.num_done:
            watchdog.check(engine.tokens_generated, waiting_for="tokens", culprit=lambda: "the engine, or its worker")
            if working.done():
                working.result()
            if now >= begin:
                began = began or engine.tokens_generated
                seen.append(min(worker.gauges()["running"], rollout.slots))
            await asyncio.sleep(_POLL_S)
        rate = (engine.tokens_generated - began) / (clock() - begin)
    finally:
        await worker.stop()
        await working
    return rate, sum(seen) / len(seen) / rollout.slots


def _workflows(config: Config, side: str, latency_s: float) -> Workflows:
    async def step(messages: object, row: object) -> tuple[str, bool]:
        await asyncio.sleep(latency_s)
        return _REPLY, False

    async def agent(task: Mapping[str, Any], llm: Any) -> float:
        text = task["prompt"]
        client = (llm if side == "agent" else replace(llm, endpoint=None)).client
        for number in range(TURNS):
            if number:
                await asyncio.sleep(latency_s)
                text += _REPLY
            reply = await client.completions.create(model=llm.model, prompt=text, max_tokens=TURN_TOKENS)
            text += reply.choices[0].text
        await client.close()
        return 0.0

    dialogue = {"step": step, "max_turns": TURNS, "max_turn_tokens": TURN_TOKENS}
    one = (multi_turn, dialogue) if side == "workflow" else (agent, {})
    context = config.model.max_context
    return Workflows(default=side, loaded={side: one}, turn_timeout_s=60.0, max_context=context)


class _Lender:
    """Stands for the sample queue's client: it always lends, and forgets what it gets."""

    def __init__(self, next_prompt: Callable[[], Prompt]) -> None:
        self._next, self._numbers, self.num_done = next_prompt, itertools.count(), 0

    async def lease_rollout(self, *, worker: str, limit: int, wait_s: float) -> list[Lease]:
        await asyncio.sleep(0)
        prompts = [self._next() for _ in range(limit)]
        groups = [Group(group_id=f"{prompt.prompt_id}#0", prompt=prompt) for prompt in prompts]
        return [Lease(lease_id=f"lease-{next(self._numbers)}", group=group, version=0) for group in groups]

    async def complete_rollout(self, **_: object) -> bool:
        self.num_done += 1
        return True

    async def fail(self, *, lease_id: str, reason: str) -> bool:
        raise RuntimeError(f"every dialogue must come through, {lease_id} failed: {reason}")

    async def heartbeat(self, **_: object) -> list[str]:
        return []


if __name__ == "__main__":
    measuring.run(main)
