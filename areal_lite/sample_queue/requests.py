"""The table of requests, for the server and the clients of the sample queue: what `service.QueueService` declares."""

import inspect
from functools import cache
from typing import Any, get_type_hints

import msgspec

from areal_lite.errors import WireError
from areal_lite.sample_queue.service import QueueService
from areal_lite.wire import Raw, as_type

REQUESTS = frozenset(name for name, _ in inspect.getmembers(QueueService, inspect.isfunction) if name[0] != "_")
"""Names of all requests."""

NOT_REPEATABLE = frozenset({"lease_rollout", "lease_verify"})
"""A repeated lease request would lend more work; the work in a lost answer comes back when its leases expire."""


def read_fields(op: str, fields: Raw) -> dict[str, Any]:
    """Read the fields of a request that came over the wire.

    Raises:
        WireError: A field is missing, unknown, or of another type; names request and field.
    """
    kind = _fields_type(op)
    try:
        checked = as_type(fields, kind)
    except WireError as error:
        raise WireError(f"{op} takes the fields ({', '.join(kind.__struct_fields__)}): {error}") from error
    return msgspec.structs.asdict(checked)


@cache
def _fields_type(op: str) -> Any:
    hints = get_type_hints(getattr(QueueService, op), include_extras=True)
    return msgspec.defstruct(
        op, [(name, hint) for name, hint in hints.items() if name != "return"], forbid_unknown_fields=True
    )


@cache
def answer_type(op: str) -> Any:
    """Return the type of a request's result."""
    return get_type_hints(getattr(QueueService, op))["return"]
