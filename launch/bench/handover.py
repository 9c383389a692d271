"""What `areal-lite bench handover` measures, and what its figures are.

Who hands over is in `launch/handover_bench.py`, the command in `handover_command.py`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from areal_lite.config.recipe import Config, parse_config
from areal_lite.errors import ConfigError
from areal_lite.events import Event
from areal_lite.launch.bench.output import middle, with_spread

__all__ = [
    "COLUMNS",
    "PARTS",
    "HandoverBench",
    "Size",
    "bench_config",
    "cells",
    "parse_size",
    "parts",
    "row",
    "targets",
]

COLUMNS = (
    "model", "parameters", "MB", "stage", "pause", "load", "resume", "paused", "copy", "over copy",
)  # fmt: skip
"""All times in milliseconds."""

PARTS: dict[str, tuple[str, str]] = {
    "staging_s": ("handover_start", "handover_published"),
    "pausing_s": ("pause", "paused"),
    "loading_s": ("update_received", "update_loaded"),
    "resuming_s": ("update_loaded", "resumed"),
    "paused_s": ("pause", "resumed"),
}
"""Parts of a hand-over, from one event to another. While the weights are staged the engine generates."""

_MAX_CONTEXT = 256
_PROMPT_TOKENS = 16
"""Room for the longest prompt of the recipe, which nobody asks for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A built-in model's shape."""

    width: int
    """Hidden size."""
    layers: int

    def __str__(self) -> str:
        return f"{self.width}x{self.layers}"


@dataclass(frozen=True, kw_only=True)
class HandoverBench:
    """Settings of the bench."""

    sizes: tuple[Size, ...] = (
        Size(width=64, layers=4),
        Size(width=128, layers=4),
        Size(width=256, layers=4),
        Size(width=512, layers=4),
        Size(width=512, layers=8),
    )
    repeats: int = 20
    """Hand-overs per model."""
    warm: int = 3
    """Hand-overs before them that do not count."""
    requests: int = 16
    """In flight all the time."""
    new_tokens: int = _MAX_CONTEXT - _PROMPT_TOKENS
    """Of each request."""
    every_s: float = 0.3
    """Seconds of generation between two hand-overs."""
    copies: int = 5
    """Memory copies behind each hand-over."""

    def __post_init__(self) -> None:
        """Check.

        Raises:
            ConfigError: A setting is too small.
        """
        if self.repeats < 1 or self.requests < 0:
            raise ConfigError(
                f"a bench needs a repeat and no fewer than 0 requests, got --repeats {self.repeats} "
                f"--requests {self.requests}"
            )


def parse_size(text: str) -> Size:
    """Return the size that `WIDTHxLAYERS` names.

    Raises:
        ConfigError: It names none.
    """
    width, _, layers = text.partition("x")
    if not (width.isdecimal() and layers.isdecimal() and int(width) >= 64 and int(width) % 64 == 0 and int(layers) > 0):
        raise ConfigError(f"a model is WIDTHxLAYERS, the width a multiple of 64, got {text!r}: try 256x4")
    return Size(width=int(width), layers=int(layers))


def bench_config(bench: HandoverBench, size: Size) -> Config:
    """Return a recipe for one model: random weights, one engine, one trainer rank, gloo."""
    return parse_config(
        {
            "run": {"device": "cpu"},
            "model": {
                "path": "builtin:arith",
                "max_context": _MAX_CONTEXT,
                "warm_start": {"steps": 0, "hidden_size": size.width, "num_layers": size.layers},
            },
            "data": {"source": "arith"},
            "rollout": {"workers": 1, "slots": max(bench.requests, 1), "max_new_tokens": bench.new_tokens},
            "verifier": {"function": "last_number"},
            "weights": {"transport": "gloo"},
        }
    )


def parts(events: Iterable[Event]) -> dict[str, float]:
    """Return the seconds of each part of one hand-over.

    Args:
        events: Of the hand-over's lane and of one engine's, from its start to its end.

    Raises:
        KeyError: An event is missing.
    """
    times = {event["kind"]: event["time"] for event in events}
    return {part: times[end] - times[start] for part, (start, end) in PARTS.items()}


def row(
    size: Size, *, parameters: int, size_bytes: int, handovers: Sequence[Mapping[str, float]], copies_s: Sequence[float]
) -> dict[str, Any]:
    """Return a model's row.

    Args:
        size: The model.
        parameters: How many it has.
        size_bytes: Of what is handed over.
        handovers: From `parts`, one per hand-over.
        copies_s: Median time of a memory copy of the same bytes behind each hand-over.
    """
    return {
        "width": size.width,
        "layers": size.layers,
        "parameters": parameters,
        "size_bytes": size_bytes,
        **{part: [handover[part] for handover in handovers] for part in PARTS},
        "copy_s": list(copies_s),
        "over_copy": [handover["paused_s"] / copy_s for handover, copy_s in zip(handovers, copies_s, strict=True)],
    }


def targets(rows: Iterable[Mapping[str, Any]]) -> list[Any]:
    """Return nothing: what a pause may take depends on what else there is to do; see `bench modes`."""
    return []


def cells(row: Mapping[str, Any]) -> list[str]:
    """Return one row's cells: medians, in milliseconds, and the spread of the whole pause."""

    def ms(values: Sequence[float]) -> list[float]:
        return [1e3 * value for value in values]

    return [
        f"{row['width']}x{row['layers']}",
        f"{row['parameters'] / 1e6:.2f} M",
        f"{row['size_bytes'] / 1e6:.1f}",
        *(middle(ms(row[part]), ".1f") for part in PARTS if part != "paused_s"),
        with_spread(ms(row["paused_s"]), ".1f"),
        middle(ms(row["copy_s"]), ".1f"),
        middle(row["over_copy"], ".2f"),
    ]
