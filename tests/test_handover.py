"""The weight hand-over as an event list: its order, and what happens to engines that fail a step.

The engines are the real `RayEngines` over fake actors; no Ray is started.
"""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ledger_builders import FakeClock

from areal_lite.errors import EngineError, HandoverError
from areal_lite.events import EventBuffer
from areal_lite.launch import engines as engines_module
from areal_lite.launch.engines import RayEngines
from areal_lite.watchdog import Watchdog
from areal_lite.weights.handover import hand_over

TIMEOUT_S = 10.0


class FakeActor:
    """Writes every call into the common log; fails the method named in `fails`.

    `pauses_after_s` seconds of the clock pass before its pause is done; with `draining` it makes tokens meanwhile.
    """

    def __init__(
        self, name: str, log: list[str], *, fails: str | None, clock: FakeClock, pauses_after_s: float, draining: bool
    ) -> None:
        self._name, self._log, self._fails = name, log, fails
        self._clock, self._pauses_after_s, self._draining = clock, pauses_after_s, draining

    def __getattr__(self, method: str) -> Any:
        def remote(*arguments: Any) -> Callable[[float], Any]:
            if method != "progress":
                self._log.append(f"{self._name}.{method}({', '.join(map(str, arguments))})")
            return lambda timeout_s: self._result(method, timeout_s)

        return SimpleNamespace(remote=remote)

    def _result(self, method: str, timeout_s: float) -> Any:
        if method == "progress":
            return int(self._clock.now) if self._draining else 7
        if method == self._fails:
            raise EngineError(f"{self._name} died")
        if method == "pause" and self._clock.now < self._pauses_after_s:
            self._clock.now += timeout_s
            raise ray.exceptions.GetTimeoutError
        return None


class Handover:
    """One hand-over of version 5 to engines `a`, `b`, ..., and everything that happened in it."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        fails: dict[str, str],
        names: str = "ab",
        publish_failures: dict[str, str] | None = None,
        pauses_after_s: float = 0.0,
        draining: bool = False,
    ) -> None:
        self.log: list[str] = []
        self.lost: dict[str, str] = {}
        self.buffer = EventBuffer("handover")
        self._publish_failures = publish_failures or {}
        clock = FakeClock()
        handles: dict[str, Any] = {
            name: FakeActor(
                name,
                self.log,
                fails=fails.get(name),
                clock=clock,
                pauses_after_s=pauses_after_s if name == "a" else 0.0,
                draining=draining,
            )
            for name in names
        }
        killed = {id(handle): name for name, handle in handles.items()}
        monkeypatch.setattr(engines_module, "result", lambda reference, timeout_s: reference(timeout_s))
        monkeypatch.setattr(engines_module, "Watchdog", functools.partial(Watchdog, clock=clock))
        monkeypatch.setattr(engines_module.ray, "kill", lambda handle: self.log.append(f"kill {killed[id(handle)]}"))
        self.engines = RayEngines(handles, timeout_s=TIMEOUT_S, on_drop=self.lost.__setitem__)

    def run(self) -> None:
        hand_over(
            self.engines,
            publish=self._publish,
            stamp_ledger=lambda: self.log.append("ledger.version = 5"),
            version=5,
            interrupt="recompute",
            events=self.buffer,
        )

    def of(self, name: str) -> list[str]:
        """What one engine was asked to do, without the arguments."""
        return [entry.removeprefix(f"{name}.").split("(")[0] for entry in self.log if entry.startswith(f"{name}.")]

    def _publish(self) -> dict[str, str | None]:
        self.log.append("publish")
        return {name: self._publish_failures.get(name) for name in "ab"}


def test_the_order_is_the_written_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pause all, transfer, stamp the engines, then the ledger, resume all: nothing between the steps.

    Seen failing with the ledger stamped before the engines (a group could be admitted at 5 while an engine still
    stamps 4), with it stamped after the resume, and with engines resumed before all are stamped.
    """
    handover = Handover(monkeypatch, fails={})
    handover.run()
    assert handover.log == [
        "a.pause(recompute)",
        "b.pause(recompute)",
        "publish",
        "a.stamp(5)",
        "b.stamp(5)",
        "ledger.version = 5",
        "a.resume()",
        "b.resume()",
    ]
    assert handover.lost == {}


