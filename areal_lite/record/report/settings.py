"""Settings of runs: what differs from the defaults, and what differs between runs."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from areal_lite.config.offline import OfflineConfig
from areal_lite.config.reading import parse_section
from areal_lite.config.recipe import Config
from areal_lite.errors import ConfigError
from areal_lite.record.report.read import RunFiles

__all__ = ["between_runs", "changed", "different_settings", "flat"]


def changed(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the settings that differ from their defaults, by `section.field`; None for a config of another version."""
    kind: type[Config] | type[OfflineConfig] = Config if config.get("command", "train") == "train" else OfflineConfig
    try:
        return flat(parse_section(config, kind).model_dump(exclude_defaults=True))
    except ConfigError:
        return None


def between_runs(runs: Sequence[RunFiles], *, of: str) -> dict[str, list[Any]]:
    """Return what is not the same in all runs.

    Args:
        runs: At least two.
        of: `config` or `summary`.

    Returns:
        By `section.field`, one value per run; None where a run has none.
    """
    tables = [flat(getattr(run, of)) for run in runs]
    keys = dict.fromkeys(key for found in tables for key in found)
    rows = {key: [found.get(key) for found in tables] for key in keys}
    return {key: row for key, row in rows.items() if any(value != row[0] for value in row)}


def different_settings(runs: Sequence[RunFiles]) -> dict[str, list[Any]]:
    """Return as `between_runs` does, without what only one run has and left at its default."""
    rows = between_runs(runs, of="config")
    chosen = [changed(run.config) for run in runs]
    if any(settings is None for settings in chosen):
        return rows
    return {key: row for key, row in rows.items() if any(settings and key in settings for settings in chosen)}


def flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested settings as one mapping by `section.field`."""
    return dict(_pairs(settings, ""))


def _pairs(settings: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _pairs(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
