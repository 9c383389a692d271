"""A job: one command on one cluster, recorded in `runs/jobs/NAME.json` so that another terminal finds it.

What a kind of cluster does with it is one small class, a `Kind`, found as a plug-in: by an entry point of the group
`areal_lite.clusters`, as the shipped ones are, or as path.py:Class.
"""

import os
import re
import shlex
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from inspect import formatannotation
from pathlib import Path
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError

from areal_lite.config.plugins import find_function, known_names
from areal_lite.config.reading import parse_override, parse_section, read_yaml
from areal_lite.config.section import Section
from areal_lite.config.sections import COMMANDS
from areal_lite.config.suggestion import suggestion
from areal_lite.errors import ConfigError, PluginError
from areal_lite.launch.clusters.profile import Profile
from areal_lite.record.run_files import write_whole

JOBS = Path("runs") / "jobs"


class Job(Section):
    """What to run, where, and what the cluster calls it."""

    name: str
    """also of its run folder"""
    kind: str
    """of cluster"""
    folder: str
    """where the command was typed; relative paths start there"""
    words: list[str]
    """the command as after areal-lite"""
    profile: Profile = Profile()
    id: str = ""
    """what the cluster calls it: a process, a batch job"""

    def _problems(self) -> Iterable[str]:
        if not re.fullmatch(r"\w[\w.-]*", self.name) or self.name.endswith(".json"):
            yield (
                "the name of a job has letters, digits, '_', '-' and '.', and does not end in .json, got "
                f"{self.name!r}: choose another --name"
            )

    @property
    def ships(self) -> bool:
        """Whether its files are copied to the cluster, whose nodes do not see this folder."""
        return find_kind(self.kind).ships(self)

    @property
    def record(self) -> Path:
        """The file it is found by."""
        return Path(self.folder) / JOBS / f"{self.name}.json"

    @property
    def files(self) -> Path:
        """Folder of its artefacts, its log and the record of its attempts."""
        return self.record.with_suffix("")

    @property
    def log(self) -> Path:
        """Output of the command and of its supervisor."""
        return self.files / "log.txt"

    @property
    def env_file(self) -> Path | None:
        """Shell script that sets the profile's `env`, for its owner alone; None where there is nothing to set."""
        return None if find_kind(self.kind).sets_env or not self.profile.env else self.files / "env.sh"

    @property
    def run_folder(self) -> Path | None:
        """Where the run is written; None for commands without one: they start over, or skip what was measured."""
        if self.words[0] not in COMMANDS.values():
            return None
        named = dict(parse_override(word) for word in self.words if word.startswith(("run.dir=", "run.resume=")))
        path = named.get("run.resume") or named.get("run.dir") or Path("runs") / self.name
        return Path(self.folder) / os.path.expanduser(str(path))

    def without_values(self) -> "Job":
        """Return it with the names of its environment alone, as it is recorded, printed and shipped."""
        profile = self.profile.model_copy(update={"env": dict.fromkeys(self.profile.env, "")})
        return self.model_copy(update={"profile": profile})

    def save(self) -> "Job":
        """Write the record."""
        self.files.mkdir(parents=True, exist_ok=True)
        write_whole(self.record, self.without_values().model_dump_json(indent=2) + "\n")
        return self


@dataclass(frozen=True, slots=True)
class Status:
    """Where a job stands."""

    words: str
    """For a person, one line."""
    code: int | None = None
    """Exit code once it has ended, on every node."""


def find_job(name: str) -> Job:
    """Read a job's record; a `ConfigError` where there is none of that name."""
    path = JOBS / f"{Path(name).name.removesuffix('.json')}.json"
    if not path.is_file():
        known = sorted(path.stem for path in JOBS.glob("*.json"))
        raise ConfigError(
            f"no such job: expected one of {JOBS} ({', '.join(known) or 'none yet'}), got {name!r}"
            f"{suggestion(name, known)}. Fix: type this in the folder where you launched the job"
        )
    return parse_section(read_yaml(path, holding="a job"), Job)


def is_override(word: str) -> bool:
    """Whether a word is no path, which may hold `=` as well."""
    return "=" in word and not os.path.exists(word)


def job_name(words: Sequence[str]) -> str:
    """Name a job after its recipe and the present second."""
    recipe = next((word for word in reversed(words) if not is_override(word) and not word.startswith("-")), words[0])
    name = f"{Path(recipe).name.removesuffix('.yaml')}-{time.strftime('%Y%m%d-%H%M%S')}"
    return re.sub(r"[^a-z0-9-]+", "-", name.lower()).lstrip("-")


