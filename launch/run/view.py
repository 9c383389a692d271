"""What a person sees while a run goes on: a live panel on a terminal, plain lines elsewhere."""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from areal_lite.config.recipe import Config

__all__ = ["View", "sparkline"]

_SPARKS = "▁▂▃▄▅▆▇█"
_SPARKLINE_WIDTH = 40
_REFRESH_PER_S = 2.0


class View:
    """Shows start-up, steps and the end of a run; everything it knows it is told."""

    def __init__(self, config: Config, *, console: Console | None = None, plain_every_s: float = 5.0) -> None:
        self._config = config
        self._console = console or Console()
        self._live: Live | None = None
        self._plain_every_s = plain_every_s
        self._plain_at: float | None = None
        self._started, self._first_step = time.monotonic(), 0
        self._rows: list[Mapping[str, Any]] = []
        self._evaluations: Mapping[int, float] = {}
        self._shares: Mapping[str, float] = {}

    def say(self, text: str, *, style: str = "") -> None:
        """Print a line, above the live panel if there is one; brackets in the text are only brackets."""
        self._console.print(Text(text, style=style), soft_wrap=True)

    def begin(self, *, first_step: int) -> None:
        """Start showing steps."""
        self._started, self._first_step = time.monotonic(), first_step
        if self._console.is_terminal:
            self._live = Live(
                get_renderable=self._render, console=self._console, refresh_per_second=_REFRESH_PER_S, transient=False
            )
            self._live.start()

    def step(self, row: Mapping[str, Any], *, evaluations: Mapping[int, float], shares: Mapping[str, float]) -> None:
        """Show one more completed step."""
        self._rows.append(row)
        self._evaluations, self._shares = evaluations, shares
        if self._live is None and (self._is_line_due() or row["step"] == self._config.run.steps):
            self._plain_at = time.monotonic()
            self.say(self._line(row))

    def end(self) -> None:
        """Stop the live panel; what it showed last stays."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _is_line_due(self) -> bool:
        return self._plain_at is None or time.monotonic() - self._plain_at >= self._plain_every_s

    def _line(self, row: Mapping[str, Any]) -> str:
        return (
            f"step {row['step']}/{self._config.run.steps}  reward {_show(row['reward_mean'])}{_by_source(row)}  "
            f"accuracy {self._accuracy()}  age {_show(row['age_mean'])} (max {_show(row['age_max'], 'd')})  "
            f"{_show(row['gen_tokens_per_s'], ',.0f')} tokens/s  "
            f"idle: generators {self._share('rollout_idle_fraction')}, trainer {self._share('trainer_idle_fraction')}  "
            f"{_flow(row['ledger'])}  left {self._time_left()}"
        )

    def _render(self) -> RenderableType:
        """Draw the panel; its height never changes, so that it does not jump."""
        table = Table.grid(padding=(0, 2), expand=True)
        table.add_column(style="dim", no_wrap=True)
        table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
        for label, text in self._facts(self._rows[-1]) if self._rows else self._waiting():
            table.add_row(label, text)
        return Panel(Group(self._head(), "", table), title="areal-lite", title_align="left", border_style="cyan")

    def _head(self) -> Table:
        total, step = self._config.run.steps, self._first_step + len(self._rows)
        head = Table.grid(padding=(0, 2), expand=True)
        head.add_column(no_wrap=True)
        head.add_column(ratio=1)
        head.add_column(no_wrap=True)
        elapsed = _clock(time.monotonic() - self._started)
        head.add_row(
            Text(f"step {step} of {total}", style="bold"),
            ProgressBar(total=total, completed=step),
            f"{elapsed} gone, {self._time_left()} left",
        )
        return head

    def _waiting(self) -> Iterable[tuple[str, str]]:
        yield "reward", "waiting for the first batch ..."
        yield "accuracy", self._accuracy()
        for label in ("tokens", "speed", "idle", "policy", "scoring", "groups"):
            yield label, ""

    def _facts(self, row: Mapping[str, Any]) -> Iterable[tuple[str, RenderableType]]:
        rewards = [float(r["reward_mean"]) for r in self._rows if r["reward_mean"] is not None]
        yield (
            "reward",
            Text.assemble(
                (f"{_show(row['reward_mean'])}  ", "bold"),
                (sparkline(rewards), "green"),
                (f"  {_by_source(row)}", "dim"),
            ),
        )
        yield "accuracy", Text(self._accuracy(), style="bold")
        yield (
            "tokens",
            (
                f"age {_show(row['age_mean'], '.2f')}, oldest {_show(row['age_max'], 'd')} of "
                f"{self._config.queue.max_staleness} allowed; {_show(row['tokens_masked_stale'], ',d')} masked as stale"
            ),
        )
        yield (
            "speed",
            (
                f"{_show(row['gen_tokens_per_s'], ',.0f')} tokens/s generated; "
                f"{_show(row['samples_per_s'], ',.0f')} samples/s trained"
            ),
        )
        yield (
            "idle",
            (
                f"generators {self._share('rollout_idle_fraction')}, paused {self._share('paused_fraction')}; "
                f"trainer {self._share('trainer_idle_fraction')}"
            ),
        )
        yield (
            "policy",
            (
                f"entropy {_show(row['entropy'])}; length {_show(row['length_mean'], '.1f')}, "
                f"{_show(row['truncated_fraction'], '.0%')} cut off; gradient norm {_show(row['grad_norm'])}"
            ),
        )
        yield "scoring", Text(_scoring(row))
        yield "groups", Text(_flow(row["ledger"]))

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
        if done == 0:
            return "-"
        per_step = (time.monotonic() - self._started) / done
        return _clock(per_step * max(self._config.run.steps - self._first_step - done, 0))


def sparkline(values: Sequence[float], width: int = _SPARKLINE_WIDTH) -> str:
    """Draw values as a line of block characters between their bounds, averaged into at most `width` blocks."""
    if not values:
        return ""
    size = -(-len(values) // width)
    means = [sum(part) / len(part) for part in (values[i : i + size] for i in range(0, len(values), size))]
    low, high = min(means), max(means)
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    return f"{low:.2f} " + "".join(_SPARKS[round((value - low) * scale)] for value in means) + f" {high:.2f}"


def _scoring(row: Mapping[str, Any]) -> str:
    """Each verifier's latency, what waits for it, and what failed."""
    verifiers = [
        f"{name} {1000 * figures['latency_p50_s']:.0f} ms (95 %: {1000 * figures['latency_p95_s']:.0f} ms)"
        + (f", {figures['waiting']} waiting" if figures["waiting"] else "")
        + (f", {sum(figures['failures'].values())} failed" if figures["failures"] else "")
        for name, figures in row.get("verifiers", {}).items()
    ]
    return "; ".join(verifiers) or "-"


def _by_source(row: Mapping[str, Any]) -> str:
    """Rewards by data source, in brackets, where prompts have several."""
    by_source = row.get("reward_by_source", {})
    return f" [{', '.join(f'{name} {value:.3f}' for name, value in by_source.items())}]" if len(by_source) > 1 else ""


def _flow(ledger: Mapping[str, int]) -> str:
    """Where the groups are: trained, on their way, and ended otherwise, by reason."""
    ready = ledger.get("ready", 0)
    counts = {
        "trained": ledger.get("trained", 0),
        "ready": ready,
        "under way": ledger.get("outstanding", 0) - ready,
        **{state: count for state, count in ledger.items() if "(" in state or state in ("stale", "abandoned")},
    }
    return ", ".join(f"{state} {count:,}" for state, count in counts.items() if count) or "-"


def _show(value: float | None, spec: str = ".3f") -> str:
    return "-" if value is None else format(value, spec)


def _clock(seconds: float) -> str:
    minutes, hours = int(seconds) // 60, int(seconds) // 3600
    return f"{hours}:{minutes % 60:02d}:{int(seconds) % 60:02d}" if hours else f"{minutes}:{int(seconds) % 60:02d}"
