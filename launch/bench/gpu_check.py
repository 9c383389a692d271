"""`areal-lite bench gpu-check`: what a GPU can show in a quarter of an hour, as parts that cannot harm each other.

Each part of `gpu-check.yaml` is a process with a limit: one that fails, hangs or dies is a verdict, everything below it
is killed, and the next one starts. `results.json` and the page are written after each. Called again, what passed is
kept. With `--cpu` the same parts run on this machine, over gloo and at tiny shapes.
"""

import os
import shutil
import subprocess
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from signal import SIGTERM, default_int_handler, signal
from typing import Any

import areal_lite
from areal_lite.config.reading import parse_override
from areal_lite.errors import ConfigError
from areal_lite.launch.bench.gpu_part import Job, Part, command_of, read_figures, table
from areal_lite.launch.bench.harness import say, show_table, write_results
from areal_lite.launch.bench.plan import choose
from areal_lite.node import look_at_node
from areal_lite.record.columns import Row, cells, markdown
from areal_lite.record.run_files import read_json, write_whole
from areal_lite.record.run_folder import differences
from areal_lite.verify.descendants import adopt_orphans, children, end_descendants

_PASSED = "passed"
_LAST_CHARS = 300
_LARGEST_LOG = 2**21
"""Bytes of a file that still goes into the archive of logs."""


def bench(
    overrides: Sequence[str], *, cpu: bool, only: Sequence[str], minutes: float | None, model: str | None, out: Path
) -> int:
    """Run the parts that this machine can run and that fit into the time; 1 where one did not pass."""
    from torch.cuda import device_count

    num_gpus = 0 if cpu else device_count()
    if not cpu and not num_gpus:
        raise ConfigError(
            "gpu-check failed to start: expected a GPU that PyTorch sees, got none. Fix: see areal-lite doctor, or "
            "rehearse it with --cpu"
        )
    changes, parts = dict(map(parse_override, overrides)), table().parts
    check = Check(
        parts, device="cpu" if cpu else "cuda", num_gpus=num_gpus, out=out.resolve(), model=model, overrides=changes
    )
    return check.run(choose([*parts], only, what="part"), minutes=minutes, again=bool(only))


