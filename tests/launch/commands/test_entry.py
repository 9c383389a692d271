"""Signals at the first moments of a command."""

import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, sys, types
from areal_lite.launch.commands import entry

class Commands(types.ModuleType):
    def __getattr__(self, name):
        if "{moment}" == "import":
            os.kill(os.getpid(), signal.{number})
        return lambda: os.kill(os.getpid(), signal.{number})

sys.modules["areal_lite.launch.commands.main"] = Commands("main")
sys.exit(entry.main())
"""


@pytest.mark.parametrize("moment", ["import", "command"])
@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT"])
def test_a_signal_ends_the_command_with_130(moment: str, number: str) -> None:
    """While the commands are imported, and later. Seen failing with code -15, and with a traceback."""
    program = PROGRAM.format(moment=moment, number=number)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 130
    assert "Traceback" not in ended.stderr
