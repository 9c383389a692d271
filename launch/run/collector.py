"""What the workers of a run tell about themselves: collected, written down, and shown where it matters."""

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from areal_lite.events import EventBuffer
from areal_lite.launch.run.cluster import Cluster
from areal_lite.launch.run.restarts import State
from areal_lite.launch.run.view import View
from areal_lite.record.recorder import OnlineRecorder
from areal_lite.sample_queue.access import Role

_EVERY_S = 0.5


class Collector:
    """Brings the events and gauges of all lanes to the recorder, and says once what a user must know."""

    def __init__(
        self, cluster: Cluster, *, recorder: OnlineRecorder, view: View, logs: str, own: list[EventBuffer]
    ) -> None:
        """Take note of whom to ask, of whom to tell, and of the folder that notices point to.

        Args:
            own: Lanes of the controller itself; the last one gets `lost`, `joining` and `rejoined`.
        """
        self._cluster, self._recorder, self._view = cluster, recorder, view
        self._logs, self._own = logs, own
        self._gauges: dict[str, dict[str, Any]] = {}
        self._collected_at = 0.0
        self._said: set[str] = set()

    def collect(self, *, force: bool = False) -> None:
        """Ask all workers, unless they were asked a moment ago."""
        now = time.monotonic()
        if not force and now - self._collected_at < _EVERY_S:
            return
        self._collected_at = now
        events, gauges = self._cluster.collect()
        self._say_changes()
        self._gauges |= gauges
        self._say_failures()
        self._say_unconstrained()
        for lane in self._own:
            events += lane.drain()
        self._recorder.feed(events)

    def failures(self) -> dict[str, int]:
        """Failed verifications so far, by reason."""
        return _added(gauges.get("failures", {}) for gauges in self._gauges.values())

    def errors(self) -> dict[str, str]:
        """What the first error said, of each reason for which episodes failed."""
        return {reason: told for gauges in self._gauges.values() for reason, told in gauges.get("errors", {}).items()}

    def verifiers(self) -> dict[str, Any]:
        """Failed verifications by reason, and each verifier's own figures, over all workers."""
        workers = [gauges.get("verifiers", {}) for gauges in self._gauges.values()]
        names = sorted(set().union(*workers))
        together = {name: _together([of_one[name] for of_one in workers if name in of_one]) for name in names}
        return {"verifier_failures": self.failures(), "verifiers": together}

    def engines(self) -> dict[str, Any]:
        """What engines found in their prefix caches, and calls of agents served without what they asked for."""
        context, cached = (
            sum(gauges.get(name, 0) for gauges in self._gauges.values()) for name in ("context_tokens", "cached_tokens")
        )
        return {
            "prefix_cache_hit_fraction": cached / context if context else None,
            "agent_calls_unconstrained": self._unconstrained(),
        }

    def _unconstrained(self) -> dict[str, int]:
        return _added(gauges.get("unconstrained", {}) for gauges in self._gauges.values())

    def tokens(self) -> float:
        """Tokens generated so far, by workers lost since as well."""
        return float(sum(gauge["tokens"] for gauge in self._gauges.values() if "tokens" in gauge))

    def work(self) -> tuple[float, float]:
        """What workers have done so far: tokens generated and samples scored."""
        return self.tokens(), sum(gauge.get("calls", 0) for gauge in self._gauges.values())

    def _say_unconstrained(self) -> None:
        if (fields := self._unconstrained()) and "unconstrained" not in self._said:
            self._said.add("unconstrained")
            self._view.say(
                f"calls of agents ask for {', '.join(fields)}: they are served without, and counted, as "
                "rollout.serve_unconstrained=true asks for",
                style="yellow",
            )

    def _say_failures(self) -> None:
        verifications = {reason: (f"a verification failed ({reason})", "verifier") for reason in self.failures()}
        episodes = {reason: (f"an episode failed ({told})", "rollout") for reason, told in self.errors().items()}
        for reason, (what, role) in (verifications | episodes).items():
            if reason not in self._said:
                self._said.add(reason)
                self._view.say(
                    f"{what}: such samples are left out, and counted; see {self._logs}/{role}-*.log", style="yellow"
                )

    def _say_changes(self) -> None:
        changes, self._cluster.restarts.changes = self._cluster.restarts.changes, []
        for name, state, reason in changes:
            if reason:
                self._own[-1].emit("lost", worker=name, state=state, reason=reason)
                to_come = "the others go on" if state is State.DEAD else "it is started again"
                if state is not State.DEAD or not name.startswith(Role.VERIFIER):  # else it is told as the run ends
                    self._view.say(f"{name} was lost ({reason}); {to_come}", style="yellow")
                if state is State.RESTARTING:
                    self._keep_counts(name)
            elif state is State.JOINING:
                self._own[-1].emit("joining", worker=name)
            else:
                self._own[-1].emit("rejoined", worker=name)
                self._view.say(f"{name} is back" if self._cluster.restarts.was_lost(name) else f"{name} has joined")

    def _keep_counts(self, worker: str) -> None:
        """What a lost process has done counts on beside what its successor will do; in work it has none."""
        gauges = self._gauges.pop(worker, {})
        ended = {name: figures | {"busy": 0, "waiting": 0} for name, figures in gauges.get("verifiers", {}).items()}
        self._gauges[f"{worker}, lost at {time.monotonic()}"] = gauges | {"verifiers": ended}


def _added(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    return dict(sum(map(Counter[str], counts), Counter[str]()))


def _together(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join one verifier's figures of several workers: counts add up, of the latencies the worst stands."""
    counted = ("calls", "timeouts", "restarts", "busy", "waiting")
    return {
        **{name: sum(part[name] for part in parts) for name in counted},
        "failures": _added(part["failures"] for part in parts),
        **{name: max(part[name] for part in parts) for name in ("latency_p50_s", "latency_p95_s")},
    }
