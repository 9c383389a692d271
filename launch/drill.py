"""`areal-lite drill`: inject faults into real runs of a recipe on this machine, and tabulate what they cost."""

import functools
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from signal import SIG_IGN, SIGHUP, SIGTERM, default_int_handler, getsignal, signal

from areal_lite.config.offline import load_any_config
from areal_lite.config.recipe import Config
from areal_lite.errors import ConfigError
from areal_lite.launch.bench.harness import finish, say
from areal_lite.launch.drill_checks import are_equal
from areal_lite.launch.drilled_run import DrilledRun, Outcome

SETTINGS = (
    "run.checkpoint_every=1", "run.eval_every=0", "run.report=false", "run.log_samples=1000000",
    "run.stall_timeout_s=20", "run.save_timeout_s=60", "run.max_worker_restarts=1000",
)  # fmt: skip
"""Of a run that is drilled."""
_STEPS, _ENDLESS = 40, 1_000_000
"""Of a run with one fault: enough to outlast the time until a fast machine notices a dead raylet; and of a soak."""
_LONGEST_PAUSE_S = 20.0
"""Between two faults of a soak."""
_UNDISTURBED = "none"


def drill(
    recipe: str, overrides: Sequence[str], *, names: Sequence[str], out: Path, minutes: float | None, seed: int
) -> int:
    """Inject faults, one per run, or for some minutes at random into one run; show the table, return the exit code.

    At `queue.max_staleness: 0` an undisturbed run comes first, and the losses of all others must equal its losses.
    """
    words = ["train", recipe, *SETTINGS, f"run.steps={_ENDLESS if minutes else _STEPS}", *overrides]
    config = load_any_config(recipe, words[2:])
    if not isinstance(config, Config) or config.run.dir or config.run.resume or (out.exists() and any(out.iterdir())):
        raise ConfigError(
            "a drill needs a recipe of areal-lite train without run.dir and run.resume, and --out a new folder, got "
            f"{recipe} of command: {config.command}, run.dir={config.run.dir}, run.resume={config.run.resume}, {out}"
        )
    rows: list[Outcome] = []
    code, reference = 0, None
    ends_at = time.monotonic() + 60 * (minutes or 0)
    before = signal(SIGTERM, default_int_handler)  # without it, the run's command would outlive this one
    if getsignal(SIGHUP) is SIG_IGN:
        signal(SIGHUP, lambda *_: None)  # under nohup: the runs would inherit it, and not notice the fault `sighup`
    runs = ["soak"] if minutes else list(names)
    if not minutes and config.queue.max_staleness == 0:
        runs.insert(0, _UNDISTURBED)
    out.mkdir(parents=True, exist_ok=True)
    try:
        for number, name in enumerate(runs, 1):
            say(f"{number} of {len(runs)}: {name}")
            with DrilledRun((out / name).resolve(), words, seed=seed) as run:
                try:
                    for fault in _drawn(run, names, ends_at) if minutes else {name} - {_UNDISTURBED}:
                        run.inject_fault(fault)
                    steps = run.end_soon(config.queue.max_staleness) if minutes else config.run.steps
                    run.finish(steps, groups_per_step=config.queue.groups_per_step)
                finally:
                    rows += rows_of(run, name)
            if reference is None and name == _UNDISTURBED:
                reference = run.folder
            elif reference is not None:
                rows[-1]["losses"] = "equal" if are_equal(run.folder, reference) else "differ"
                if rows[-1]["losses"] == "differ":
                    run.problems.append("losses must equal those of the undisturbed run")
            failure = "; ".join(["FAILED", *run.problems, f"its run folder is {run.folder.path}"])
            say(f"{name}: {failure if run.problems else 'passed'}")
    except KeyboardInterrupt:
        code = 130
        say("stopped: the table shows the results so far")
    finally:
        signal(SIGTERM, before)
    settings = {"recipe": recipe, "overrides": list(overrides), "seed": seed, "minutes": minutes}
    benchmark = "soak" if minutes else "drill"
    finish(benchmark, rows, settings=settings, out=out)
    return code or int(any(row["problems"] for row in rows))


def _drawn(run: DrilledRun, names: Sequence[str], ends_at: float) -> Iterator[str]:
    """Yield faults at random moments until the time is over; the run is watched in between."""
    while time.monotonic() < ends_at:
        pause_ends_at = time.monotonic() + run.random.uniform(0, _LONGEST_PAUSE_S)
        run.wait(functools.partial(_is_past, pause_ends_at), "the next fault")
        yield run.random.choice(names)


def _is_past(moment: float) -> bool:
    return time.monotonic() > moment


def rows_of(run: DrilledRun, name: str) -> list[Outcome]:
    """Return a run's rows of the table: after several faults one for each kind, and one for all."""
    kinds = sorted({one["fault"] for one in run.outcomes} - {name})
    of_each = [_row(kind, [one for one in run.outcomes if one["fault"] == kind], []) for kind in kinds]
    return [*of_each, _row(name, run.outcomes, run.problems)]


def _row(kind: str, outcomes: Sequence[Outcome], problems: list[str]) -> Outcome:
    return {
        "fault": kind,
        "times": len(outcomes),
        **{key: [one[key] for one in outcomes if one[key] is not None] for key in ("noticed_s", "back_s")},
        "steps_lost": sum(one["steps_lost"] for one in outcomes),
        "healed_by": ", ".join(sorted({one["healed_by"] for one in outcomes})) or None,
        "losses": None,
        "problems": problems,
    }
