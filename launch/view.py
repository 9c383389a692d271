"""What a person sees while a run goes on: a live panel on a terminal, plain lines elsewhere."""

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from areal_lite.config import Config

__all__ = ["View"]

_SPARKS = "▁▂▃▄▅▆▇█"


class View:
    """Shows start-up, steps and the end of a run; everything it knows it is told."""

    def __init__(self, config: Config, *, console: Console | None = None, plain_every_s: float = 5.0) -> None:
        self._config = config
        self._console = console or Console()
        self._live: Live | None = None
        self._plain_every_s, self._plain_at = plain_every_s, 0.0
        self._started: float | None = None
        self._first_step = 0
        self._rows: list[Mapping[str, Any]] = []
        self._evaluations: Mapping[int, float] = {}
        self._shares: Mapping[str, float] = {}

    def say(self, text: str) -> None:
        """Print a line, above the live panel if there is one."""
        self._console.print(text, highlight=False)

    def begin(self, *, first_step: int) -> None:
        """Start showing steps."""
        self._started, self._first_step = time.monotonic(), first_step
        if self._console.is_terminal:
            self._live = Live(self._render(), console=self._console, refresh_per_second=4, transient=False)
            self._live.start()

    def step(self, row: Mapping[str, Any], *, evaluations: Mapping[int, float], shares: Mapping[str, float]) -> None:
        """Show one more completed step."""
        self._rows.append(row)
        self._evaluations, self._shares = evaluations, shares
        if self._live is not None:
            self._live.update(self._render())
        elif time.monotonic() - self._plain_at > self._plain_every_s or row["step"] == self._config.run.steps:
            self._plain_at = time.monotonic()
            self.say(self._line(row))

    def end(self) -> None:
        """Stop the live panel; what it showed last stays."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _line(self, row: Mapping[str, Any]) -> str:
        return (
            f"step {row['step']}/{self._config.run.steps}  reward {_number(row['reward_mean'])}  "
            f"accuracy {self._accuracy()}  age {_number(row['age_mean'])} (max {row['age_max']})  "
            f"{row['gen_tokens_per_s']:.0f} tok/s  idle gen {self._share('rollout_idle_fraction')} "
            f"train {self._share('trainer_idle_fraction')}  left {self._time_left()}"
        )

    def _render(self) -> RenderableType:
        if not self._rows:
            return Panel(Text("waiting for the first batch ..."), title="areal-lite", border_style="cyan")
        row = self._rows[-1]
        total = self._config.run.steps
        table = Table.grid(padding=(0, 3))
        for _ in range(4):
            table.add_column(justify="left", no_wrap=True)
        ledger = row["ledger"]
        cells = [
            ("reward", _number(row["reward_mean"])),
            ("held-out accuracy", self._accuracy()),
            ("token age", f"{_number(row['age_mean'])} mean, {row['age_max']} max, bound "
                          f"{self._config.queue.max_staleness}"),
            ("masked as stale", f"{row['tokens_masked_stale']} tokens"),
            ("generated", f"{row['gen_tokens_per_s']:,.0f} tokens/s"),
            ("trained", f"{row['samples_per_s']:.0f} samples/s"),
            ("generators idle / paused", f"{self._share('rollout_idle_fraction')} / {self._share('paused_fraction')}"),
            ("trainer idle", self._share("trainer_idle_fraction")),
            ("entropy, grad norm", f"{_number(row['entropy'])}, {_number(row['grad_norm'])}"),
            ("length", f"{_number(row['length_mean'], 1)} tokens, {row['truncated_fraction']:.0%} cut off"),
        ]  # fmt: skip
        for left, right in zip(cells[::2], cells[1::2], strict=True):
            table.add_row(f"[dim]{left[0]}[/]", left[1], f"[dim]{right[0]}[/]", right[1])
        flow = "  ".join(f"{name} {count}" for name, count in ledger.items() if count and name != "outstanding")
        head = Table.grid(padding=(0, 2))
        head.add_row(
            f"[bold]step {row['step']}[/] of {total}",
            ProgressBar(total=total, completed=row["step"], width=30),
            f"left {self._time_left()}",
        )
        rewards = [float(r["reward_mean"]) for r in self._rows if r["reward_mean"] is not None]
        return Panel(
            Group(head, Text(), table, Text(), Text(f"reward  {sparkline(rewards, 60)}", style="green"),
                  Text(f"groups  {flow}", style="dim")),
            title="areal-lite", border_style="cyan",
        )  # fmt: skip

    def _accuracy(self) -> str:
        if not self._evaluations:
            return "-"
        steps = sorted(self._evaluations)
        first, last = self._evaluations[steps[0]], self._evaluations[steps[-1]]
        return f"{first:.3f}" if len(steps) == 1 else f"{first:.3f} → {last:.3f} (step {steps[-1]})"

    def _share(self, name: str) -> str:
        return f"{self._shares.get(name, 0.0):.0%}"

    def _time_left(self) -> str:
        done = len(self._rows)
        if self._started is None or done == 0:
            return "-"
        per_step = (time.monotonic() - self._started) / done
        seconds = int(per_step * (self._config.run.steps - self._first_step - done))
        return f"{seconds // 60}:{seconds % 60:02d}"


def sparkline(values: list[float], width: int) -> str:
    """Draw values as a line of block characters, averaged into at most `width` of them."""
    if not values:
        return ""
    size = -(-len(values) // width)
    means = [sum(part) / len(part) for part in (values[i : i + size] for i in range(0, len(values), size))]
    low, high = min(means), max(means)
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    return f"{low:.2f} " + "".join(_SPARKS[round((value - low) * scale)] for value in means) + f" {high:.2f}"


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
