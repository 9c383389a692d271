"""What a person sees: a panel on a terminal, plain lines elsewhere; nothing breaks on values that are not there."""

import io
import re
import sys
from typing import Any

import pytest
from rich.console import Console

from areal_lite.config.recipe import load_config
from areal_lite.launch.run.view import View, sparkline

CONFIG = load_config("arith_cpu", ["run.steps=380"])
ROW: dict[str, Any] = {
    "step": 120,
    "reward_mean": 0.412,
    "reward_by_source": {"sums": 0.412},
    "age_mean": 1.234,
    "age_max": 4,
    "tokens_masked_stale": 1234,
    "gen_tokens_per_s": 8123.4,
    "samples_per_s": 180.2,
    "entropy": 0.4567,
    "grad_norm": 0.31,
    "length_mean": 24.34,
    "truncated_fraction": 0.013,
    "ledger": {
        "waiting": 0, "leased_rollout": 12, "generated": 0, "leased_verify": 1, "ready": 9, "taken": 0,
        "trained": 1920, "rejected": 0, "failed": 2, "stale": 3, "abandoned": 0, "failed(timeout)": 2,
        "admitted": 1947, "outstanding": 22,
    },
}  # fmt: skip
SHARES = {"rollout_idle_fraction": 0.021, "trainer_idle_fraction": 0.034, "paused_fraction": 0.081}
EVALUATIONS = {step: {"accuracy": value, "by_source": {}} for step, value in ((0, 0.21), (50, 0.3), (100, 0.41))}


class Screen:
    """A view on a console that records what it shows."""

    def __init__(self, *, width: int = 80, terminal: bool = True, plain_every_s: float = 0.0) -> None:
        self.file = io.StringIO()
        console = Console(
            file=self.file, width=width, force_terminal=terminal, color_system=None, force_interactive=terminal
        )
        self.view = View(CONFIG, console=console, plain_every_s=plain_every_s)
        self.view.begin(first_step=0)

    def step(self, **changes: Any) -> None:
        self.view.step(ROW | changes, evaluations=EVALUATIONS, shares=SHARES)

    def lines(self) -> list[str]:
        """End the view; return what it leaves: on a terminal its last panel, else all lines."""
        self.view.end()
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.file.getvalue())
        return text[max(text.rfind("╭"), 0) :].splitlines()


LONG = {
    "gen_tokens_per_s": 1e9,
    "tokens_masked_stale": 10**9,
    "grad_norm": 1e7,
    "ledger": ROW["ledger"] | {f"failed(exception:{name})": 10**6 for name in ("ValueError", "KeyError", "TypeError")},
}


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_panel_keeps_its_size(width: int) -> None:
    """Before the first step, after it, and with long numbers: every line fits, and the panel does not jump.

    Seen failing with the counts of groups by reason wrapped over several lines.
    """
    panels = []
    for rows in ([], [ROW], [ROW | LONG]):
        screen = Screen(width=width)
        for row in rows:
            screen.step(**row)
        panels.append(screen.lines())
    assert {len(panel) for panel in panels} == {len(panels[0])}
    assert {len(line) for panel in panels for line in panel} == {width}


@pytest.mark.parametrize(("speed", "words"), [(0.48, "0.48"), (0.0, "0"), (9.99, "10"), (3806.2, "3,806")])
def test_without_a_terminal_each_step_is_one_plain_line(speed: float, words: str) -> None:
    """Not wrapped at 80 columns: a log is read by line. Seen failing without `soft_wrap`, and with 0 for 0.48."""
    screen = Screen(terminal=False)
    screen.step(step=119)
    screen.step(step=120, samples_per_s=speed)
    first, second = screen.file.getvalue().splitlines()
    assert first.startswith("step 119/380  reward 0.412")
    assert "  held out accuracy 0.210 → 0.410 (step 100)  policy " in first
    assert f"1,234 masked as stale  speed {words} samples/s trained; 8,123 tokens/s generated" in second
    assert "idle generators 2%; paused 8%; trainer 3%" in second
    assert "groups trained 1,920, ready 9, in flight 13, stale 3, failed(timeout) 2" in second
    assert "\x1b" not in first + second


def test_plain_lines_come_at_intervals_and_for_the_last_step() -> None:
    """Seen failing with every step printed."""
    screen = Screen(terminal=False, plain_every_s=1000.0)
    for step in range(1, 381):
        screen.step(step=step)
    assert [line.split()[1] for line in screen.lines()] == ["1/380", "380/380"]


def test_values_that_are_not_there_are_dashes() -> None:
    """A figure may be null. Seen failing with `f"{row['gen_tokens_per_s']:.0f}"`."""
    screen = Screen()
    nothing: dict[str, Any] = {key: None for key in ROW if key not in ("step", "ledger")}
    screen.view.step({**ROW, **nothing, "ledger": {}}, evaluations={}, shares={})
    lines = screen.lines()
    for label in ("reward  ", "held out", "groups  "):
        assert any(f"{label}  -" in line for line in lines)


def test_infinite_figures_are_dashes_and_in_no_curve() -> None:
    """A row holds the largest float in their place. Seen failing with a sum of two, and with 309 digits."""
    screen = Screen()
    for step in range(100):
        screen.step(reward_mean=sys.float_info.max if step > 90 else 2.0)
    (line,) = (line for line in screen.lines() if "reward  " in line)
    assert "reward    -  2.00" in line


def test_characters_that_a_terminal_lacks_are_replaced() -> None:
    """Seen failing with a run that an arrow ended."""
    file = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    View(CONFIG, console=Console(file=file, width=200)).step(ROW, evaluations=EVALUATIONS)
    file.seek(0)
    assert "0.210 ? 0.410" in file.read()


@pytest.mark.parametrize("text", ["list [0, 1] and [bold] and [/usr/lib] end", "a [/] b", "[red]"])
def test_brackets_are_shown_as_they_are(text: str) -> None:
    """Errors hold paths and lists. Seen failing with markup on: `[/usr/lib]` raised, `[bold]` disappeared."""
    screen = Screen(terminal=False)
    screen.view.print(text, style="yellow")
    assert screen.file.getvalue() == f"{text}\n"


@pytest.mark.parametrize(
    ("values", "width", "drawn"),
    [
        ([], 8, ""),
        ([1.0, 1.0], 8, "1.00 ▁▁ 1.00"),
        ([float(n) for n in range(8)], 8, "0.00 ▁▂▃▄▅▆▇█ 7.00"),
        ([0.0, 2.0, 4.0, 6.0, 8.0, 8.0], 3, "1.00 ▁▅█ 8.00"),
    ],
)
def test_a_sparkline_spans_its_bounds(values: list[float], width: int, drawn: str) -> None:
    """Means of 1, 5 and 8 for the last: (5 - 1) / (8 - 1) of 7 steps is 4. Seen failing with floor for round."""
    assert sparkline(values, width) == drawn
