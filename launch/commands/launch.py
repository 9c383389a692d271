"""The command `areal-lite launch`: run another command as a job on a cluster, and look after the job."""

import shlex
import time
from pathlib import Path
from typing import Annotated

import typer

from areal_lite.config.reading import parse_section
from areal_lite.errors import ConfigError
from areal_lite.launch.clusters.job import Job, Kind, find_job, find_kind, job_name, load_profile, section_of
from areal_lite.launch.clusters.profile import Profile
from areal_lite.launch.commands.options import option, word_list
from areal_lite.launch.run.signals import undisturbed

_POLL_S = 1.0
_SILENCE_S = 300.0
"""How long a cluster may fail to answer before launch stops following its job."""


def launch(
    command: Annotated[
        list[str],
        word_list(
            "[COMMAND RECIPE [section.field=value]...]",
            "train, sft, reward-model, dpo, eval or bench modes, with its own arguments",
        ),
    ],
    on: Annotated[
        str, option("KIND", "local, ray, ssh, slurm, kubernetes, an installed plug-in, or path.py:Class")
    ] = "local",
    profile: Annotated[
        str | None, option("FILE", "YAML file that describes the cluster (default: one machine)")
    ] = None,
    name: Annotated[str | None, typer.Option(help="name of the job and its run folder (default: RECIPE-TIME)")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print and check every file and command without starting anything")
    ] = False,
    detach: Annotated[bool, typer.Option("--detach", help="submit the job and return")] = False,
    status: Annotated[str, option("JOB", "show a job's status", show_default=False)] = "",
    logs: Annotated[str, option("JOB", "print a job's output", show_default=False)] = "",
    stop: Annotated[str, option("JOB", "save a job's run, then stop the job", show_default=False)] = "",
    new_profile: Annotated[str, option("KIND", "print a commented profile to start from", show_default=False)] = "",
) -> int:
    """Run a command as a job on a cluster.

    Wait for the job, show its output, and return its exit code. Ctrl-C saves the run and stops the job.
    """
    asked = [(verb, word) for verb, word in (("status", status), ("logs", logs), ("stop", stop)) if word]
    if new_profile:
        return _print_profile(new_profile)
    if len(asked) > 1:
        raise typer.BadParameter("expected one of --status, --logs and --stop, got several")
    if asked:
        return _ask(*asked[0])
    if not command:
        raise ConfigError("launch needs a command and a recipe, got none: areal-lite launch train arith_cpu")
    asked_for = {"name": name or job_name(command), "kind": on, "folder": str(Path.cwd()), "words": command}
    job = parse_section({**asked_for, "profile": load_profile(profile, kind=on)}, Job)
    return run_job(job, dry_run=dry_run, detach=detach)


def run_job(job: Job, *, dry_run: bool = False, detach: bool = False) -> int:
    """Check a job, submit it, show its output, and return its exit code; a `ConfigError` where it does not fit."""
    from areal_lite.launch.clusters.attempts import attempt_scripts
    from areal_lite.launch.clusters.fit import node_problems, problems, shipped, with_run_folder
    from areal_lite.launch.clusters.remote import bash_problems

    kind = find_kind(job.kind)
    secrets = kind.secrets(job)
    job = with_run_folder(job.without_values())
    found, artefacts = [*problems(job), *(kind.check(job) or node_problems(job))], kind.artefacts(job)
    scripts = attempt_scripts(shipped(job, ".")[0] if job.ships else job)
    found += bash_problems({**artefacts, **scripts})
    if dry_run:
        for file, text in {**artefacts, **scripts}.items():
            print(f"# {file}\n{text}")
        for file in secrets:
            print(f"# {file}: the values of {', '.join(job.profile.env)}, for its owner alone; not shown\n")
    if found:
        raise ConfigError("\n".join(found))
    if dry_run:
        size = f"{job.profile.nodes} x {job.profile.gpus_per_node} GPUs"
        print(f"# {job.name} is fine for {job.kind}, {size}; nothing was started")
        return 0
    if job.record.exists():
        raise ConfigError(f"a job needs a name of its own, got {job.name}, of {job.record}: choose another --name")
    job = job.save()
    for file, text in {**artefacts, **secrets}.items():
        path = job.files / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600 if file in secrets else 0o666)
        path.write_text(text)
    try:
        with undisturbed():  # without its id, a job could not be stopped
            job = _submit(kind, job)
    except KeyboardInterrupt:
        if not job.id:
            raise
        kind.stop(job)
        detach = False
    return 0 if detach else _follow(kind, job)


def _submit(kind: Kind, job: Job) -> Job:
    """Submit a job and record its id."""
    try:
        job = job.model_copy(update={"id": kind.submit(job)}).save()
    except Exception:
        job.record.unlink()  # the name is free again
        raise
    print(f"job {job.name} is {job.kind} {job.id}; areal-lite launch --status | --logs | --stop {job.name}", flush=True)
    return job


def _follow(kind: Kind, job: Job) -> int:
    """Show a job's output until it ends; Ctrl-C stops the job, a second one stops waiting for it."""
    shown, asked = 0, False
    silent_since: float | None = None
    while True:
        try:
            time.sleep(_POLL_S)
            status = kind.status(job)  # before the logs, so that none is missed
            text, silent_since = kind.logs(job), None
            text = text.rstrip("\ufffd") if status.code is None else text  # a half-written character
            print(text[shown:], end="", flush=True)
            shown = len(text)
            if status.code is not None:
                if status.words not in text:  # the supervisor's last line
                    print(status.words)
                return status.code
        except ConfigError as error:
            if silent_since is None:
                silent_since = time.monotonic()
                print(f"{error}; the job is still running; retrying for {_SILENCE_S:g} s", flush=True)
            elif time.monotonic() > silent_since + _SILENCE_S:
                raise
        except KeyboardInterrupt:
            if asked:
                print(f"not waiting for it to stop: areal-lite launch --status {job.name}")
                return 130
            asked = True
            kind.stop(job)


def _ask(verb: str, name: str) -> int:
    job = find_job(name)
    kind = find_kind(job.kind)
    if verb == "stop":
        status = kind.status(job)
        kind.stop(job)  # of one that has ended, what it may have left
        ends = f"saves and ends: areal-lite launch --status {job.name}"
        print(f"{job.name} {ends if status.code is None else f'had ended: {status.words}'}")
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
    lines = list(explained_section(Profile()))
    if type(settings).model_fields:
        lines += [f"{section_of(kind)}:", *explained_section(settings, "  ")]
    print(f"# A profile for areal-lite launch --on {kind}: change what differs, delete the rest.")
    print(*lines, sep="\n")
    return 0
