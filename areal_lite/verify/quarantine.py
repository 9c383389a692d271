"""When a verifier fails too often to be trusted: a run must not train on the few samples that remain.

An absent service, and completions to which a verifier does not apply, do not count against it.
"""

from collections import Counter, deque

from areal_lite.config.verifier import VerifierSettings
from areal_lite.errors import VerifierError
from areal_lite.verify.protocol import NOT_APPLICABLE, Reply

_WINDOW, _FEWEST = 50, 20
NOT_ITS_OWN = ("unavailable", NOT_APPLICABLE)


class Quarantine:
    """Looks at the last 50 finished calls, at least 20; and whether any of the last 20 was answered at all."""

    def __init__(self, name: str, settings: VerifierSettings) -> None:
        self._name, self._settings = name, settings
        self._num_unavailable = 0
        self._failures: deque[str | None] = deque(maxlen=_WINDOW)

    def add(self, reply: Reply) -> VerifierError | None:
        """Count a finished call; returns the error that ends the run, if any."""
        allowed = self._settings.max_failure_share
        self._num_unavailable = self._num_unavailable + 1 if reply.failure == "unavailable" else 0
        if reply.failure in NOT_ITS_OWN:
            if self._num_unavailable < _FEWEST or allowed == 1:
                return None
            return self._error(
                f"its service did not answer the last {self._num_unavailable} calls, each retried for "
                f"unavailable_s={self._settings.unavailable_s:g} s",
                reply,
                fix="check that the service runs; if it needs longer to come back, raise unavailable_s",
            )
        self._failures.append(reply.failure)
        reasons = Counter(failure for failure in self._failures if failure is not None)
        num_calls, num_failed = len(self._failures), reasons.total()
        if num_calls < _FEWEST or num_failed <= allowed * num_calls:
            return None
        listed = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())
        return self._error(
            f"it failed in {num_failed} of its last {num_calls} calls ({listed}), more than "
            f"max_failure_share={allowed:g} allows; too few scored samples remain to train on",
            reply,
            fix="for timeout raise timeout_s, for memory memory_mb; or raise max_failure_share",
        )

    def _error(self, problem: str, reply: Reply, *, fix: str) -> VerifierError:
        last = reply.detail.strip().rpartition("\n")[2]
        return VerifierError(
            f"the verifier {self._name} cannot be trusted: {problem}{f'; last error: {last}' if last else ''}. "
            f"Fix: try it with `areal-lite verify {self._name} --data FILE`; {fix}"
        )