class Check:
    """The parts, and what is known of them."""

    def __init__(
        self,
        parts: Mapping[str, Part],
        *,
        device: str,
        num_gpus: int,
        out: Path,
        model: str | None = None,
        overrides: Mapping[str, Any] | None = None,
    ) -> None:
        """Read what an earlier call left in the folder.

        Raises:
            ConfigError: That was another benchmark, or of another device, GPU, version, model, or of other overrides.
        """
        self._parts, self._device, self._num_gpus, self._out = parts, device, num_gpus, out
        self._overrides, node, path = dict(overrides or {}), look_at_node(), out / "results.json"
        self._about: dict[str, Any] = {"benchmark": "gpu-check", "device": device, "overrides": self._overrides,
                       "versions": node.versions, "gpus": list(node.gpus)}  # fmt: skip
        found = read_json(path)
        self._model = str(Path(model).resolve()) if model else found.get("model")  # one call alone may have it
        if self._model:
            self._about["model"] = self._model
        known = {"model": self._model, **found}
        changed = differences([self._about, {name: known.get(name) for name in self._about}])
        if path.is_file() and changed:
            key, (now, before) = next(iter(changed.items()))
            raise ConfigError(
                f"gpu-check failed to continue: expected {path} to be of {key}={now}, got {before}. Fix: give another "
                "--out, or delete that folder"
            )
        self._rows: dict[str, dict[str, Any]] = {row["name"]: row for row in found.get("rows", ())}

    def run(self, names: Sequence[str], *, minutes: float | None = None, again: bool = False) -> int:
        """Run parts in the order of the table; returns the exit code.

        Args:
            minutes: For all of them; a part that is planned for longer than what is left is skipped.
            again: Run parts that passed before, too.
        """
        ends_at = time.monotonic() + 60 * minutes if minutes else float("inf")
        self._about["minutes"] = minutes
        code, before = 0, signal(SIGTERM, default_int_handler)  # else a part would outlive it
        try:
            for name in names:
                part, known = self._parts[name], self._rows.get(name, {})
                if known.get("outcome") == _PASSED and not again:
                    continue
                left_s, planned_s = ends_at - time.monotonic(), part.planned_s.get(self._device, 0.0)
                if why := self._why_not(part):
                    outcome: dict[str, Any] = {"outcome": f"left out: {why}"}
                elif planned_s > left_s:
                    outcome = {"outcome": f"skipped: planned for {planned_s:g} s, {max(0.0, left_s):.0f} s were left"}
                else:
                    say(f"{name}: {part.shows} (about {planned_s:g} s)", style="")
                    outcome = self._run_part(name, part, left_s)
                say(f"{name}: {outcome['outcome']}")
                if "seconds" in known and "seconds" not in outcome:
                    continue  # what it showed when it ran
                self._rows[name] = {"name": name, "shows": part.shows, **outcome}
                self._write()
        except KeyboardInterrupt:
            code = 130
        finally:
            signal(SIGTERM, before)
        self._archive()
        rows = [self._rows[name] for name in names if name in self._rows]
        show_table("gpu-check", rows, title="gpu-check")
        say(f"to send us: results.json, gpu-check.md and logs.tar.gz in {self._out}")
        return code or int(any(row["outcome"].startswith(("failed", "killed")) for row in rows))

    def _why_not(self, part: Part) -> str | None:
        if part.model == "given" and self._model is None:
            return "it takes a model's folder: --model DIR"
        if self._device == "cpu":
            return None if "cpu" in part.planned_s else "it needs a GPU"
        return None if self._num_gpus >= part.gpus else f"it needs {part.gpus} GPUs, there are {self._num_gpus}"

    def _run_part(self, name: str, part: Part, left_s: float) -> dict[str, Any]:
        limit_s = min({**table().limit_s, **part.limit_s}[self._device], left_s)
        job = Job(
            name=name, part=part, device=self._device, out=str(self._out), overrides=self._overrides,
            model=self._model,
        )  # fmt: skip
        shutil.rmtree(job.folder, ignore_errors=True)
        job.folder.mkdir(parents=True)
        # Whatever the part starts must find this very code, also where nothing is installed.
        paths = [str(Path(areal_lite.__file__).parents[1]), os.environ.get("PYTHONPATH")]
        environment = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), **table().environment, **part.environment}
        adopt_orphans()
        others, begun, code = set(children(os.getpid())), time.monotonic(), None
        with (job.folder / "log.txt").open("w") as log:
            process = subprocess.Popen(
                command_of(job), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env=os.environ | environment,
            )  # fmt: skip
            try:
                code = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                pass
            finally:  # also what a part that ended has left behind: the next one needs the whole GPU
                end_descendants(spare=others.__contains__)
        figures = read_figures(job.folder)
        outcome = _verdict(figures, code, limit_s=limit_s, last=(job.folder / "log.txt").read_text(errors="replace"))
        return {"outcome": outcome, "seconds": round(time.monotonic() - begun, 1), "figures": figures}

    def _write(self) -> None:
        order = [self._rows[name] for name in self._parts if name in self._rows]
        content = write_results({**self._about, "rows": order}, out=self._out)
        write_whole(self._out / "gpu-check.md", f"# gpu-check\n\n{page(content)}\n")

    def _archive(self) -> None:
        """Pack what explains a verdict; models and checkpoints stay where they are."""
        with tarfile.open(self._out / "logs.tar.gz", "w:gz") as archive:
            for path in sorted(self._out.rglob("*")):
                is_log = path.suffix in (".txt", ".log", ".json", ".jsonl") and "checkpoints" not in path.parts
                if is_log and path.is_file() and path.stat().st_size <= _LARGEST_LOG and "model" not in path.parts:
                    archive.add(path, str(path.relative_to(self._out)))


def _verdict(figures: Mapping[str, Any], code: int | None, *, limit_s: float, last: str) -> str:
    """Return what became of a part; `code` is None where it was killed."""
    if code is None:
        return f"killed: it had not ended after {limit_s:.0f} s"
    if problems := [*figures.get("problems", ()), *filter(None, [figures.get("error")])]:
        return f"failed: {'; '.join(problems)}"
    if code:
        return f"failed: it ended with {code}: {' '.join(last.split())[-_LAST_CHARS:]}"
    return _PASSED if figures else "failed: it reported no figure"


def page(content: Mapping[str, Any]) -> str:
    """Return what `results.json` of a check shows, as Markdown without a title; measured figures only."""
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    where = "; ".join(content["gpus"]) if content["device"] == "cuda" else f"{content['processor']}, a rehearsal"
    head = f"{where}. Commit {content['commit']}; {versions}."
    return "\n\n".join([head, markdown("gpu-check", content["rows"]), *_findings(content["rows"])])


def _findings(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        part, figures = table().parts.get(row["name"]), row.get("figures") or {}
        if part is None or not figures:
            continue
        names = [name for name in part.runs if isinstance(figures.get(name), dict) and "parity_max" in figures[name]]
        lines = [f"- {text}" for template in part.says for text in _filled(template, figures)]
        for name in names:
            said = "; ".join(text for template in table().run_says for text in _filled(template, figures[name]))
            lines.append(f"- {name}: {said}" if len(names) > 1 else f"- {said}")
        lines += [f"- {row['outcome']}"] * (row["outcome"] != _PASSED)
        yield f"### {row['name']}\n\n" + "\n".join(lines)


def _filled(template: str, figures: Mapping[str, Any]) -> list[str]:
    (_, (text,)) = cells({"": template}, [figures])
    return [text]
