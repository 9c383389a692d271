"""What a person sees of an active run: a live panel on a terminal, plain lines elsewhere."""

import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import IO, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from areal_lite.config.offline import OfflineConfig
from areal_lite.config.recipe import Config
from areal_lite.record.metrics import METRICS, OFFLINE_METRICS, SHARES, Metric
from areal_lite.sample_queue.staleness import age_limit

Row = Mapping[str, Any]

_SPARKS = "▁▂▃▄▅▆▇█"
_SPARKLINE_WIDTH = 40
_INFINITE = (sys.float_info.max, -sys.float_info.max)
"""What stands for an infinite figure in a row: it is shown as one that is not there."""
_REFRESH_PER_S = 2.0


class View:
    """Shows start-up, steps and the end of a run.

    Most rows of the panel are declared with the metrics; a few take more than a format.
    """

    def __init__(
        self, config: Config | OfflineConfig, *, console: Console | None = None, plain_every_s: float = 5.0
    ) -> None:
        self._config, self._console = config, console or Console()
        self._console.file = Stream(self._console.file)  # type: ignore[assignment]
        self._metrics: Sequence[Metric] = OFFLINE_METRICS
        self._bounds: dict[str, float] = {}
        if isinstance(config, Config):
            limit = age_limit(config.queue.max_staleness, on_stale=config.queue.on_stale)
            self._metrics, self._bounds = (*METRICS, *SHARES), {"age_limit": limit}
        self._live: Live | None = None
        self._plain_every_s, self._plain_at = plain_every_s, -plain_every_s
        self._started, self._first_step = time.monotonic(), 0
        self._row: Row = {}
        self._goals: list[float | None] = []
        """The first figure of the panel in each row so far: a whole row takes kilobytes."""
        self._evaluations: Mapping[int, Row] = {}

    def print(self, text: str, *, style: str = "") -> None:
        """Print a line, above the live panel if there is one; brackets in it are no markup."""
        self._console.print(Text(text, style=style), soft_wrap=True)

    def begin(self, *, first_step: int) -> None:
        """Start showing steps."""
        self._started, self._first_step, self._row, self._goals = time.monotonic(), first_step, {}, []
        if self._console.is_terminal:
            self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=_REFRESH_PER_S)
            self._live.start()

    def step(self, row: Row, *, evaluations: Mapping[int, Row], shares: Row | None = None) -> None:
        """Show one more completed step.

        Args:
            row: Of `metrics.jsonl`.
            evaluations: Figures over the held-out rows, by completed steps.
            shares: Of the time so far, by the names of `SHARES`.
        """
        self._row = {name: None if value in _INFINITE else value for name, value in {**row, **(shares or {})}.items()}
        self._goals.append(self._row[next(metric.name for metric in self._metrics if metric.panel)])
        self._evaluations = evaluations
        is_due = time.monotonic() - self._plain_at >= self._plain_every_s
        if self._live is None and (is_due or row["step"] == self._config.run.steps):
            self._plain_at = time.monotonic()
            facts = "  ".join(f"{label} {text}" for label, text in self._facts().items() if text not in ("", "-"))
            self.print(f"step {row['step']}/{self._config.run.steps}  {facts}  {self._time_left()} left")

    def end(self) -> None:
        """Stop the live panel, and leave its last state on the screen."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _facts(self) -> dict[str, str]:
        """Return the text of each row of the panel: first the goal of training, then held-out figures."""
        declared: dict[str, list[str]] = {}
        for metric in self._metrics:
            if metric.panel is not None:
                declared.setdefault(metric.panel[0], []).append(metric.words(self._row, **self._bounds))
        first, *others = ((label, "; ".join(filter(None, words))) for label, words in declared.items())
        facts = dict([first, ("held out", self._held_out()), *others])
        if isinstance(self._config, Config):
            facts |= {"scoring": _scoring(self._row), "groups": _flow(self._row.get("ledger", {}))}
        return facts

    def _render(self) -> RenderableType:
        """Draw the panel, always at the same height, so that it does not jump."""
        columns = Column(style="dim", no_wrap=True), Column(no_wrap=True, overflow="ellipsis", ratio=1)
        table = Table.grid(*columns, padding=(0, 2), expand=True)
        (label, text), *others = self._facts().items()
        if self._row:
            values = [float(value) for value in self._goals if value is not None]
            now, _, parts = text.partition("; ")
            table.add_row(label, Text.assemble((now, "bold"), (f"  {sparkline(values)}  ", "green"), (parts, "dim")))
        else:
            table.add_row(label, "waiting for the first batch ...")
        for label, text in others:
            table.add_row(label, Text(text if self._row or label == "held out" else ""))
        return Panel(Group(self._head(), "", table), title="areal-lite", title_align="left", border_style="cyan")

    def _head(self) -> Table:
        total, step = self._config.run.steps, self._first_step + len(self._goals)
        columns = Column(no_wrap=True), Column(ratio=1), Column(no_wrap=True)
        head = Table.grid(*columns, padding=(0, 2), expand=True)
        head.add_row(
            Text(f"step {step} of {total}", style="bold"),
            ProgressBar(total=total, completed=step),
            f"{timedelta(seconds=int(time.monotonic() - self._started))} elapsed, {self._time_left()} left",
        )
        return head

    def _held_out(self) -> str:
        if not self._evaluations:
            return "-"
        steps = sorted(self._evaluations)
        ends = [self._evaluations[step] for step in dict.fromkeys((steps[0], steps[-1]))]
        names = [name for name, value in ends[0].items() if isinstance(value, float)]
        figures = ", ".join(
            f"{ends[-1].get('called', name)} {' → '.join(f'{end[name]:.3f}' for end in ends)}" for name in names
        )
        return figures + (f" (step {steps[-1]})" if len(steps) > 1 else "")

    def _time_left(self) -> str:
        done = len(self._goals)
        if done == 0:
            return "-"
        left = (time.monotonic() - self._started) / done * max(self._config.run.steps - self._first_step - done, 0)
        return str(timedelta(seconds=int(left)))


class Stream:
    """Output whose reader may be gone, such as a closed terminal, or may lack characters, or whose disk may be full."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write what can be written."""
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        with contextlib.suppress(OSError):
            self._stream.write(text.encode(encoding, "replace").decode(encoding))
        return len(text)

    def flush(self) -> None:
        """Flush what can be written."""
        with contextlib.suppress(OSError):
            self._stream.flush()


