"""The command `areal-lite launch`: any other command as a job on a cluster, and what has become of it."""

import shlex
import time
from pathlib import Path
from typing import Annotated

import typer

from areal_lite.config.reading import parse_section
from areal_lite.errors import ConfigError
from areal_lite.launch.clusters.job import Job, find_job, find_kind, job_name, load_profile, section_of
from areal_lite.launch.clusters.profile import Profile
from areal_lite.launch.commands.options import word_list

_POLL_S = 1.0
_SILENCE_S = 300.0
"""How long a cluster may fail to answer before a job is left to itself."""


def launch(
    command: Annotated[
        list[str],
        word_list(
            "[COMMAND RECIPE [section.field=value]...]",
            "train, sft, reward-model, dpo, eval or bench modes, and what one types behind it",
        ),
    ],
    on: Annotated[
        str,
        typer.Option(
            metavar="KIND", help="local, ray, ssh, slurm, kubernetes, another that is installed, or path.py:Class"
        ),
    ] = "local",
    profile: Annotated[
        str | None, typer.Option(metavar="FILE", help="what the cluster has; default one machine")
    ] = None,
    name: Annotated[str | None, typer.Option(help="name of the job and its run folder; default RECIPE-TIME")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print every artefact, check it, start nothing")] = False,
    detach: Annotated[bool, typer.Option("--detach", help="do not wait for the end")] = False,
    status: Annotated[str, typer.Option(metavar="JOB", show_default=False, help="where a job stands")] = "",
    logs: Annotated[str, typer.Option(metavar="JOB", show_default=False, help="what a job has said")] = "",
    stop: Annotated[str, typer.Option(metavar="JOB", show_default=False, help="save and end a job")] = "",
    new_profile: Annotated[
        str, typer.Option(metavar="KIND", show_default=False, help="print a commented profile to begin with")
    ] = "",
) -> int:
    """Run a command as a job on a cluster.

    It waits for the job, shows what it says, and returns its exit code. Ctrl-C has the job save and end.
    """
    asked = [(verb, word) for verb, word in (("status", status), ("logs", logs), ("stop", stop)) if word]
    if new_profile:
        return _print_profile(new_profile)
    if asked:
        return _ask(*asked[0])
    if not command:
        raise ConfigError("launch needs a command and a recipe, got none: areal-lite launch train arith_cpu")
    asked_for = {"name": name or job_name(command), "kind": on, "folder": str(Path.cwd()), "words": command}
    job = parse_section({**asked_for, "profile": load_profile(profile, kind=on)}, Job)
    return run_job(job, dry_run=dry_run, detach=detach)


def run_job(job: Job, *, dry_run: bool = False, detach: bool = False) -> int:
    """Check a job, submit it, show what it says, and return its exit code; a `ConfigError` where it does not fit."""
    from areal_lite.launch.clusters.fit import problems

    kind = find_kind(job.kind)
    found, artefacts = [*problems(job), *kind.check(job)], kind.artefacts(job)
    if dry_run:
        for file, text in artefacts.items():
            print(f"# {file}\n{text}")
    if found:
        raise ConfigError("\n".join(found))
    if dry_run:
        size = f"{job.profile.nodes} x {job.profile.gpus_per_node} GPUs"
        print(f"# {job.name} is fine for {job.kind}, {size}; nothing was started")
        return 0
    if job.record.exists():
        raise ConfigError(f"a job needs a name of its own, got {job.name}, of {job.record}: choose another --name")
    job = job.save()
    for file, text in artefacts.items():
        path = job.files / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    try:
        job = job.model_copy(update={"id": kind.submit(job)}).save()
    except Exception:
        job.record.unlink()  # the name is free again
        raise
    print(f"job {job.name} is {job.kind} {job.id}; areal-lite launch --status | --logs | --stop {job.name}", flush=True)
    return 0 if detach else _follow(job)


def _follow(job: Job) -> int:
    """Show what a job says until it ends; Ctrl-C stops it, a second one leaves it alone."""
    kind, shown, asked = find_kind(job.kind), 0, False
    silent_since: float | None = None
    while True:
        try:
            time.sleep(_POLL_S)
            status = kind.status(job)  # before the logs, so that the last words are among them
            text, silent_since = kind.logs(job), None
            print(text[shown:], end="", flush=True)
            shown = len(text)
            if status.code is not None:
                print(status.words)
                return status.code
        except ConfigError as error:
            if silent_since is None:
                silent_since = time.monotonic()
                print(f"{error}; the job goes on, and is asked for again for {_SILENCE_S:g} s", flush=True)
            elif time.monotonic() > silent_since + _SILENCE_S:
                raise
        except KeyboardInterrupt:
            if asked:
                print(f"left alone while it stops: areal-lite launch --status {job.name}")
                return 130
            asked = True
            kind.stop(job)


def _ask(verb: str, name: str) -> int:
    job = find_job(name)
    kind = find_kind(job.kind)
    if verb == "stop":
        kind.stop(job)
        print(f"{job.name} was asked to save and end: areal-lite launch --status {job.name}")
    elif verb == "logs":
        print(kind.logs(job), end="")
    else:
        print(f"{job.name}: {kind.status(job).words}")
        print(f"command: areal-lite {shlex.join(job.words)}\nrecord: {job.files}")
        if job.run_folder:
            print(f"run folder: {job.run_folder}")
    return 0


def _print_profile(kind: str) -> int:
    from areal_lite.launch.commands.check_config import explained_section

    settings = find_kind(kind).Settings()
    lines = [line for line in explained_section(Profile()) if not line.startswith("own:")]
    if type(settings).model_fields:
        lines += [f"{section_of(kind)}:", *explained_section(settings, "  ")]
    print(f"# A profile for areal-lite launch --on {kind}: change what differs, leave out what does not.")
    print(*lines, sep="\n")
    return 0
