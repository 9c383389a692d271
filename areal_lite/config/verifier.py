"""The sections `verifier` and `reward_watch`: how completions are scored."""

from collections.abc import Iterable
from typing import Annotated

from pydantic import Field

from areal_lite.config.plugins import known_names, name_problems
from areal_lite.config.section import HERE, JsonArguments, OwnName, Refers, Section


class VerifierSettings(Section):
    """One verifier and the processes it runs in."""

    function: str
    """a known name, module:function or path.py:function, see docs/verifiers.md"""
    arguments: Annotated[JsonArguments, Refers.ARGUMENTS] = {}
    """keyword arguments of every call, e.g. {model: runs/rm}"""
    timeout_s: float = Field(5.0, gt=0)
    """hard deadline in seconds for one call; for a batch, per completion"""
    processes: int = Field(1, ge=1)
    """killable processes in each verifier worker"""
    concurrency: int = Field(1, ge=1)
    """calls in flight in one process; more than 1 is for async functions"""
    memory_mb: int = Field(1024, ge=16)
    """memory in MiB that a process, and each that it starts, may use beyond what it used when ready"""
    unavailable_s: float = Field(90.0, ge=0)
    """seconds to retry a service that does not answer, with growing pauses"""
    max_failure_share: float = Field(0.5, ge=0, le=1)
    """share of failures in the last 50 calls above which the run stops; 1 = never"""


class VerifierConfig(VerifierSettings):
    """Scoring."""

    function: str | dict[str, float] = "last_number"  # type: ignore[assignment]
    """a known name, module:function, path.py:function, or several with weights: {math: 1, format: 0.2}"""
    named: dict[OwnName, VerifierSettings] = {}
    """further verifiers by name, for sums, and for rows and sources that choose their own"""
    eval_function: str | None = None
    """verifier of held-out prompts, which gets no verifier.arguments; null = as in training"""
    workers: int = Field(1, ge=1)
    """verifier workers"""
    skip_special_tokens: bool = False
    """remove all special tokens from the text of completions; false = only BOS, EOS and padding"""

    @property
    def weights(self) -> dict[str, float]:
        """The verifiers of a row that chooses none, with their weights."""
        return {self.function: 1.0} if isinstance(self.function, str) else dict(self.function)

    @property
    def choosable(self) -> set[str]:
        """Names that a row's column `verifier` may hold: the recipe's own and those of entry points."""
        return {*self.named, *known_names("verifier")}

    def settings_of(self, name: str) -> VerifierSettings:
        """Return how a verifier is run: one of `named` by its own settings, any other function by this section's.

        The section's `arguments` are for `function` alone, where that is one function.
        """
        if name in self.named:
            return self.named[name]
        shared = {key: getattr(self, key) for key in VerifierSettings.model_fields}
        arguments = self.arguments if name == self.function else {}
        return VerifierSettings(**shared | {"function": name, "arguments": arguments})

    def for_evaluation(self) -> "VerifierConfig":
        """Return what an evaluation alone needs: where it has its own verifier, the others need not even be there."""
        if self.eval_function is None:
            return self
        named = {name: settings for name, settings in self.named.items() if name == self.eval_function}
        return self.model_copy(update={"function": self.eval_function, "arguments": {}, "named": named})

    def _problems(self) -> Iterable[str]:
        if not self.weights:
            yield "verifier.function must name a verifier, got {}: name one, or several with their weights"
        wanted = [("function", name) for name in self.weights] + [("eval_function", self.eval_function)]
        for key, name in wanted:
            if name not in self.named:
                yield from name_problems(f"verifier.{key}", name, kind="verifier")
        for name, settings in self.named.items():
            yield from name_problems(f"verifier.named.{name}.function", settings.function, kind="verifier")
        if not isinstance(self.function, str) or self.function in self.named:
            to_do = "give each its own in verifier.named"
            yield from self.unread(["arguments"], f"with verifier.function={self.function}", to_do=to_do)


class RewardWatchConfig(Section):
    """Verifiers that are never trained on; they show whether the trained reward is being gamed, see docs/rlhf.md."""

    verifiers: dict[OwnName, VerifierSettings] = {}
    """by name, e.g. {truth: {function: math}}; they score the held-out rows of each evaluation; {} = no watch"""
    share: float = Field(0.05, ge=0, le=1)
    """share of the training groups that they score too"""
    stop: bool = False
    """save and end the run if it gains trained reward while it loses a watched one; false = warn only"""

    def _problems(self) -> Iterable[str]:
        for name, settings in self.verifiers.items():
            yield from name_problems(f"{HERE}.verifiers.{name}.function", settings.function, kind="verifier")
        if not self.verifiers:
            yield from self.unread(("share", "stop"), f"without {HERE}.verifiers")
