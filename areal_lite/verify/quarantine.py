"""When a verifier fails too often to be trusted: a run must not train on what little is left."""

from collections import Counter, deque

from areal_lite.errors import VerifierError
from areal_lite.verify.protocol import Reply

__all__ = ["Quarantine"]

_WINDOW, _FEWEST = 50, 20


class Quarantine:
    """Looks at the last 50 finished calls, at least 20."""

    def __init__(self, name: str, *, max_share: float) -> None:
        """Begin with no calls.

        Args:
            name: The verifier's, for the message.
            max_share: Share of failures above which it is not trusted any more; 1 = never.
        """
        self._name, self._max_share = name, max_share
        self._failures: deque[str | None] = deque(maxlen=_WINDOW)

    def add(self, reply: Reply) -> VerifierError | None:
        """Count a finished call; returns what ends the run, if anything does."""
        self._failures.append(reply.failure)
        reasons = Counter(failure for failure in self._failures if failure is not None)
        num_calls, num_failed = len(self._failures), reasons.total()
        if num_calls < _FEWEST or num_failed <= self._max_share * num_calls:
            return None
        listed = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())
        last = reply.detail.strip().rpartition("\n")[2]
        return VerifierError(
            f"the verifier {self._name} failed in {num_failed} of its last {num_calls} calls ({listed}), more than "
            f"max_failure_share={self._max_share:g} allows, and what is left may not be worth training on"
            + (f"; the last said: {last}" if reply.failure is not None and last else "")
            + f". What to do: try it alone with `areal-lite verify {self._name}`; for timeout raise timeout_s, for "
            "memory memory_mb; or raise max_failure_share"
        )
