"""The error tree: complete, of standard kinds, and whole after a trip between processes."""

import inspect
import pickle

import pytest

from areal_lite import errors
from areal_lite.errors import ArealLiteError

MESSAGE = "queue.max_staleness must be 0 or more, got -1: set it to 0"


@pytest.mark.parametrize(("name", "cls"), inspect.getmembers(errors, inspect.isclass))
def test_an_error_is_ours_of_a_standard_kind_and_survives_pickling_with_its_message(
    name: str, cls: type[Exception]
) -> None:
    """Seen failing with a constructor of two arguments (`TypeError` while unpickling, which Ray would show instead)."""
    copy = pickle.loads(pickle.dumps(cls(MESSAGE)))
    assert type(copy) is cls
    assert str(copy) == MESSAGE
    assert issubclass(cls, ArealLiteError)
    assert cls is ArealLiteError or issubclass(cls, ValueError | RuntimeError | TimeoutError)
