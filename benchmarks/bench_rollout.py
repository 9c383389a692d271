"""Tokens/s of a rollout worker against vLLM alone, and under publications (about 7 minutes).

    python benchmarks/bench_rollout.py --every 2

One engine (default recipe longtail_cpu): filled by a plain loop; by the rollout worker with queue and verifier; and
with publications at a fixed cadence that let running samples finish, or interrupt them. The processes are those of a
run, but nothing is trained. Worker and loop take the prompts of the recipe in the same order, with the same seeds.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import measuring
import ray
import typer
from one_engine import OneEngine, one_engine

from areal_lite.actors.calls import result
from areal_lite.config.recipe import Config, load_config
from areal_lite.data.cursor import make_cursor
from areal_lite.data.prompts import load_sources
from areal_lite.errors import ConfigError
from areal_lite.launch.bench.harness import CONSOLE, ratios, say
from areal_lite.launch.bench.longtail import LONGTAIL, draw_length, drawn_length
from areal_lite.launch.run.ray_session import ray_session
from areal_lite.launch.run.train import prepare_model
from areal_lite.record.paths import with_absolute_paths
from areal_lite.rollout.engine import Interrupt, Sampling
from areal_lite.rollout.runner import load_workflows
from areal_lite.rollout.worker import sample_seed
from areal_lite.rollout.workflows import single_turn
from areal_lite.types import Prompt
from areal_lite.watchdog import Watchdog

CASES = {
    "vllm": "vLLM alone",
    "worker": "rollout worker, queue, verifier",
    "drain": "the same, publications that drain",
    "recompute": "the same, publications that interrupt",
}
OVER = {"worker": "vllm", "drain": "worker", "recompute": "drain"}
"""What each case is compared with."""
AIMS = {
    "worker": ("rollout worker over vLLM alone, tokens/s", 0.95),
    "recompute": ("interruptible over drain, tokens/s", 1.12),
}

_NEVER_CLOSED = 10**9
"""Steps, and steps of staleness, that no benchmark reaches: without a trainer admission would soon close."""
_POLL_S = 0.25
"""How often the controller of a run collects events; so do we."""
Measurement = tuple[float, list[float]]
"""Tokens/s by the engine's count, and seconds of each publication, from its beginning until generation resumes."""


def main(
    words: measuring.Words = None,
    repeats: measuring.Repeats = 5,
    seconds: measuring.Seconds = 10.0,
    every: Annotated[float, typer.Option(min=1e-3, help="seconds from publication to publication")] = 5.0,
    warm: Annotated[float, typer.Option(min=0, help="seconds of each measurement that do not count")] = 4.0,
    out: measuring.Out = Path("runs/bench-rollout"),
) -> None:
    """Measure one engine's tokens/s alone, with the rollout worker, and under publications."""
    (recipe,), overrides = measuring.split_words(words, default=["longtail_cpu"])
    config = bench_config(recipe, overrides)
    model_folder = prepare_model(config, console=CONSOLE)
    say("starting engine, queue, verifier and publisher")
    with ray_session(), one_engine(config, model_folder=model_folder, logs=out / "logs") as engine:
        rollout = _MeasuredRollout(config, engine, measured_s=seconds, warm_s=warm, every_s=every)
        rows = summarise(measuring.in_turns(CASES, repeats=repeats, measure=rollout.measure))
    over = dict(zip(CASES, (row["over"] for row in rows), strict=True))
    targets = [measuring.target(name, over[case], at_least=at_least) for case, (name, at_least) in AIMS.items()]
    settings = {"recipe": recipe, "overrides": overrides, "repeats": repeats, "measured_s": seconds, "warm_s": warm,
                "publish_every_s": every}  # fmt: skip
    measuring.finish("rollout", "tokens/s of one engine", rows, settings=settings, out=out, targets=targets)


def bench_config(recipe: str, overrides: Sequence[str]) -> Config:
    """Return the recipe, with one worker and a queue that always lends.

    Raises:
        ConfigError: The recipe is wrong, or its workflow makes more than one request.
        PluginError: Its workflow cannot be loaded.
    """
    ours = {"rollout.workers": 1, "rollout.interrupt": "recompute", "queue.max_staleness": _NEVER_CLOSED,
            "queue.on_stale": "mask", "run.steps": _NEVER_CLOSED}  # fmt: skip
    config = load_config(recipe, [*overrides, *(f"{key}={value}" for key, value in ours.items())])
    _lengths_of(config)
    return with_absolute_paths(config)


def summarise(measured: Mapping[str, Sequence[Measurement]]) -> list[dict[str, Any]]:
    """Return a row per case: tokens/s of all repeats, and their ratios to what the case is compared with."""
    rates = {case: [rate for rate, _ in repeats] for case, repeats in measured.items()}
    return [
        {
            "case": CASES[case],
            "tokens_per_s": rates[case],
            "handovers_s": [seconds for _, handovers_s in repeats for seconds in handovers_s],
            "over": ratios(rates[case], rates[OVER[case]]) if case in OVER else [],
        }
        for case, repeats in measured.items()
    ]


