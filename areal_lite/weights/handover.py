"""The hand-over of weights to the engines, as one written order.

With a transport that stages (`gloo`) the engines receive while they generate, and pause only to load:

    1 send every parameter; the engines stage them
    2 each engine: pause, load what is staged, stamp the version      3 stamp the ledger      4 resume, at once

With one that loads as it receives (`nccl`, `ipc`):

    1 pause all engines      2 send every parameter, which the engines load; if one fails, again without it
    3 stamp the version (engines, then the ledger)      4 resume, at once

The hand-over does not wait for the answers to `resume`, which come late from engines that are busy at once: the next
hand-over collects them.

Sending is vLLM's weight-transfer protocol, driven by the trainer (`publisher.py`). The ledger's version moves when
every engine has the new weights and none has resumed, so that no group is admitted at v while an engine still generates
with v - 1. An engine that fails a step is dropped from the group and never resumes; the others continue.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from areal_lite.events import EventBuffer
from areal_lite.rollout.engine import Interrupt


class EngineGroup(Protocol):
    """The live engines, by name."""

    def each(self, method: str, *args: Any) -> None:
        """Call all engines at once and wait for them; engines that fail are dropped.

        Raises:
            HandoverError: No engine is left.
        """

    def begin(self, method: str, *args: Any) -> None:
        """Call all engines at once; the next `each` waits for them first."""

    def drop(self, name: str, reason: str) -> None:
        """Drop an engine: end it, and let its work return to the queue."""

    def raise_if_none(self) -> None:
        """Raise a `HandoverError` when no engine is left."""


def hand_over(
    engines: EngineGroup,
    *,
    publish: Callable[[], Mapping[str, str | None]],
    staged: bool,
    stamp_ledger: Callable[[], None],
    version: int,
    interrupt: Interrupt,
    events: EventBuffer,
) -> None:
    """Give all engines the trainer's current weights under a new version.

    Args:
        engines: The live engines.
        publish: Sends the weights to the live engines; returns per engine None or why it failed.
        staged: Whether engines only stage what they are sent, or load it.
        stamp_ledger: Moves the ledger's version.
        version: The new version.
        interrupt: What a pause does to running samples.
        events: Gets `handover` with the time of each part.

    Raises:
        HandoverError: No engine is left.
    """
    events.emit("handover_start", version=version)
    if staged:
        _drop_failed(engines, publish())
        events.emit("handover_published", version=version)
        engines.each("install", interrupt, version)
    else:
        engines.each("pause", interrupt)
        events.emit("handover_paused", version=version)
        # The engines are one group: a transfer that broke for one broke for all, and none has the weights whole.
        while _drop_failed(engines, publish()):
            engines.raise_if_none()
        events.emit("handover_published", version=version)
        engines.each("stamp", version)
    stamp_ledger()
    events.emit("handover_stamped", version=version)
    engines.begin("resume")
    events.emit("handover_end", version=version)


def _drop_failed(engines: EngineGroup, failures: Mapping[str, str | None]) -> bool:
    """Drop the engines that failed; returns whether there were any."""
    failed = {name: reason for name, reason in failures.items() if reason is not None}
    for name, reason in failed.items():
        engines.drop(name, reason)
    return bool(failed)
