"""Evaluations: greedy completions of held-out prompts, beside generation, scored by a verifier worker."""

import math
import statistics
from collections.abc import Mapping
from dataclasses import replace
from textwrap import shorten
from typing import Any

from areal_lite.actors.calls import Calls, describe
from areal_lite.events import EventBuffer, now
from areal_lite.launch.run.cluster import Cluster
from areal_lite.launch.run.view import View
from areal_lite.record.metrics import mean_called
from areal_lite.record.recorder import OF_EVALUATIONS, OnlineRecorder
from areal_lite.record.reward_watch import WATCHED, Alarm, alarm, by_verifier
from areal_lite.types import GIVEN, Prompt, Sample, means
from areal_lite.verify.protocol import Reply

_PART_SIZE = 16
"""Problems in a call of an engine."""
_SCORE_TIMEOUT_S = 10.0
"""How long the verifier may take for an evaluation that is cut short."""


class Evaluations:
    """One evaluation at a time, split over the live engines when it begins; `poll` advances it."""

    def __init__(
        self, cluster: Cluster, prompts: list[Prompt], *, recorder: OnlineRecorder, lane: EventBuffer, view: View
    ) -> None:
        """Prepare evaluations.

        Args:
            prompts: Held out; none = no evaluations.
        """
        self._cluster, self._prompts = cluster, prompts
        self._recorder, self._lane, self._view = recorder, lane, view
        self._calls: Calls | None = None
        """Calls of the engines that generate, then of the verifier that scores; None = no evaluation in progress."""
        self._step, self._start = 0, 0.0
        self._parts: dict[str, list[Prompt]] = {}
        self._pairs: list[tuple[Prompt, Sample | None]] | None = None
        self.is_lost = False
        """Whether the last one ended without a result."""
        self.alarm: Alarm | None = None
        """The first one of `reward_watch` since the start."""

    def __bool__(self) -> bool:
        """Whether one is in progress."""
        return self._calls is not None

    def begin(self, step: int) -> None:
        """Begin one, if there are prompts, and engines for them."""
        if self:
            self._view.print(f"the evaluation of step {step} is skipped: that of step {self._step} is still running")
            return
        engines = list(self._cluster.engines.handles.items())
        self._step, self._start, self._pairs, calls = step, now(), None, {}
        self.is_lost = False
        if self._prompts and engines:
            # All parts start at once; each has an answer of its own, so that an evaluation cut short keeps some.
            num_parts = max(len(engines), -(-len(self._prompts) // _PART_SIZE))
            for number in range(min(num_parts, len(self._prompts))):
                name, handle = engines[number % len(engines)]
                part = f"{name}, part {number + 1} of {num_parts}"
                self._parts[part] = self._prompts[number::num_parts]
                calls[part] = handle.evaluate.remote(self._parts[part])
            self._calls = Calls(calls)
        elif self._prompts:
            self.lose("no rollout worker is there")

    def lose(self, reason: str) -> None:
        """End the one in progress without a result."""
        self._view.print(f"the evaluation of step {self._step} was lost: {reason}")
        self.is_lost = True
        self.end()

    def end(self) -> None:
        """Forget the one in progress."""
        self._calls, self._parts = None, {}

    def cut_short(self) -> None:
        """End the one in progress, and keep what it has by now: completed parts are scored, the others dropped."""
        if self._calls is not None and self._pairs is None:
            finished = self._calls.values
            if not finished:
                return self.end()
            self._parts = {name: part for name, part in self._parts.items() if name in finished}
            self._advance(finished)
        self.poll(_SCORE_TIMEOUT_S)
        self.end()

    def late(self) -> str:
        """Name the workers that it waits for."""
        return ", ".join(self._calls.pending) if self._calls else ""

    def poll(self, wait_s: float = 0.0) -> None:
        """Wait up to `wait_s` seconds for results; if a worker fails or dies, the evaluation is lost."""
        if self._calls is None:
            return
        for _, error in self._calls.answers(wait_s):
            if error is not None:
                # An error that also ends the run is printed in full then.
                return self.lose(shorten(describe(error), 160, placeholder=" ..."))
        if not self._calls.pending:
            self._advance(self._calls.values)

    def _advance(self, values: Mapping[str, Any]) -> None:
        if self._pairs is None:
            if self._cluster.verifiers:
                self._calls = self._score(values)
            else:
                self.lose("no verifier worker is there")
            return
        (replies,) = values.values()
        result = self._result(self._pairs, replies)
        self.end()
        if result["problems"]:
            self._recorder.evaluation(self._step, **{name: result[name] for name in OF_EVALUATIONS})
            self._lane.emit("eval", start=self._start, **result)
        self._view.print(in_words(result), style="" if result["problems"] else "red")
        if self.alarm is None and (found := alarm(self._recorder.evaluations)) is not None:
            self.alarm = found
            self._view.print(str(found), style="yellow")
            self._lane.emit("warning", text=str(found), **found._asdict())

    def _score(self, samples_of: Mapping[str, list[Sample | None]]) -> Calls:
        """Call one verifier worker for all completions; failed episodes have none (see the workers' logs)."""
        self._pairs = [pair for name, part in self._parts.items() for pair in zip(part, samples_of[name], strict=True)]
        name, verifier = next(iter(self._cluster.verifiers.items()))
        prompts = [prompt for prompt, _ in self._pairs]
        bare = [None if one is None else replace(one, routes=None, branches=()) for _, one in self._pairs]
        return Calls({name: verifier.score.remote(prompts, bare)})

    def _result(self, pairs: list[tuple[Prompt, Sample | None]], replies: list[Reply]) -> dict[str, Any]:
        by_source = dict[str, list[float]]()
        for (prompt, _), reply in zip(pairs, replies, strict=True):
            if (reward := reply.total) is not None:
                by_source.setdefault(prompt.prompt_id.partition("/")[0], []).append(reward)
        rewards = [reward for part in by_source.values() for reward in part]
        ids = [prompt.prompt_id for prompt, _ in pairs]
        watched = by_verifier(dict(zip(ids, (reply.metrics for reply in replies), strict=True)))
        before = (one.get("called", "") for one in self._recorder.evaluations.values())
        sequences = (sequence for _, sample in pairs if sample is not None for sequence in sample.sequences)
        versions = {span.version for sequence in sequences for span in sequence.spans}
        of_watched = {f"{WATCHED}{name}": list(values.values()) for name, values in watched.items()}
        return {
            "step": self._step,
            "accuracy": sum(rewards) / len(rewards) if rewards else 0.0,
            "called": mean_called(rewards, before=before),
            "by_source": {source: sum(part) / len(part) for source, part in sorted(by_source.items())},
            "parts": means(reply.parts for reply in replies),
            "metrics": means(reply.metrics for reply in replies),
            "standard_errors": {
                name: statistics.pstdev(part) / math.sqrt(len(part))
                for name, part in {**by_source, "accuracy": rewards, **of_watched}.items()
                if part
            },
            "problems": len(rewards),
            "rewards": {row: reply.total for row, reply in zip(ids, replies, strict=True)},
            "watched": watched,
            "left_out": len(self._prompts) - len(pairs),
            "failures": len(replies) - len(rewards),
            "versions": sorted(versions - {GIVEN}),
        }


def in_words(result: Mapping[str, Any]) -> str:
    """Describe a result in one line, by source if there are several."""
    step, failures = result["step"], result["failures"]
    if not result["problems"]:
        return f"held-out mean reward at step {step}: none of {failures} completions could be scored"
    by_source = [f"{name} {value:.3f}" for name, value in result["by_source"].items()]
    return (
        f"held-out {result['called']} at step {step}: {result['accuracy']:.3f} "
        + (f"[{', '.join(by_source)}] " if len(by_source) > 1 else "")
        + f"({result['problems']} problems, versions {result['versions']}"
        + (f", {result['left_out']} not evaluated" if result["left_out"] else "")
        + (f", {failures} could not be scored)" if failures else ")")
        + "".join(f"; {name} {value:.3f}" for name, value in {**result["parts"], **result["metrics"]}.items())
    )
