"""Jobs that bring their recipe and plug-in files along, into a folder of their own below the shared one."""

import shlex
from pathlib import Path

from areal_lite.errors import ConfigError
from areal_lite.launch.clusters.fit import own_files, recipe_of
from areal_lite.launch.clusters.job import Job
from areal_lite.launch.clusters.supervised import bash_problems

_START = "start.sh"


def shipped(job: Job, source: str) -> tuple[Job, dict[str, str]]:
    """Return the job as its head will see it, and the files that go along, by their path in its folder there.

    Args:
        source: Where they lie before they are put there.

    Raises:
        ConfigError: A file that the recipe names cannot be read.
    """
    there = job.model_copy(update={"folder": f"{job.profile.shared}/{job.name}"})
    own = own_files(recipe_of(job.words)[1], job)
    try:
        files = {str(path): (Path(job.folder) / path).read_text() for path in own}
    except OSError as error:
        raise ConfigError(f"the recipe's files are shipped, got {error}: correct the name in the recipe") from error
    record = str(there.record.relative_to(there.folder))
    start = _start_script(there, source)
    return there, files | {record: there.model_dump_json(indent=2, exclude_defaults=True) + "\n", _START: start}


def entrypoint(source: str) -> str:
    """Return plain words that start the job from files in `source`: KubeRay and Ray paste them into a shell line."""
    return f"bash {source}/{_START}"


def _start_script(there: Job, source: str) -> str:
    """Return what puts the files from `source` into place and supervises the job."""
    folder, record = shlex.quote(there.folder), shlex.quote(str(there.record))
    steps = [f"mkdir -p {folder}", f"cp -rL {shlex.quote(source)}/. {folder}", f"cd {folder}", there.profile.enter]
    run = ["exec", there.profile.container, f"python -m areal_lite.launch.clusters.attempts {record}"]
    return " &&\n".join(filter(None, [*steps, " ".join(filter(None, run))])) + "\n"


def shipped_problems(job: Job) -> list[str]:
    """Return what bash cannot read in the script that starts the job."""
    return bash_problems({_START: shipped(job, ".")[1][_START]})
