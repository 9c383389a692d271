"""When a verifier fails too often to be trusted: a run must not train on what little is left.

An absent service, a lost process and what a verifier does not apply to say nothing against it: such calls are left out.
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
        self._name, self._max_share, self._unavailable_s = name, settings.max_failure_share, settings.unavailable_s
        self._num_unavailable = 0
        self._failures: deque[str | None] = deque(maxlen=_WINDOW)

    def add(self, reply: Reply) -> VerifierError | None:
        """Count a finished call; returns what ends the run, if anything does."""
        self._num_unavailable = self._num_unavailable + 1 if reply.failure == "unavailable" else 0
        if reply.failure in NOT_ITS_OWN:
            return self._away(reply) if self._num_unavailable >= _FEWEST and self._max_share < 1 else None
        self._failures.append(reply.failure)
        reasons = Counter(failure for failure in self._failures if failure is not None)
        num_calls, num_failed = len(self._failures), reasons.total()
        if num_calls < _FEWEST or num_failed <= self._max_share * num_calls:
            return None
        listed = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())
        return VerifierError(
            f"the verifier {self._name} failed in {num_failed} of its last {num_calls} calls ({listed}), more than "
            f"max_failure_share={self._max_share:g} allows, and what is left may not be worth training on"
            + _last_word(reply)
            + f". What to do: try it alone with `areal-lite verify {self._name} --data FILE`; for timeout raise "
            "timeout_s, for memory memory_mb; or raise max_failure_share"
        )

    def _away(self, reply: Reply) -> VerifierError:
        return VerifierError(
            f"the service of the verifier {self._name} must answer, it did not for the last {self._num_unavailable} "
            f"calls, though asked again for unavailable_s={self._unavailable_s:g} seconds{_last_word(reply)}. What to "
            f"do: see whether the service runs, then try it with `areal-lite verify {self._name} --data FILE`; "
            "where it needs longer to come back, raise unavailable_s"
        )


def _last_word(reply: Reply) -> str:
    last = reply.detail.strip().rpartition("\n")[2]
    return f"; the last said: {last}" if reply.failure is not None and last else ""
