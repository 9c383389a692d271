"""Programs for the verifier `code` that try to get out of their sandbox, or to pass tests without solving them."""

import contextlib
from pathlib import Path
from typing import Any

import yaml
from places import FIXTURES

from areal_lite.verify.builtin.code import code

PROCESSES = 6
LIMITS = {"wall_s": 20.0, "total_s": 30.0, "cpu_s": 5, "memory_mb": 256, "disk_mb": 8, "processes": PROCESSES}
ENDLESS = {name: {"wall_s": 1.5, "total_s": 3.0} for name in ("fork bomb", "sleep", "ignores signals")}
"""Attacks that only their time ends."""
_PROGRAMS = yaml.safe_load((FIXTURES / "code_programs.yaml").read_text())
ATTACKS = {name: _PROGRAMS["help"] + text for name, text in _PROGRAMS["attacks"].items()}
CHEATS, CHEAT_TESTS = _PROGRAMS["cheats"], _PROGRAMS["cheat_tests"]


def run_code(program: str, **options: Any) -> Any:
    """Score a program; options are arguments of the verifier, the others columns of the row."""
    arguments = {name: options.pop(name) for name in code.model_fields if name in options}
    return code(**arguments)("", program, "", **options)


def processes_with(token: str) -> list[Path]:
    """Return the living processes whose command line holds a text."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            found += [process] if token in (process / "cmdline").read_text(errors="replace") else []
    return found
