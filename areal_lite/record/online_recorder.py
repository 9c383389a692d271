"""What a reinforcement-learning run writes beside what every run does: rates and shares of time, from the clocks of its
lanes, and samples.
"""

import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from areal_lite.config.recipe import Config
from areal_lite.events import Event
from areal_lite.record.lane_clock import PAUSE_PARTS, LaneClock, fraction, rollout_clock, trainer_clock
from areal_lite.record.lanes import lane_events, sample_lengths, slices
from areal_lite.record.metrics import METRICS
from areal_lite.record.recorder import Recorder, mean_of_ends
from areal_lite.record.run_folder import RunFolder
from areal_lite.record.samples import readable_group
from areal_lite.types import Group

__all__ = ["OnlineRecorder"]


class OnlineRecorder(Recorder):
    """Everything that is written about one run of `train`."""

    def __init__(self, config: Config, folder: RunFolder) -> None:
        super().__init__(folder, METRICS)
        self._config = config
        self._clocks: dict[str, LaneClock] = {"trainer": trainer_clock()}
        self._last = self._first = _Moment(time=time.time(), tokens=0.0, steps=0, lanes={})
        self._pending: dict[str, Any] = {}

    def feed(self, events: Sequence[Event]) -> None:
        """Take events, each lane's in order of time."""
        super().feed(events)
        for event in events:
            is_lost = event["kind"] == "lost"
            lane = event["worker"] if is_lost else event["lane"]
            if lane.startswith("rollout/") and not is_lost:
                self._clocks.setdefault(lane, rollout_clock())
            if lane in self._clocks:
                self._clocks[lane].feed(event)

    def evaluation(self, step: int, accuracy: float, *, by_source: Mapping[str, float]) -> None:
        """Note a held-out accuracy, over all and by data source; it stands in the next row and in the summary."""
        self.evaluations[step] = {"accuracy": accuracy, "by_source": dict(by_source)}
        self._pending |= {"eval_accuracy": accuracy, "eval_step": step, "eval_by_source": dict(by_source)}

    def parity(self, difference: float) -> None:
        """Note a logprob difference between engines and trainer; it stands in the next row and in the summary."""
        self._pending["parity_max_abs_logprob_diff"] = difference if math.isfinite(difference) else sys.float_info.max

    def step(
        self,
        stats: Mapping[str, Any],
        *,
        step: int,
        tokens_generated: float,
        ledger: Mapping[str, int],
        **timings: float,
    ) -> dict[str, Any]:
        """Write the row of one completed trainer step.

        Args:
            stats: From the trainer.
            step: Number of completed steps, from 1; also the new version.
            tokens_generated: By all engines since their start.
            ledger: Groups by state as the row is written, which may be when the next batch is taken.
            **timings: `trainer_wait_s`, `train_s`, `publish_s`.

        Returns:
            The row.
        """
        now = time.time()
        lanes = {lane: clock.read(now) for lane, clock in self._clocks.items()}
        moment = _Moment(time=now, tokens=tokens_generated, steps=self._last.steps + 1, lanes=lanes)
        since = _Stretch(self._last, moment)
        measured = {
            **timings,
            "age_histogram": {str(age): count for age, count in stats["age_histogram"].items()},
            "paused_s": since.spent(*PAUSE_PARTS),
            **self._rates(since),
            **self._pending,
            "ledger": dict(ledger),
        }
        self._pending, self._last = {}, moment
        if moment.steps == 1:
            self._first = moment
        return self.write(step, **{**stats, **measured})

    def samples(self, step: int, groups: Iterable[Group]) -> None:
        """Write some groups of a batch in readable form."""
        self._folder.append("samples.jsonl", (readable_group(step, group) for group in groups))

    def shares(self) -> dict[str, float]:
        """Shares of the time between the first and the last trained step: idle, paused and its parts, occupancy."""
        run = _Stretch(self._first, self._last)
        workers, trainer = partial(run.share, run.workers), partial(run.share, ["trainer"])
        return {
            "rollout_occupancy": self._rates(run)["rollout_occupancy"],
            "rollout_idle_fraction": workers("idle"),
            "rollout_draining_fraction": workers("draining"),
            "trainer_idle_fraction": trainer("waiting"),
            **{f"trainer_{state}_fraction": trainer(state) for state in ("training", "publishing", "other")},
            "paused_fraction": workers(*PAUSE_PARTS),
            **{f"paused_fraction_{part}": workers(part) for part in PAUSE_PARTS},
        }

    def summary(self, status: str, *, ledger: Mapping[str, int]) -> dict[str, Any]:
        """Write `summary.json` and `trace.json`, and return the summary."""
        rows, run = self.rows, _Stretch(self._first, self._last)
        trained = rows[len(rows) - run.steps :]
        evaluations = sorted(self.evaluations.items())
        parity = [row.get("parity_max_abs_logprob_diff") for row in [*rows, self._pending]]
        events = self._folder.read("events.jsonl")
        lanes = [found for lane, found in lane_events(events).items() if lane.startswith("rollout/")]
        pauses = [end - start for found in lanes for kind, start, end, _ in slices(found)]
        figures = {
            **self._rates(run),
            "trained_tokens_per_s": sum(row["tokens_trained"] for row in trained) / run.seconds,
            **mean_of_ends(rows, "reward_mean", "reward"),
            "eval": {str(step): found["accuracy"] for step, found in evaluations},
            "eval_by_source": {str(step): found["by_source"] for step, found in evaluations},
            "length_histogram": _in_order(Counter(length // 16 * 16 for length in sample_lengths(events))),
            "age_histogram": _in_order(sum((Counter(row["age_histogram"]) for row in rows), Counter())),
            "age_max_trained": max((row["age_max"] for row in rows), default=0),
            "max_staleness": self._config.queue.max_staleness,
            "ledger": dict(ledger),
            **self.shares(),
            "publish_s_median": _median([row["publish_s"] for row in rows]),
            "pause_s_median": _median(pauses),
            "parity_max_abs_logprob_diff": max((value for value in parity if value is not None), default=None),
        }
        return self.sum_up(status, figures)

    def _rates(self, stretch: "_Stretch") -> dict[str, float]:
        slots = self._config.rollout.slots * max(len(stretch.workers), 1)
        return {
            "samples_per_s": stretch.steps * self._config.samples_per_step / stretch.seconds,
            "gen_tokens_per_s": (stretch.after.tokens - stretch.before.tokens) / stretch.seconds,
            "rollout_occupancy": stretch.spent("slot_seconds") / (stretch.seconds * slots),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Moment:
    """What was known when a row was written."""

    time: float
    tokens: float
    steps: int
    """Rows written by this process."""
    lanes: Mapping[str, Mapping[str, float]]
    """A reading of every clock."""


@dataclass(frozen=True, slots=True)
class _Stretch:
    """The time between two moments."""

    before: _Moment
    after: _Moment

    @property
    def seconds(self) -> float:
        return max(self.after.time - self.before.time, 1e-9)

    @property
    def steps(self) -> int:
        return self.after.steps - self.before.steps

    @property
    def workers(self) -> list[str]:
        return [lane for lane in self.after.lanes if lane != "trainer"]

    def spent(self, *totals: str) -> float:
        """Add up what the workers' clocks gained, in seconds."""
        lanes = [(self.before.lanes.get(lane, {}), self.after.lanes[lane]) for lane in self.workers]
        return sum(after.get(name, 0.0) - before.get(name, 0.0) for before, after in lanes for name in totals)

    def share(self, lanes: Sequence[str], *states: str) -> float:
        """Return the share of time in some states, mean over lanes."""
        before, after = self.before.lanes, self.after.lanes
        shares = [fraction(before.get(lane, {}), after.get(lane, {}), *states) for lane in lanes]
        return sum(shares) / max(len(shares), 1)


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0


def _in_order(counts: Mapping[Any, int]) -> dict[str, int]:
    return {str(value): counts[value] for value in sorted(counts, key=int)}
