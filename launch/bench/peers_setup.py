"""TRL's own virtual environment, made when it is first needed. Called by `areal-lite bench peers`.

It holds TRL and accelerate alone, pinned, and takes everything else (torch, transformers, datasets, numpy) from the
environment that this runs in, through a `.pth` file. So both sides compute with the same builds, TRL cannot change
what the project runs with, and 2 MB are downloaded in place of 1 GB.
"""

import json
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

from areal_lite.errors import ConfigError

__all__ = ["PINS", "TRL_SCRIPT", "ensure_trl"]

PINS = {"trl": "1.16.0", "accelerate": "1.15.0"}
"""TRL's trainer changes its defaults between minor versions; accelerate is the one that was tried with it."""
TRL_SCRIPT = Path(__file__).with_name("peers_trl.py")

_TIMEOUT_S = 600.0
_SHOWN_LINES = 8


def ensure_trl(cache: Path, *, say: Callable[[str], None]) -> Path:
    """Return the Python of TRL's environment; makes the environment where it is missing.

    Args:
        cache: Gets a folder for these pins; one that is not complete, or that another Python made, is made anew.
        say: Shows a line.

    Raises:
        ConfigError: It cannot be made; the message has the end of what went wrong.
    """
    folder = cache / "_".join(f"{name}-{pin}" for name, pin in PINS.items())
    marker, python = folder / "complete.json", folder / "bin" / "python"
    if marker.is_file() and json.loads(marker.read_text()) == _surroundings():
        return python
    say(f"making an environment for TRL {PINS['trl']} in {folder} (once; under a minute on a good network) ...")
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _run([sys.executable, "-m", "venv", str(folder)], doing="make a virtual environment")
    pins = [f"{name}=={pin}" for name, pin in PINS.items()]
    # Without dependencies: the project's packages serve, and pip must not bring a second torch.
    options = ["--no-deps", "--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    _run([str(python), "-m", "pip", "install", *options, *pins], doing=f"install {' and '.join(pins)}")
    (purelib,) = folder.glob("lib/python*/site-packages")
    (purelib / "areal_lite_packages.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    _run([str(python), "-P", str(TRL_SCRIPT)], doing="import TRL")
    marker.write_text(json.dumps(_surroundings()))
    return python


def _surroundings() -> dict[str, Any]:
    """Return what an environment is made for: this Python, and the packages that it borrows."""
    return {"python": sys.version, "packages": sysconfig.get_path("purelib")}


def _run(command: list[str], *, doing: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _failed(doing, repr(error)) from error
    if done.returncode != 0:
        # pip names every local index folder that lacks a package: noise that would hide the cause.
        lines = [line for line in (done.stdout + done.stderr).splitlines() if "is ignored: it is neither" not in line]
        raise _failed(doing, "\n".join(lines[-_SHOWN_LINES:]))


def _failed(doing: str, got: str) -> ConfigError:
    return ConfigError(
        f"bench peers must be able to {doing} for TRL's environment, got:\n{got}\nSee to its cause (network? disk? "
        "pip's configured index?) and run this again: it starts over"
    )
