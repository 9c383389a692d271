"""Collects the events and gauges of a run's workers for the recorder, and prints what a user must know."""

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from areal_lite.events import EventBuffer
from areal_lite.launch.run.cluster import Cluster
from areal_lite.launch.run.restarts import State
from areal_lite.launch.run.view import View
from areal_lite.record.recorder import OnlineRecorder
from areal_lite.record.reward_watch import WATCHED
from areal_lite.sample_queue.access import Role

_EVERY_S = 0.5


class Collector:
    """Feeds the recorder, and prints each kind of problem once."""

    def __init__(
        self, cluster: Cluster, *, recorder: OnlineRecorder, view: View, logs: str, own: list[EventBuffer]
    ) -> None:
        """Connect the cluster to the recorder.

        Args:
            logs: Folder that messages point to.
            own: Event lanes of the controller itself; the last one gets `lost`, `joining` and `rejoined`.
        """
        self._cluster, self._recorder, self._view = cluster, recorder, view
        self._logs, self._own = logs, own
        self._gauges: dict[str, dict[str, Any]] = {}
        self._collected_at = 0.0
        self._printed: set[str] = set()

    def collect(self, *, force: bool = False) -> None:
        """Collect from all workers, at most twice a second unless forced."""
        now = time.monotonic()
        if not force and now - self._collected_at < _EVERY_S:
            return
        self._collected_at = now
        events, gauges = self._cluster.collect()
        self._print_changes()
        self._gauges |= gauges
        self._print_problems()
        for lane in self._own:
            events += lane.drain()
        self._recorder.feed(events)

    def _verifiers(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield each worker's figures of each verifier."""
        for gauges in self._gauges.values():
            yield from gauges.get("verifiers", {}).items()

    def errors(self) -> dict[str, str]:
        """The first error message of each reason for which episodes failed."""
        return {name: text for gauges in self._gauges.values() for name, text in gauges.get("errors", {}).items()}

    def figures(self) -> dict[str, Any]:
        """Figures of a row, over all workers so far: verifiers', prefix-cache hits, agents' calls without a field."""
        parts = defaultdict[str, list[Mapping[str, Any]]](list)
        for name, figures in self._verifiers():
            parts[name].append(figures)
        context = self._total("context_tokens")
        return {
            "verifier_failures": self._failures(),
            "verifiers": {name: _together(parts[name]) for name in sorted(parts)},
            "prefix_cache_hit_fraction": self._total("cached_tokens") / context if context else None,
            "agent_calls_unconstrained": self._unconstrained(),
        }

    def _failures(self) -> dict[str, int]:
        """Failed verifications so far, by reason, without those of `reward_watch`, which cost no sample."""
        return _added(figures["failures"] for name, figures in self._verifiers() if not name.startswith(WATCHED))

    def _unconstrained(self) -> dict[str, int]:
        """Agents' calls served without a field that they asked for, by field."""
        return _added(gauges.get("unconstrained", {}) for gauges in self._gauges.values())

    def _total(self, gauge: str) -> float:
        return float(sum(gauges.get(gauge, 0) for gauges in self._gauges.values()))

    def tokens(self) -> float:
        """Tokens generated since the start or restart, where engines reset their counts; lost workers included."""
        return self._total("tokens")

    def work(self) -> tuple[float, float]:
        """Tokens generated and verifier calls so far: grows while workers work."""
        return self._total("tokens"), self._total("calls")

    def _print_problems(self) -> None:
        """Print each kind of problem once."""
        problems = {}
        outcome = "such samples are dropped and counted; see"
        for reason in self._failures():
            problems[reason] = f"a verification failed ({reason}): {outcome} {self._logs}/verifier-*.log"
        for name, figures in self._verifiers():
            if name.startswith(WATCHED) and figures["failures"]:
                words = ", ".join(figures["failures"])
                problems[name] = (
                    f"{name} failed ({words}): its figures lack those samples; see {self._logs}/verifier-*.log"
                )
        for reason, text in self.errors().items():
            problems[reason] = f"an episode failed ({text}): {outcome} {self._logs}/rollout-*.log"
        if fields := self._unconstrained():
            problems["unconstrained"] = (
                f"agents' calls ask for {', '.join(fields)}: they are served without it, and counted, because of "
                "rollout.serve_unconstrained=true"
            )
        for kind, text in problems.items():
            if kind not in self._printed:
                self._printed.add(kind)
                self._view.print(text, style="yellow")

    def _print_changes(self) -> None:
        changes, self._cluster.restarts.changes = self._cluster.restarts.changes, []
        for name, state, reason in changes:
            if reason:
                self._own[-1].emit("lost", worker=name, state=state, reason=reason)
                outcome = "the other workers continue" if state is State.DEAD else "restarting"
                # A verifier's death ends the run, with this message.
                if state is not State.DEAD or not name.startswith(Role.VERIFIER):
                    self._view.print(f"{name} died ({reason}); {outcome}", style="yellow")
                self.keep_counts(name)
            elif state is State.JOINING:
                self._own[-1].emit("joining", worker=name)
            else:
                self._own[-1].emit("rejoined", worker=name)
                verb = "is back" if self._cluster.restarts.has_restarted(name) else "has joined"
                self._view.print(f"{name} {verb}")

    def keep_counts(self, worker: str) -> None:
        """Keep a lost or dismissed worker's counts beside its successor's; it has no work in progress any more."""
        gauges = self._gauges.pop(worker, {})
        ended = {name: figures | {"busy": 0, "waiting": 0} for name, figures in gauges.get("verifiers", {}).items()}
        self._gauges[f"{worker}, lost at {time.monotonic()}"] = gauges | {"verifiers": ended}


def _added(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    return dict(sum(map(Counter[str], counts), Counter[str]()))


def _together(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join one verifier's figures of several workers: the sum of counts, the worst of latencies."""
    counted = ("calls", "timeouts", "restarts", "busy", "waiting")
    return {
        **{name: sum(part[name] for part in parts) for name in counted},
        "failures": _added(part["failures"] for part in parts),
        **{name: max(part[name] for part in parts) for name in ("latency_p50_s", "latency_p95_s")},
    }
