"""Which verifiers a recipe names, and how each of them is run. Imports nothing heavy: recipes are checked with it."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from areal_lite.config.data import DataConfig
from areal_lite.config.plugins import known_names
from areal_lite.config.verifier import VerifierConfig, VerifierSettings

__all__ = [
    "chosen_by_sources",
    "held_out_config",
    "known_verifier_names",
    "short_names",
    "verifier_settings",
    "weights_of",
]


def known_verifier_names(config: VerifierConfig) -> set[str]:
    """Return what a row's column `verifier` may say: the recipe's own names, and those that need no module."""
    return {*config.named, *known_names("verifier")}


def chosen_by_sources(data: DataConfig) -> set[str]:
    """Return the verifiers that sources choose for their rows."""
    return {source.verifier for source in data.sources.values() if source.verifier}


def weights_of(config: VerifierConfig) -> dict[str, float]:
    """Return the verifiers of a row that chooses none, with their weights."""
    return {config.function: 1.0} if isinstance(config.function, str) else dict(config.function)


def verifier_settings(config: VerifierConfig, name: str) -> VerifierSettings:
    """Return how a verifier is run.

    Args:
        config: The recipe's section.
        name: Of `verifier.named`, whose settings are its own; else a function, which runs as the section says. The
            section's `arguments` are for `verifier.function` alone, where that is one function.
    """
    if name in config.named:
        return config.named[name]
    shared = {key: getattr(config, key) for key in VerifierSettings.model_fields}
    arguments = config.arguments if name == config.function else {}
    return VerifierSettings(**shared | {"function": name, "arguments": arguments})


def held_out_config(config: VerifierConfig) -> VerifierConfig:
    """Return what an evaluation alone needs: where it has its own verifier, the others need not even be there."""
    name = config.eval_function
    if name is None:
        return config
    named = {name: config.named[name]} if name in config.named else {}
    return config.model_copy(update={"function": name, "arguments": {}, "named": named})


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Return what to call verifiers in figures and messages: files without their folders, unless two would be alike.

    Example:
        >>> short_names(["math", "/srv/me/judge.py:brief"])
        {'math': 'math', '/srv/me/judge.py:brief': 'judge.py:brief'}
    """
    short = {name: Path(name).name if ".py:" in name or name.endswith(".pkl") else name for name in names}
    counts = Counter(short.values())
    return {name: text if counts[text] == 1 else name for name, text in short.items()}
