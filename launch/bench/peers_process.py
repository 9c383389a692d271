"""TRL's side of `bench peers`: a process of its own, in an environment of its own.

The environment is made when it is first needed. It holds TRL and accelerate alone, pinned, and takes everything else
(torch, transformers, datasets, numpy) from the one that this runs in, through a `.pth` file. So both sides compute with
the same builds, TRL cannot change what the project runs with, and 2 MB are downloaded in place of 1 GB.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from areal_lite.errors import ConfigError, StallError, TrainerError
from areal_lite.launch.bench.peers_trl import read_line
from areal_lite.launch.bench.peers_work import Learning

__all__ = ["PINS", "TRL_SCRIPT", "ensure_trl", "run_trl"]

PINS = {"trl": "1.16.0", "accelerate": "1.15.0"}
"""TRL's trainer changes its defaults between minor versions; accelerate is the one that was tried with it."""
TRL_SCRIPT = Path(__file__).with_name("peers_trl.py")
_INSTALL_S = 600.0
_SILENCE_S = 300.0
"""Seconds without a line after which TRL's process is given up; a step takes one, its start ten."""
_SHOWN_LINES = 8

# ---------------------------------------------------------------- TRL's process


def run_trl(
    settings: Mapping[str, Any], *, command: Sequence[str], folder: Path, progress: Callable[[int], None]
) -> Learning:
    """Train with TRL in a process of its own, whose command gets the path of `settings.json` as its last word.

    `folder` gets that file, and the log of the process; `progress` is called with the steps done.

    Raises:
        TrainerError: The process failed; the message has the end of its log.
        StallError: It said nothing for too long.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "settings.json").write_text(json.dumps(settings))
    seconds, tokens, accuracies = [], [], {}
    command = [*command, str(folder / "settings.json")]
    with closing(_lines(command, threads=settings["threads"], log=folder / "log")) as lines:
        for told in filter(None, map(read_line, lines)):
            if told["peer"] == "step":
                seconds.append(told["seconds"])
                tokens.append(told["tokens"])
                progress(told["step"])
            else:
                accuracies[told["step"]] = told["accuracy"]
    if len(seconds) != (steps := settings["grpo"]["max_steps"]):
        raise TrainerError(f"TRL must do {steps} steps, it ended after {len(seconds)}: see {folder / 'log'}")
    return Learning(seconds=tuple(seconds), accuracies=accuracies, tokens=statistics.fmean(tokens))


def _lines(command: Sequence[str], *, threads: int, log: Path) -> Generator[str]:
    """Run a process and yield its lines as they come; it ends with the iteration."""
    # Nothing is looked up on the hub: model and data are here.
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    with log.open("w") as stderr:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True)
    lines = SimpleQueue[str | None]()

    def pump() -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                lines.put(line)
        lines.put(None)

    Thread(target=pump, daemon=True).start()
    try:
        while (line := lines.get(timeout=_SILENCE_S)) is not None:
            yield line
        if process.wait(_SILENCE_S) != 0:
            end = "\n".join(log.read_text(errors="replace").splitlines()[-_SHOWN_LINES:])
            raise TrainerError(f"TRL's process must end with 0, got {process.returncode}:\n{end}\nAll of it: {log}")
    except Empty:
        late = f"TRL's process must do a step within {_SILENCE_S:.0f} s, got nothing: see {log}"
        raise StallError(late) from None
    finally:
        process.kill()
        process.wait()


# ---------------------------------------------------------------- TRL's environment


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
    made_for = {"python": sys.version, "packages": sysconfig.get_path("purelib")}
    if marker.is_file() and json.loads(marker.read_text()) == made_for:
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
    (purelib / "areal_lite_packages.pth").write_text(f"{made_for['packages']}\n")
    _run([str(python), "-P", str(TRL_SCRIPT)], doing="import TRL")
    marker.write_text(json.dumps(made_for))
    return python


def _run(command: list[str], *, doing: str) -> None:
    try:
        subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        output = "".join(str(text or "") for text in (getattr(error, "stdout", ""), getattr(error, "stderr", "")))
        # pip names every local index folder that lacks a package: noise that would hide the cause.
        lines = [line for line in output.splitlines() if "is ignored: it is neither" not in line] or [repr(error)]
        end = "\n".join(lines[-_SHOWN_LINES:])
        raise ConfigError(
            f"bench peers must be able to {doing} for TRL's environment, got:\n{end}\nSee to its cause (network? disk? "
            "pip's configured index?) and run this again: it starts over"
        ) from error