def sparkline(values: Sequence[float], width: int = _SPARKLINE_WIDTH) -> str:
    """Draw values as a line of block characters between their bounds, averaged into at most `width` blocks."""
    if not values:
        return ""
    size = -(-len(values) // width)
    means = [sum(part) / len(part) for part in (values[i : i + size] for i in range(0, len(values), size))]
    low, high = min(means), max(means)
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    return f"{low:.2f} " + "".join(_SPARKS[round((value - low) * scale)] for value in means) + f" {high:.2f}"


def _scoring(row: Row) -> str:
    """Describe each verifier: latency, waiting calls and failures."""
    verifiers = [
        f"{name} {1000 * figures['latency_p50_s']:.0f} ms (95 %: {1000 * figures['latency_p95_s']:.0f} ms)"
        + (f", {figures['waiting']} waiting" if figures["waiting"] else "")
        + (f", {sum(figures['failures'].values())} failed" if figures["failures"] else "")
        for name, figures in row.get("verifiers", {}).items()
        if figures["calls"] or figures["waiting"]
    ]
    return "; ".join(verifiers) or "-"


def _flow(ledger: Mapping[str, int]) -> str:
    """Count the groups: trained, in flight, and ended otherwise, by reason."""
    ready = ledger.get("ready", 0)
    counts = {
        "trained": ledger.get("trained", 0),
        "ready": ready,
        "in flight": ledger.get("outstanding", 0) - ready,
        **{state: count for state, count in ledger.items() if "(" in state or state in ("stale", "abandoned")},
    }
    return ", ".join(f"{state} {count:,}" for state, count in counts.items() if count) or "-"
