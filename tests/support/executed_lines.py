"""Counts the executed lines of a part of the package: what a call costs, whatever else the machine does."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def executed_lines(folder: str) -> Iterator[Counter[str]]:
    """Count this thread's lines by file; not those of a callback elsewhere, as the garbage collector may have."""
    lines = Counter[str]()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if f"areal_lite/{folder}/" not in frame.f_code.co_filename:
            return None
        lines[frame.f_code.co_filename] += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(before)
