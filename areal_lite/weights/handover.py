"""The hand-over of weights to the engines, as one written order.

Over a transport that stages (`gloo`) the engines receive while they generate, and are paused for the load alone:

    1 send every parameter; the engines stage them
    2 each engine: pause, load what is staged, stamp the version      3 stamp the ledger      4 resume, at once

Over one that loads as it receives (`nccl`, `ipc`):

    1 pause all engines      2 send every parameter; the engines load them; where one fails, without it once more
    3 stamp the version (engines, then the ledger)      4 resume, at once

Nobody waits for the answer to `resume`, which comes late from an engine that has just got busy: it is heard at the next
hand-over.

The sending is vLLM's weight-transfer protocol, driven by the trainer (`publisher.py`). The ledger's version moves when
every engine has the new weights and none has resumed, so that no group is admitted at v while an engine still
generates with v - 1. An engine that fails any step is dropped from the group and never resumes; the others go on.
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
        """Give an engine up: end it, and let its work return to the queue."""

    def raise_if_none(self) -> None:
        """Raise when there is nobody left.

        Raises:
            HandoverError: No engine is left.
        """


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
    """Give all engines the trainer's present weights under a new version.

    Args:
        engines: The live engines.
        publish: Sends the weights to the live engines; returns per engine None or why it failed.
        staged: Whether an engine that was sent the weights has them staged only, or loaded.
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
        # They are one group: what broke for one has broken for all, and nobody has the weights whole.
        while _drop_failed(engines, publish()):
            engines.raise_if_none()
        events.emit("handover_published", version=version)
        engines.each("stamp", version)
    stamp_ledger()
    events.emit("handover_stamped", version=version)
    engines.begin("resume")
    events.emit("handover_end", version=version)


def _drop_failed(engines: EngineGroup, failures: Mapping[str, str | None]) -> bool:
    """Drop who failed; whether there was anybody."""
    failed = {name: reason for name, reason in failures.items() if reason is not None}
    for name, reason in failed.items():
        engines.drop(name, reason)
    return bool(failed)
