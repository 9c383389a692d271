"""The error tree: complete, of standard kinds, and whole after a trip between processes."""

import inspect
import pickle

import pytest

from areal_lite import errors
from areal_lite.errors import ArealLiteError

CLASSES = [value for _, value in inspect.getmembers(errors, inspect.isclass)]
MESSAGE = "queue.max_staleness must be 0 or more, got -1: set it to 0"


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_an_error_survives_pickling_with_its_message(cls: type[Exception]) -> None:
    """Seen failing with a constructor of two arguments (`TypeError` while unpickling, which Ray would show instead)."""
    copy = pickle.loads(pickle.dumps(cls(MESSAGE)))
    assert type(copy) is cls
    assert str(copy) == MESSAGE


@pytest.mark.parametrize("cls", [cls for cls in CLASSES if cls is not ArealLiteError], ids=lambda cls: cls.__name__)
def test_every_error_is_ours_and_of_a_standard_kind(cls: type[Exception]) -> None:
    assert issubclass(cls, ArealLiteError)
    assert issubclass(cls, ValueError | RuntimeError | TimeoutError)
