"""A program: a gpu-check of parts that stand for real ones; `OUT MINUTES [NAME...]`."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from areal_lite.errors import ConfigError
from areal_lite.launch.bench.gpu_check import Check
from areal_lite.launch.bench.gpu_part import Job, Part


def passes(job: Job) -> None:
    job.report(speed={"first": 1.0})
    job.report(speed={"second": 2.0})


def misses(job: Job) -> None:
    job.report(found=3, problems=["expected 4, got 3"])


def raises(job: Job) -> None:
    job.report(found=5)
    raise ValueError("no such kernel")


def dies(job: Job) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def silent(job: Job) -> None:
    pass


def hangs(job: Job) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(1000)


def leaves(job: Job) -> None:
    """Leave a process that is nobody's child, in a session of its own, as Ray's are."""
    started = subprocess.run(
        ["sh", "-c", "setsid sleep 1000 >/dev/null 2>&1 & echo $!"], capture_output=True, text=True, check=True
    )
    job.report(pid=int(started.stdout))


SECONDS = {"hangs": (1, 1), "long": (1e9, 300), "for-ever": (0, 1e9)}
"""Planned and allowed."""
PARTS = {
    name: Part(shows=name, call=f"stand_in_parts:{name}", planned_s={"cpu": planned_s}, limit_s={"cpu": limit_s})
    for name in ("hangs", "dies", "long", "raises", "silent", "misses", "leaves", "passes", "for-ever")
    for planned_s, limit_s in [SECONDS.get(name, (1, 300))]
}
PARTS["for-ever"] = PARTS["for-ever"].model_copy(update={"call": "stand_in_parts:hangs"})
PARTS["gpu"] = PARTS["passes"].model_copy(update={"planned_s": {"cuda": 1}})

if __name__ == "__main__":
    out, minutes, *names = sys.argv[1:]
    overrides = {"trainer.lr": 1e-3} if "with-overrides" in names else {}
    try:
        check = Check(PARTS, device="cpu", num_gpus=0, out=Path(out), overrides=overrides)
    except ConfigError as error:
        sys.exit(str(error))
    sys.exit(check.run(names or [name for name in PARTS if name != "for-ever"], minutes=float(minutes)))