def plain_requests(config: Config, next_prompt: Callable[[], Prompt]) -> Iterator[tuple[list[int], Sampling]]:
    """Yield prompt and sampling of each request that a worker would make, in the order of its leases, without end."""
    lengths = _lengths_of(config)
    while True:
        prompt = next_prompt()
        longest = int(prompt.row.get("max_new_tokens", config.rollout.max_new_tokens))
        for index in range(config.queue.samples_per_group):
            seed = sample_seed(config.run.seed, f"{prompt.prompt_id}#0", index)
            yield (
                list(prompt.token_ids),
                Sampling(
                    max_new_tokens=longest if lengths is None else draw_length(seed, longest=longest, **lengths),
                    temperature=config.rollout.temperature,
                    seed=seed,
                    ignore_end=lengths is not None,
                ),
            )


def _lengths_of(config: Config) -> Any:
    """Return what the recipe's workflow draws lengths with; None where its one request ends by itself."""
    workflows = load_workflows(config)
    function, arguments = workflows.loaded[workflows.default]
    if function not in (single_turn, drawn_length):
        raise ConfigError(
            "vLLM alone answers single requests: expected rollout.workflow single_turn or "
            f"{LONGTAIL}, got {config.rollout.workflow}. Fix: name another recipe"
        )
    return arguments if function is drawn_length else None


def _requests(config: Config, tokenizer: Any) -> Iterator[tuple[list[int], Sampling]]:
    return plain_requests(config, make_cursor(config, load_sources(config, tokenizer, "train")).next)


class _MeasuredRollout:
    """Measures one case after another on the same engine."""

    def __init__(self, config: Config, engine: OneEngine, *, measured_s: float, warm_s: float, every_s: float) -> None:
        self._config, self._engine, self._queue = config, engine, engine.cluster.queue
        self._measured_s, self._warm_s, self._every_s = measured_s, warm_s, every_s
        self._version, self._watchdog = 0, Watchdog(config.run.stall_timeout_s)
        self._batches = (f"step-{number}" for number in itertools.count(1))
        self._verifying = [verifier.run.remote() for verifier in engine.cluster.verifiers.values()]
        self._queue.open_admission()
        self._publish("recompute")
        engine.ask("end_worker")

    def measure(self, case: str) -> Measurement:
        """Fill the engine in one way, and count its tokens once it is warm.

        Publications come at their cadence; what counts is from the beginning of the second to that of the last.
        """
        while (batch_id := self._take()) is not None:  # what the case before left is forgotten
            self._queue.complete_step(batch_id=batch_id)
        interrupt: Any = case if case in ("drain", "recompute") else None
        generating = self._engine.serving_queue()
        if case == "vllm":
            generating = self._engine.filled(_requests, self._config.rollout.slots, alone=True)
        counts, handovers_s = list[tuple[int, float]](), list[float]()
        with generating as self._serving:
            self._wait(time.monotonic() + self._warm_s)
            self._watchdog.restart()
            begins = time.monotonic()
            while True:
                self._wait(begins)
                begins = max(begins, time.monotonic())
                counts.append(self._engine.ask("count"))
                (tokens, at), (first_tokens, first_at) = counts[-1], counts[min(len(counts) - 1, bool(interrupt))]
                self._watchdog.check(
                    tokens,
                    waiting_for="the first token of a measurement",
                    culprit=lambda: "the engine, with all slots taken",
                )
                # On a busy machine the first token may take long.
                if tokens > first_tokens and (seconds := at - first_at) >= self._measured_s:
                    return (tokens - first_tokens) / seconds, handovers_s[1:]
                if interrupt:
                    self._publish(interrupt)
                    handovers_s.append(time.monotonic() - begins)
                begins += self._every_s if interrupt else _POLL_S

    def _publish(self, interrupt: Interrupt) -> None:
        """Publish the same weights once more, as a new version where there is a batch that could have been trained."""
        batch_id = self._take()

        def stamp_ledger() -> None:
            if batch_id is not None:
                self._queue.complete_step(batch_id=batch_id)

        self._engine.publish(version=self._version, interrupt=interrupt, stamp_ledger=stamp_ledger)

    def _take(self) -> str | None:
        """Take a batch if there is one, and count the version that training it would make."""
        batch_id = next(self._batches)
        if self._queue.take(batch_id=batch_id, wait_s=0.0) is None:
            return None
        self._version += 1
        return batch_id

    def _wait(self, until: float) -> None:
        """Collect events as a controller does, until a time; raise what ended generation or verification."""
        while (left := until - time.monotonic()) > 0:
            ended, _ = ray.wait([self._serving, *self._verifying], timeout=min(left, _POLL_S))
            for reference in ended:
                result(reference)
            self._engine.cluster.collect()


if __name__ == "__main__":
    measuring.run(main)
