"""Every error the project raises on purpose, as one tree.

    ArealLiteError
    ├── ConfigError(ValueError)        a recipe, an override or a combination of settings is wrong
    ├── DataError(ValueError)          a data file or a row of it is wrong
    ├── WireError(ValueError)          a message cannot be read: malformed, too large, another schema version
    ├── LedgerError(RuntimeError)      a request the ledger's state does not allow
    │   └── QueueClosed(LedgerError)       the run has ended, and with it the queue
    ├── QueueError(RuntimeError)       the sample queue's process died
    ├── QueueTimeout(TimeoutError)     the sample queue did not answer in time
    ├── StallError(TimeoutError)       no progress for too long; names the stuck process
    │   └── FruitlessError(StallError)     groups end, but none can be trained
    ├── PluginError(ValueError)        a function that a recipe names cannot be found or imported
    ├── VerifierError(RuntimeError)    a verifier cannot be loaded or used
    │   └── VerifierUnavailable(VerifierError)  its service does not answer: retried
    ├── TrainerError(RuntimeError)      a trainer rank failed; names the rank
    │   └── RankDied(TrainerError)         its process ended
    ├── HandoverError(RuntimeError)    a weight hand-over failed; names the engines
    ├── EngineError(RuntimeError)      a generation engine died or refused
    ├── EpisodeError(RuntimeError)     one sample could not be generated: counted by reason
    └── CheckpointError(ValueError)    a checkpoint is missing, broken, or from another model or recipe

A message has the form `what failed: expected X, got Y. Fix: Z`. Each class also inherits the standard
kind, so that `except ValueError` works, and takes one string, so that it survives pickling between
Ray processes.
"""


class ArealLiteError(Exception):
    """Base of every error raised on purpose."""


class ConfigError(ArealLiteError, ValueError):
    """A recipe, an override, or a combination of settings is wrong."""


class DataError(ArealLiteError, ValueError):
    """A data file, or too large a share of its rows, cannot be used."""


class WireError(ArealLiteError, ValueError):
    """A message is malformed, too large, or of an unknown schema version."""


class LedgerError(ArealLiteError, RuntimeError):
    """A request that the ledger's present state does not allow."""


class QueueClosed(LedgerError):
    """The run has ended, and the sample queue with it: nothing is left to ask for."""


class QueueError(ArealLiteError, RuntimeError):
    """The sample queue's process died."""


class QueueTimeout(ArealLiteError, TimeoutError):
    """The sample queue did not answer within the client's deadline."""


class StallError(ArealLiteError, TimeoutError):
    """No progress within the deadline; the message names the stuck process."""


class FruitlessError(StallError):
    """Groups end, but none can be trained; a restart would not help."""


class PluginError(ArealLiteError, ValueError):
    """A function that a recipe names cannot be found or imported."""


class VerifierError(ArealLiteError, RuntimeError):
    """A verifier cannot be loaded, started, or trusted any longer."""


class VerifierUnavailable(VerifierError):
    """Raised by a verify function whose service does not answer at present; the call is retried."""

    def __init__(self, message: str = "", *, retry_after_s: float = 0.0) -> None:
        """Set the message, and the seconds until a retry if the service named them."""
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TrainerError(ArealLiteError, RuntimeError):
    """A trainer rank died or failed; the message names it and its log."""


class RankDied(TrainerError):
    """A trainer rank's process ended."""


class HandoverError(ArealLiteError, RuntimeError):
    """A weight hand-over failed; the message names the engines concerned."""

    def __init__(self, message: str = "", *, engines: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.engines = dict(engines or {})
        """Engines to give up, with the reasons; empty if unknown."""


class EngineError(ArealLiteError, RuntimeError):
    """A generation engine died, or refused a request."""


class EpisodeError(ArealLiteError, RuntimeError):
    """One sample could not be generated. The message reads `workflow:<type>: <text>` or `generation:...`."""

    @property
    def reason(self) -> str:
        """Culprit and type of the error, such as `workflow:TimeoutError`."""
        return ":".join(str(self).split(":")[:2])


class CheckpointError(ArealLiteError, ValueError):
    """A checkpoint is missing, broken, or belongs to another model or recipe."""
