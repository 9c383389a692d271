"""Every error the project raises on purpose, as one tree.

    ArealLiteError
    ├── ConfigError(ValueError)        a recipe, an override or a combination of settings is wrong
    ├── DataError(ValueError)          a data file or a row of it is wrong
    ├── WireError(ValueError)          a message cannot be read: malformed, too large, another schema version
    ├── LedgerError(RuntimeError)      a request the ledger's state does not allow
    ├── QueueError(RuntimeError)       the sample queue's process died
    ├── QueueTimeout(TimeoutError)     the sample queue did not answer in time
    ├── StallError(TimeoutError)       nothing moved for too long; names who was late, on what, since when
    │   └── FruitlessError(StallError)     groups end, and not one can be trained
    ├── PluginError(ValueError)        a function that a recipe names cannot be found or imported
    ├── VerifierError(RuntimeError)    a verifier cannot be loaded or used
    │   └── VerifierUnavailable(VerifierError)  its service does not answer: it is asked again
    ├── TrainerError(RuntimeError)      a trainer rank failed; names the rank
    │   └── RankDied(TrainerError)         its process ended
    ├── HandoverError(RuntimeError)    a weight hand-over failed; names the engines
    ├── EngineError(RuntimeError)      a generation engine died or refused
    ├── EpisodeError(RuntimeError)     one sample could not be generated: counted by its reason, the run goes on
    └── CheckpointError(ValueError)    a checkpoint is missing, broken, or from another model or recipe

A message has three parts: what was expected, what came, what to do. Each class also inherits the
standard kind, so `except ValueError` works, and takes one string, so that it survives pickling
between Ray processes.
"""

__all__ = [
    "ArealLiteError",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "EngineError",
    "EpisodeError",
    "FruitlessError",
    "HandoverError",
    "LedgerError",
    "PluginError",
    "QueueError",
    "QueueTimeout",
    "RankDied",
    "StallError",
    "TrainerError",
    "VerifierError",
    "VerifierUnavailable",
    "WireError",
]


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


class QueueError(ArealLiteError, RuntimeError):
    """The sample queue's process died."""


class QueueTimeout(ArealLiteError, TimeoutError):
    """The sample queue did not answer within the client's deadline."""


class StallError(ArealLiteError, TimeoutError):
    """Nothing made progress within the deadline; the message names who was late."""


class FruitlessError(StallError):
    """Groups end, and not one can be trained; to begin again would not help."""


class PluginError(ArealLiteError, ValueError):
    """A function that a recipe names cannot be found or imported."""


class VerifierError(ArealLiteError, RuntimeError):
    """A verifier cannot be loaded, started, or trusted any longer."""


class VerifierUnavailable(VerifierError):
    """Raised by a verify function whose service does not answer at present: the call is tried again."""

    def __init__(self, message: str = "", *, retry_after_s: float = 0.0) -> None:
        """Say why, and for how many seconds the service does not want to be asked, if it said so."""
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
        """Those to give up, each with why, where they are known."""


class EngineError(ArealLiteError, RuntimeError):
    """A generation engine died, or refused a request."""


class EpisodeError(ArealLiteError, RuntimeError):
    """One sample could not be generated. Reads `workflow:<type>: <message>`, or `generation:...` by the engine."""

    @property
    def reason(self) -> str:
        """Culprit and type of the error, such as `workflow:TimeoutError`."""
        return ":".join(str(self).split(":")[:2])


class CheckpointError(ArealLiteError, ValueError):
    """A checkpoint is missing, broken, or belongs to another model or recipe."""