def test_the_event_log_tells_each_part_with_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    handover = Handover(monkeypatch, fails={})
    handover.run()
    assert [(event["kind"], event["version"]) for event in handover.buffer.drain()] == [
        ("handover_start", 5),
        ("handover_paused", 5),
        ("handover_published", 5),
        ("handover_stamped", 5),
        ("handover_end", 5),
    ]


@pytest.mark.parametrize("step", ["pause", "stamp", "resume"])
def test_an_engine_that_fails_a_step_is_dropped_and_the_other_goes_on(
    monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Seen failing with `drop` left out of `each`."""
    handover = Handover(monkeypatch, fails={"a": step})
    handover.run()
    order = ["pause", "stamp", "resume"]
    assert handover.of("a") == order[: order.index(step) + 1]
    assert handover.of("b") == order
    assert handover.lost == {"a": f"{step}: EngineError: a died"}
    assert list(handover.engines.handles) == ["b"]
    assert handover.log.count("kill a") == 1
    assert "kill b" not in handover.log


def test_an_engine_that_was_not_reached_is_never_stamped_nor_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No engine goes on with weights that did not load whole. Seen failing with the answer of `publish` ignored."""
    handover = Handover(monkeypatch, fails={}, publish_failures={"b": "HandoverError: parameters were damaged"})
    handover.run()
    assert handover.of("b") == ["pause"]
    assert handover.of("a") == ["pause", "stamp", "resume"]
    assert handover.lost == {"b": "HandoverError: parameters were damaged"}
    assert handover.log.index("kill b") < handover.log.index("a.stamp(5)")


def test_an_engine_that_failed_twice_is_dropped_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The transfer to an engine that died in the pause fails as well. Seen failing with `handles.pop(name)`."""
    handover = Handover(monkeypatch, fails={"a": "pause"}, publish_failures={"a": "EngineError: a died"})
    handover.run()
    assert handover.lost == {"a": "pause: EngineError: a died"}
    assert handover.log.count("kill a") == 1


def test_an_engine_that_stands_still_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """I6. Seen hanging without the watchdog."""
    handover = Handover(monkeypatch, fails={}, pauses_after_s=1e9)
    handover.run()
    assert handover.lost["a"].startswith("pause: StallError: no progress for")
    assert handover.of("a") == ["pause"]
    assert handover.of("b") == ["pause", "stamp", "resume"]


def test_draining_may_take_as_long_as_tokens_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deadline on progress, not on duration. Seen failing with one on the whole call."""
    handover = Handover(monkeypatch, fails={}, pauses_after_s=20 * TIMEOUT_S, draining=True)
    handover.run()
    assert handover.lost == {}
    assert handover.of("a") == ["pause", "stamp", "resume"]


@pytest.mark.parametrize("step", ["pause", "publish", "stamp"])
def test_without_any_engine_left_the_version_does_not_move(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """The last one's name and step are told. Seen failing without `raise_if_none`."""
    failures = dict.fromkeys("ab", "HandoverError: damaged") if step == "publish" else {}
    fails = {} if step == "publish" else dict.fromkeys("ab", step)
    handover = Handover(monkeypatch, fails=fails, publish_failures=failures)
    with pytest.raises(
        HandoverError, match=r"no rollout worker is left; the last one, b, was lost in (pause|stamp|Hand)"
    ):
        handover.run()
    assert sorted(handover.lost) == ["a", "b"]
    assert "ledger.version = 5" not in handover.log
    assert "resume" not in [*handover.of("a"), *handover.of("b")]


def test_the_last_engine_lost_in_the_resume_ends_the_run_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    handover = Handover(monkeypatch, fails={"a": "resume"}, names="a")
    with pytest.raises(HandoverError, match="was lost in resume"):
        handover.run()
