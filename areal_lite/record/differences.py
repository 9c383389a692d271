"""Settings as one flat table: what differs from the defaults, and between runs."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from areal_lite.config.offline import parse_saved_config
from areal_lite.errors import ConfigError


def changed(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the settings that differ from their defaults, by `section.field`; None for a config of another version."""
    try:
        return dict(_pairs(parse_saved_config(config).model_dump(exclude_defaults=True)))
    except ConfigError:
        return None


def differences(tables: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return what is not the same in all configs or summaries: by `section.field`, one value each, None for none."""
    flat = [dict(_pairs(table)) for table in tables]
    keys = dict.fromkeys(key for found in flat for key in found)
    rows = {key: [found.get(key) for found in flat] for key in keys}
    return {key: row for key, row in rows.items() if any(value != row[0] for value in row)}


def _pairs(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _pairs(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