class Kind(ABC):
    """A kind of cluster. The job's supervisor calls `nodes`, on the head; `areal-lite launch` calls the rest.

    A batch system needs a script from `templates/batch.sh`, which runs the supervisor and forwards signals: see
    `Slurm`, whose template extends it.
    """

    Settings: type[Section] = Section
    """What a profile may hold in the section of the kind's name."""
    sets_env: bool = False
    """Whether every node has the profile's `env` without `job.env_file`."""

    def settings(self, job: Job) -> Any:
        """Return the kind's section of the job's profile; a `ConfigError` where it is wrong."""
        return own_settings(job.profile, job.kind, self)

    def ships(self, job: Job) -> bool:
        """Return whether the job's files are copied to the cluster, whose nodes do not see this folder."""
        return False

    def joined(self, job: Job) -> Mapping[str, str] | None:
        """Return variables by which the command joins a Ray cluster that runs already; None where there is none."""
        return None

    def artefacts(self, job: Job) -> Mapping[str, str]:
        """Return the text of each file that the cluster is given, by name. Pure, and without values of `env`."""
        return {}

    def secrets(self, job: Job) -> Mapping[str, str]:
        """Return files with the values of `env`, by name: written with mode 0600, never printed."""
        if job.env_file is None:
            return {}
        # A job that is shipped finds it where it will be in its folder there.
        name = job.env_file.relative_to(job.folder) if job.ships else job.env_file.name
        return {str(name): "".join(f"export {key}={shlex.quote(value)}\n" for key, value in job.profile.env.items())}

    def check(self, job: Job) -> Sequence[str]:
        """Return a sentence per problem with the job's settings for this kind; no cluster needed."""
        return ()

    @abstractmethod
    def submit(self, job: Job) -> str:
        """Start the job, whose artefacts are in `job.files`, and return what the cluster calls it, at once."""

    @abstractmethod
    def status(self, job: Job) -> Status:
        """Look up where it stands."""

    def logs(self, job: Job) -> str:
        """Return the output so far, of the command and of its supervisor."""
        return job.log.read_text(errors="replace") if job.log.is_file() else ""

    @abstractmethod
    def stop(self, job: Job) -> None:
        """Make it save and end on every node; returns at once."""

    def nodes(self, job: Job) -> Mapping[str, Sequence[str]]:
        """Return the words in front of a shell command for each node, the head's first.

        Empty when the job does not start Ray itself: the run does, on one node, or it is there already.
        """
        return {}


def find_kind(name: str) -> Kind:
    """Return a kind by its name, or from `path.py:Class`; a `ConfigError` where there is none.

    Its methods raise a `PluginError` where they return something of another type than those of `Kind`.
    """
    try:
        found = find_function(name, kind="cluster")
    except PluginError as error:
        raise ConfigError(str(error)) from error
    if problems := "; ".join(_kind_problems(found)):
        raise ConfigError(
            f"{name} is no kind of cluster: expected a class that extends {Kind.__module__}.Kind, got {problems}. Fix: "
            "see the example in docs/clusters.md"
        )
    kind = cast("type[Kind]", found)()
    for method in ("ships", "joined", "artefacts", "secrets", "check", "submit", "status", "logs", "nodes"):
        returns = getattr(Kind, method).__annotations__["return"]
        setattr(kind, method, _checked(f"{name}, {method}", getattr(kind, method), returns))
    return kind


def _kind_problems(found: Any) -> Iterable[str]:
    if not (isinstance(found, type) and issubclass(found, Kind)):
        yield "one that does not" if isinstance(found, type) else f"a {type(found).__name__}"
        return
    if missing := sorted(found.__abstractmethods__):
        yield f"one without {', '.join(missing)}"
    for name in dir(found):
        if not hasattr(Kind, name) and (near := get_close_matches(name, dir(Kind), n=1, cutoff=0.8)):
            yield f"{name}, which nothing calls; did you mean {near[0]}?"


def _checked(name: str, method: Callable[[Job], Any], returns: Any) -> Callable[[Job], Any]:
    """Return the method of a kind with a check of what it returns."""

    def call(job: Job) -> Any:
        returned = method(job)
        try:
            TypeAdapter(returns).validate_python(returned, strict=True)
        except ValidationError:
            raise PluginError(
                f"{name}: expected {formatannotation(returns)}, got {returned!r}. Fix: return that"
            ) from None
        return returned

    return call


def section_of(name: str) -> str:
    """Name the section of a kind in a profile: the name itself, or the class of `path.py:Class`."""
    return name.rpartition(":")[2]


def own_settings(profile: Profile, name: str, kind: Kind) -> Any:
    """Return the section of a kind in a profile, checked; a `ConfigError` where it is wrong."""
    section = section_of(name)
    return parse_section(profile.sections.get(section, {}), kind.Settings, prefix=f"{section}.")


def load_profile(path: str | None, *, kind: str = "local") -> Profile:
    """Read a profile; without a path, one machine. A `ConfigError` where it is missing, unreadable or impossible.

    Args:
        kind: May have a section of its own, as every installed kind may.
    """
    if path is None:
        return Profile()
    if not Path(path).is_file():
        raise ConfigError(
            f"a profile is a YAML file, got {path}, which is not there: areal-lite launch --new-profile KIND > {path}"
        )
    profile = parse_section(read_yaml(Path(path), holding="a profile (nodes, gpus_per_node, ...)"), Profile)
    known = {section_of(name): name for name in (*known_names("cluster"), kind)}
    for section in profile.sections:
        if section not in known:
            raise ConfigError(f"unknown key {section}{suggestion(section, [*known, *Profile.model_fields])}")
        own_settings(profile, known[section], find_kind(known[section]))
    return profile
