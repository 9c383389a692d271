"""One part of `bench gpu-check`: what `gpu-check.yaml` says of it, and the process that it runs in.

A part reports figures as it gets them: what it measured before it failed, hung or was killed is kept.
"""

import functools
import json
import pkgutil
import sys
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from areal_lite.config.reading import read_yaml
from areal_lite.config.recipe import Config
from areal_lite.config.section import Section
from areal_lite.launch.bench.plan import planned_config
from areal_lite.record.run_files import write_whole

FIGURES = "figures.json"
"""What a part has reported, in its folder."""


class _Settings(Section):
    """What the table says of all parts, and of a part alone."""

    limit_s: dict[str, float] = Field({})
    """by device, after which a part is killed; the table's value where a part has none"""
    environment: dict[str, str] = Field({})
    settings: dict[str, Any] = Field({})
    cpu: dict[str, Any] = Field({})
    """settings on a CPU alone"""
    cuda: dict[str, Any] = Field({})
    """settings on GPUs alone"""


class Part(_Settings):
    """What the table says of a part."""

    shows: str
    call: str
    """`module:function`, which gets a `Job`"""
    planned_s: dict[str, float]
    """by device, of those that can run it; a part for which less is left is skipped"""
    gpus: int = 1
    """that it needs"""
    model: Literal["builtin", "random", "given"] = "builtin"
    """built in; of a known shape with random weights; or that of --model"""
    runs: dict[str, dict[str, Any]] = Field({"run": {}})
    """of the whole loop, in one Ray session: name -> settings"""
    like: str | None = None
    """PART/RUN whose first step the runs must repeat"""
    says: list[str] = Field([])
    """templates of what the page says of its figures"""


class Table(_Settings):
    """The whole file."""

    recipe: str
    run_says: list[str]
    """templates of what the page says of each run"""
    parts: dict[str, Part]


@functools.cache
def table() -> Table:
    """Return the shipped table."""
    path = Path(__file__).with_name("gpu-check.yaml")
    return Table.model_validate(read_yaml(path, holding=f"the table of parts ({', '.join(Table.model_fields)})"))


class Job(Section):
    """A part to run, as its process gets it."""

    name: str
    part: Part
    device: str
    """`cpu` or `cuda`."""
    out: str
    """Folder of the whole check."""
    overrides: dict[str, Any] = Field({})
    """Settings of all runs, by the user."""
    model: str | None = None
    """Folder of a real model."""

    @property
    def folder(self) -> Path:
        """Everything that it writes."""
        return Path(self.out) / self.name

    @property
    def model_folder(self) -> str | None:
        """Folder of its model, where that is not built in; one with random weights is made by `random_model`."""
        return {"builtin": None, "random": str(Path(self.out) / "model"), "given": self.model}[self.part.model]

    def config(self, run: str = "run", **more: Any) -> Config:
        """Return the checked recipe of one of its runs."""
        every, part = table(), self.part
        changes = [every.settings, getattr(every, self.device), part.settings, getattr(part, self.device)]
        changes += [{"model.path": self.model_folder}] if self.model_folder else []
        return planned_config(every.recipe, run, [*changes, part.runs.get(run, {}), more, self.overrides])

    def report(self, **figures: Any) -> None:
        """Add figures to those of the part; a mapping is joined with an earlier one of its name."""
        known = read_figures(self.folder)
        for name, value in figures.items():
            is_joined = isinstance(value, dict) and isinstance(known.get(name), dict)
            known[name] = known[name] | value if is_joined else value
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(self.folder / FIGURES, json.dumps(known, indent=1) + "\n")


def read_figures(folder: Path) -> dict[str, Any]:
    """Return what a part has reported so far."""
    path = folder / FIGURES
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return found


def command_of(job: Job) -> list[str]:
    """Return the command that runs a part."""
    # Not `-m`: functions of a main module reach other processes as copies.
    return [
        sys.executable,
        "-P",
        "-c",
        f"import sys; from {__name__} import main; main(sys.argv[1])",
        job.model_dump_json(),
    ]


def main(text: str) -> None:
    """Run the part that a JSON text describes; an error is reported among its figures."""
    job = Job.model_validate_json(text)
    try:
        pkgutil.resolve_name(job.part.call)(job)
    except Exception as error:
        job.report(error=f"{type(error).__name__}: {error}")
        raise
