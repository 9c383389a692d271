"""The fields of a request, by API: those that the endpoint honours, ignores or refuses (`api_fields.yaml`).

`docs/agents.md` shows this table. Any field outside it is refused.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_lite.config.reading import read_yaml

Values = Mapping[str, Sequence[Any]]
"""The values of each field that change nothing; null never does."""

_TABLE = read_yaml(Path(__file__).with_name("api_fields.yaml"), holding="apis and fixes")


class Refusal(Exception):
    """An error that is sent instead of an answer; sending the same request again would not help."""

    def __init__(self, status: int, message: str, *, code: str = "invalid_value") -> None:
        super().__init__(f"{message:.1000}")  # it may quote the request
        self.status, self.code = status, code


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """What a request to one API may contain."""

    honoured: Sequence[str]
    ignored: Sequence[str]
    """They change neither the policy nor its input."""
    constraints: Values
    """Any other value samples from a different policy: it is refused, or left out and counted if the recipe asks."""
    refused: Values

    def checked(
        self, body: Mapping[str, Any], *, temperature: float, serve_unconstrained: bool
    ) -> tuple[dict[str, Any], list[str]]:
        """Return the fields of a request that count, and the names of the constraints that were left out.

        Args:
            temperature: Of the policy; at 0 (greedy) a request may name any.
            serve_unconstrained: Leave constraints out instead of refusing them.

        Raises:
            Refusal: A field, or its value, is not supported.
        """
        allowed = {**self.refused, **self.constraints, "temperature": (temperature or body.get("temperature"),)}
        kept, left_out = dict[str, Any](), list[str]()
        for name, value in self._flat(body):
            outer, _, inner = name.partition(".")
            if name in self.honoured or value is None or value in allowed.get(name, ()):
                (kept.setdefault(outer, {}) if inner else kept)[inner or outer] = value
            elif name in self.constraints and serve_unconstrained:
                left_out.append(name)
            elif name not in self.ignored:
                # Anthropic's SDK recognises this code, and then sends the whole conversation instead of its thread.
                code = "thread_unsupported_request" if name == "thread" else "unsupported_parameter"
                raise Refusal(400, self._reason(name, value, temperature), code=code)
        return kept, left_out

    def _flat(self, body: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yield names and values; objects with dotted names in the table are opened."""
        known = (*self.honoured, *self.ignored, *self.constraints, *self.refused)
        for name, value in body.items():
            if isinstance(value, Mapping) and any(one.startswith(f"{name}.") for one in known):
                yield from ((f"{name}.{inner}", one) for inner, one in value.items())
            else:
                yield name, value

    def _reason(self, name: str, value: Any, temperature: float) -> str:
        got = f"got {name}={value!r:.60}"
        if name in self.constraints:
            fix = _TABLE["fixes"].get(name, "leave it out, or ignore it with rollout.serve_unconstrained=true")
            return (
                f"calls must sample the policy that trains, at rollout.temperature={temperature:g}; {got}. Fix: {fix}"
            )
        return f"this API does not support {name}; {got}. Fix: {_TABLE['fixes'].get(name, 'leave it out')}"


FIELDS = {api: Fields(**kinds) for api, kinds in _TABLE["apis"].items()}
"""By the last part of an API's URL."""
