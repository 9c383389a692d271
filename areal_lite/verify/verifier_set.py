"""The verifiers of a recipe, each in a pool of its own, and the choice among them for each row.

A slow verifier does not delay the calls of others.
"""

import asyncio
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from areal_lite.config.sections import RunConfig
from areal_lite.config.verifier import RewardWatchConfig, VerifierConfig, VerifierSettings
from areal_lite.record.reward_watch import WATCHED
from areal_lite.types import Prompt, Sample
from areal_lite.verify.pool import Messages, VerifierPool
from areal_lite.verify.protocol import NOT_APPLICABLE, Reply, checked, failed


class VerifierSet:
    """Scores completions with the verifier that their row, or else the recipe, names."""

    def __init__(
        self,
        config: VerifierConfig,
        *,
        watch: RewardWatchConfig | None = None,
        also: Iterable[str] = (),
        run: RunConfig | None = None,
    ) -> None:
        """Create the set; `start` starts its processes.

        Args:
            watch: Verifiers that score a share of the groups, and held-out completions, beside the others; None = none.
            also: Further verifiers that rows are known to choose: they start with the others. A verifier that only a
                row names starts when that row is scored.
            run: Its `start_timeout_s` limits importing and preparing one function; the processes get its `env`.
        """
        self._config, self._run = config, run or RunConfig()
        self._weights = config.weights
        self._settings: dict[str, VerifierSettings] = {
            name: config.settings_of(name) for name in (*self._weights, *config.named, *sorted(also))
        }
        self._held_out = self._weights
        if config.eval_function is not None:
            settings = config.for_evaluation().settings_of(config.eval_function)
            same = (name for name, others in self._settings.items() if others == settings)
            is_taken = config.eval_function in self._settings
            name = next(same, f"{config.eval_function} (held out)" if is_taken else config.eval_function)
            self._settings[name], self._held_out = settings, {name: 1.0}
        self._watch = watch or RewardWatchConfig()
        self._settings |= {f"{WATCHED}{name}": settings for name, settings in self._watch.verifiers.items()}
        self._short = short_names(self._settings)
        self._allowed = sorted(config.choosable)
        self._pools: dict[str, VerifierPool] = {}
        self._starts: dict[str, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Start the pools of all verifiers that the recipe and its sources name; `VerifierError` where one cannot."""
        await asyncio.gather(*(self._pool(name) for name in self._settings))

    async def score(
        self,
        prompt: Prompt,
        completions: Sequence[str],
        *,
        messages: Sequence[Messages] | None = None,
        held_out: bool = False,
    ) -> list[Reply]:
        """Score the completions of one prompt; one reply each, in order.

        Args:
            prompt: Its row's column `verifier` chooses, where it has one.
            messages: The turns of each completion, none where it has just one; None = none has.
            held_out: Use `verifier.eval_function`, where the recipe has one, whatever the row chooses.

        Raises:
            VerifierError: A pool cannot start, is broken or closed, or its verifier fails too often.
        """
        weights: Mapping[str, float] = self._weights
        if held_out and self._config.eval_function is not None:
            weights = self._held_out
        elif (chosen := prompt.row.get("verifier")) not in (None, ""):
            if chosen not in self._allowed:
                known = ", ".join(self._allowed)
                return [failed(f"unknown_verifier:{chosen}", f"must be one of {known}")] * len(completions)
            weights = {chosen: 1.0}
        pools = await asyncio.gather(*(self._pool(name) for name in weights))
        columns = await asyncio.gather(*(pool.score(prompt, completions, messages=messages) for pool in pools))
        if weights is not self._weights or isinstance(self._config.function, str):
            return columns[0]
        weights = {self._short[name]: weight for name, weight in weights.items()}
        rows = (dict(zip(weights, replies, strict=True)) for replies in zip(*columns, strict=True))
        return [weighted_sum(row, weights) for row in rows]

    @property
    def groups_at_once(self) -> int:
        """Groups worth holding, so that no process waits for work: the slowest pool must not hold all of them."""
        return 4 * sum(settings.processes * settings.concurrency for settings in self._settings.values())

    async def judge(self, prompt: Prompt, sample: Sample | None) -> Reply:
        """Return what a held-out completion got: its agent's own score if it has one; None is a failed episode.

        Watched rewards are among the metrics.
        """
        if sample is None:
            return failed("workflow", "")
        reply, (watched,) = await asyncio.gather(self._judged(prompt, sample), self.watch(prompt, [sample]))
        return replace(reply, metrics={**reply.metrics, **watched})

    async def _judged(self, prompt: Prompt, sample: Sample) -> Reply:
        if (score := sample.score) is not None:
            return Reply(score.total, parts=score.parts, metrics=score.metrics, failure=score.failure)
        (reply,) = await self.score(prompt, [sample.text], messages=[sample.messages], held_out=True)
        return reply

    async def watch(self, prompt: Prompt, samples: Sequence[Sample]) -> list[dict[str, float]]:
        """Return what the verifiers of `reward_watch` give each sample, by metric; a failure gives none."""
        texts, messages = [sample.text for sample in samples], [sample.messages for sample in samples]
        names = [f"{WATCHED}{name}" for name in self._watch.verifiers]
        pools = await asyncio.gather(*map(self._pool, names))
        columns = await asyncio.gather(*(pool.score(prompt, texts, messages=messages) for pool in pools))
        found: list[dict[str, float]] = [{} for _ in samples]
        for name, replies in zip(names, columns, strict=True):
            for rewards, reply in zip(found, replies, strict=True):
                rewards |= {} if reply.total is None else {name: reply.total}
        return found

    def is_watched(self, group_id: str) -> bool:
        """Whether the group is in `reward_watch.share`: always the same ones, whichever worker asks."""
        return bool(self._watch.verifiers) and zlib.crc32(group_id.encode()) < self._watch.share * 2**32

    def gauges(self) -> dict[str, Any]:
        """Return the counts of all pools together, and each pool's gauges under `verifiers`."""
        each = {self._short.get(name, name): pool.gauges() for name, pool in self._pools.items()}
        counted = ("calls", "restarts", "busy", "waiting")
        return {key: sum(gauges[key] for gauges in each.values()) for key in counted} | {"verifiers": each}

    async def close(self) -> None:
        """Kill all processes and end every waiting `score` with a `VerifierError`; idempotent."""
        for start in self._starts.values():
            start.cancel()
        await asyncio.gather(*self._starts.values(), return_exceptions=True)
        await asyncio.gather(*(pool.close() for pool in self._pools.values()))

    async def _pool(self, name: str) -> VerifierPool:
        """Return a running pool; its start outlives a caller that is cancelled, and serves the next one."""
        if name not in self._pools:
            settings = self._settings.get(name) or self._config.settings_of(name)
            short = self._short.get(name, name)
            self._pools[name] = VerifierPool(
                settings, start_timeout_s=self._run.start_timeout_s, name=short, environment=self._run.given_env
            )
            self._starts[name] = asyncio.create_task(self._pools[name].start())
        await asyncio.shield(self._starts[name])
        return self._pools[name]


def weighted_sum(replies: Mapping[str, Reply], weights: Mapping[str, float]) -> Reply:
    """Return one reply for several: `reward = sum of weight * reward`, and step rewards likewise.

    Returns:
        A reward, with each verifier's own, unweighted, among `parts`; or a failure, where any verifier failed: a part
        of a sum is another quantity. One that does not apply is no part, unless none does. A sum that is no number of
        float32 fails as `inf`.

    Example:
        >>> replies = {"math": Reply(1.0), "format": Reply(0.5, parts={"tags": 0.5})}
        >>> total = weighted_sum(replies, {"math": 1.0, "format": 0.2})
        >>> total.reward, total.parts
        (1.1, {'math': 1.0, 'format': 0.5, 'format/tags': 0.5})
    """
    if applicable := {name: reply for name, reply in replies.items() if reply.failure != NOT_APPLICABLE}:
        replies = applicable
    total = 0.0
    steps: list[tuple[int, float]] = []
    parts: dict[str, float] = {}
    metrics: dict[str, float] = {}
    feedback: list[str] = []
    for name, reply in replies.items():
        if reply.reward is None:
            return failed(f"{name}:{reply.failure}", reply.detail)
        total += weights[name] * reply.reward
        steps += [(end, weights[name] * value) for end, value in reply.step_rewards]
        parts |= {name: reply.reward} | {f"{name}/{part}": value for part, value in reply.parts.items()}
        metrics |= {f"{name}/{metric}": value for metric, value in reply.metrics.items()}
        feedback += [f"{name}: {reply.feedback}"] if reply.feedback else []
    return checked(Reply(total, parts, tuple(sorted(steps)), "\n".join(feedback), metrics))


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Return the names of verifiers for figures and messages: files without their folders, unless two would be alike.

    Example:
        >>> short_names(["math", "/srv/me/judge.py:brief"])
        {'math': 'math', '/srv/me/judge.py:brief': 'judge.py:brief'}
    """
    short = {name: Path(name).name if ".py:" in name or name.endswith(".pkl") else name for name in names}
    counts = Counter(short.values())
    return {name: text if counts[text] == 1 else name for name, text in short.items()}
