"""What a person sees: a panel on a terminal, plain lines elsewhere; nothing breaks on values that are not there."""

import io
from typing import Any

import pytest
from rich.console import Console

from areal_lite.config.offline import load_any_config
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
        self.console = Console(
            file=self.file, width=width, force_terminal=terminal, color_system=None, force_interactive=terminal
        )
        self.view = View(CONFIG, console=self.console, plain_every_s=plain_every_s)

    def step(self, **changes: Any) -> None:
        self.view.step(ROW | changes, evaluations=EVALUATIONS, shares=SHARES)

    def panel(self) -> list[str]:
        """The panel as it would be drawn now."""
        with self.console.capture() as capture:
            self.console.print(self.view._render())
        return capture.get().splitlines()


@pytest.mark.parametrize(
    ("speed", "words"), [(0.48, "0.48"), (0.0, "0"), (3.14, "3.1"), (9.99, "10"), (12.3, "12"), (3806.2, "3,806")]
)
def test_a_slow_speed_is_not_rounded_to_nothing(speed: float, words: str) -> None:
    """Seen failing with `0 samples/s` for 0.48."""
    screen = Screen(width=120)
    screen.step(samples_per_s=speed)
    assert f" {words} samples/s trained" in "".join(screen.panel())


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_panel_keeps_its_size(width: int) -> None:
    """Before the first step, after it, and with long numbers: every line fits, and the panel does not jump.

    Seen failing with the counts of groups by reason wrapped over several lines.
    """
    screen = Screen(width=width)
    panels = [screen.panel()]
    screen.step()
    panels.append(screen.panel())
    ledger = ROW["ledger"] | {f"failed(exception:{name})": 10**6 for name in ("ValueError", "KeyError", "TypeError")}
    screen.step(gen_tokens_per_s=1e9, tokens_masked_stale=10**9, ledger=ledger, grad_norm=1e7)
    panels.append(screen.panel())
    assert {len(panel) for panel in panels} == {len(panels[0])}
    assert {len(line) for panel in panels for line in panel} == {width}


def test_at_80_columns_every_figure_is_readable() -> None:
    """Seen failing with two columns of figures: at 80 columns they were cut off."""
    screen = Screen(width=80)
    screen.view.begin(first_step=0)
    for step in range(1, 121):
        screen.step(step=step)
    screen.view.end()
    text = "\n".join(screen.panel())
    for words in (
        "step 120 of 380",
        "0.412",
        "accuracy 0.210 → 0.410 (step 100)",
        "age 1.23; oldest 4 of 4 allowed",
        "1,234 masked as stale",
        "8,123 tokens/s generated",
        "180 samples/s trained",
        "generators 2%; paused 8%; trainer 3%",
        "entropy 0.457",
        "length 24.3; 1% truncated",
        "gradient norm 0.310",
        "trained 1,920, ready 9, in flight 13, stale 3, failed(timeout) 2",
    ):
        assert words in text, words
    assert "…" not in text


def test_the_panel_goes_on_a_terminal_and_stays_at_the_end() -> None:
    screen = Screen()
    screen.view.begin(first_step=0)
    screen.step(step=1)
    screen.view.print("rollout/1 was lost")
    screen.view.end()
    screen.view.end()
    shown = screen.file.getvalue()
    assert "rollout/1 was lost" in shown
    assert shown.splitlines()[-2].startswith("╰")


def test_without_a_terminal_each_step_is_one_plain_line() -> None:
    """Not wrapped at 80 columns: a log is read by line. Seen failing without `soft_wrap`."""
    screen = Screen(terminal=False)
    screen.view.begin(first_step=118)
    screen.step(step=119)
    screen.step(step=120)
    screen.view.end()
    first, second = screen.file.getvalue().splitlines()
    assert first.startswith("step 119/380  reward 0.412")
    assert "  held out accuracy 0.210 → 0.410 (step 100)  policy " in first
    assert (
        "tokens age 1.23; oldest 4 of 4 allowed; 1,234 masked as stale  speed 180 samples/s trained; 8,123 " in second
    )
    assert "idle generators 2%; paused 8%; trainer 3%" in second
    assert "groups trained 1,920, ready 9" in second
    assert "\x1b" not in first + second


def test_plain_lines_come_at_intervals_and_for_the_last_step() -> None:
    """Seen failing with every step printed."""
    screen = Screen(terminal=False, plain_every_s=1000.0)
    for step in range(1, 381):
        screen.step(step=step)
    assert [line.split()[1] for line in screen.file.getvalue().splitlines()] == ["1/380", "380/380"]


@pytest.mark.parametrize("terminal", [True, False])
def test_values_that_are_not_there_are_dashes(terminal: bool) -> None:
    """A figure may be null. Seen failing with `f"{row['gen_tokens_per_s']:.0f}"`."""
    screen = Screen(terminal=terminal)
    screen.view.begin(first_step=0)
    nothing: dict[str, Any] = {key: None for key in ROW if key not in ("step", "ledger")}
    screen.view.step({**ROW, **nothing, "ledger": {}}, evaluations={}, shares={})
    lines = screen.panel()
    screen.view.end()
    assert any("reward    -" in line for line in lines)
    assert any("held out  -" in line for line in lines)
    assert any("groups    -" in line for line in lines)


def test_verifiers_and_sources_have_a_line() -> None:
    """Rewards by source where there are several; each verifier with its latency, and what is in trouble.

    One that nobody asks, as an agent brings its reward, has no part in it. Seen failing with all of them.
    """
    screen = Screen(width=160)
    math = {
        "calls": 9,
        "latency_p50_s": 0.0123,
        "latency_p95_s": 0.4,
        "waiting": 7,
        "failures": {"timeout": 2, "nan": 1},
    }
    code = {"calls": 1, "latency_p50_s": 0.5, "latency_p95_s": 1.0, "waiting": 0, "failures": {}}
    screen.step(reward_by_source={"sums": 0.5, "game": 0.25}, verifiers={"code": code, "math": math})
    assert any("sums 0.500, game 0.250" in line for line in screen.panel() if "reward" in line)
    (line,) = [line for line in screen.panel() if "scoring" in line]
    assert "code 500 ms (95 %: 1000 ms); math 12 ms (95 %: 400 ms), 7 waiting, 3 failed" in line
    screen.step(reward_by_source={"sums": 0.5}, verifiers={"code": code | {"calls": 0}})
    assert any("scoring   -" in line for line in screen.panel())


@pytest.mark.parametrize("text", ["list [0, 1] and [bold] and [/usr/lib] end", "a [/] b", "[red]"])
def test_brackets_are_shown_as_they_are(text: str) -> None:
    """Errors hold paths and lists. Seen failing with markup on: `[/usr/lib]` raised, `[bold]` disappeared."""
    screen = Screen(terminal=False)
    screen.view.print(text, style="yellow")
    assert screen.file.getvalue() == f"{text}\n"


def test_one_evaluation_is_one_number() -> None:
    screen = Screen()
    screen.view.step(ROW, evaluations={0: {"accuracy": 0.25}}, shares={})
    assert any("held out  accuracy 0.250  " in line for line in screen.panel())
    screen.view.step(ROW, evaluations={0: {"accuracy": 0.25, "called": "mean reward"}}, shares={})
    assert any("held out  mean reward 0.250  " in line for line in screen.panel())


def test_a_resumed_run_counts_from_its_first_step() -> None:
    """Time left is that of the steps still to do. Seen failing with steps counted from 0."""
    screen = Screen()
    screen.view.begin(first_step=300)
    screen.view._started -= 100.0
    for step in range(301, 341):
        screen.step(step=step)
    (head,) = [line for line in screen.panel() if "step 340 of 380" in line]
    screen.view.end()
    assert "0:01:40 elapsed, 0:01:40 left" in head


@pytest.mark.parametrize(
    ("values", "width", "drawn"),
    [
        ([], 8, ""),
        ([0.5], 8, "0.50 ▁ 0.50"),
        ([1.0, 1.0], 8, "1.00 ▁▁ 1.00"),
        ([0.0, 7.0], 8, "0.00 ▁█ 7.00"),
        ([float(n) for n in range(8)], 8, "0.00 ▁▂▃▄▅▆▇█ 7.00"),
        ([0.0, 2.0, 4.0, 6.0, 8.0, 8.0], 3, "1.00 ▁▅█ 8.00"),
        ([3.0, 3.0, 0.0], 2, "0.00 █▁ 3.00"),
        ([0.0, 0.95, 1.0], 8, "0.00 ▁██ 1.00"),
    ],
)
def test_a_sparkline_spans_its_bounds(values: list[float], width: int, drawn: str) -> None:
    """Means of 1, 5 and 8 for the fifth: (5 - 1) / (8 - 1) of 7 steps is 4. Seen failing with floor for round."""
    assert sparkline(values, width) == drawn


def test_an_offline_run_has_the_same_panel() -> None:
    """Of its own metrics: the loss with its curve, held-out figures, and no groups."""
    config = load_any_config("rlhf_sft", ["run.steps=4"], command="sft")
    console = Console(file=io.StringIO(), width=100)
    view = View(config, console=console)
    rows = {"loss": 0.5, "grad_norm": 1.0, "tokens": 90.0}
    for step in (1, 2):
        view.step(
            {"step": step, **rows}, evaluations={0: {"loss": 0.75, "margin": 0.1}, 2: {"loss": 0.5, "margin": 1.0}}
        )
    with console.capture() as capture:
        console.print(view._render())
    shown = capture.get()
    for words in (
        "step 2 of 4",
        "0.500  0.50 ▁▁ 0.50",
        "held out  loss 0.750 → 0.500, margin 0.100 → 1.000 (step 2)",
        "90 tokens",
    ):
        assert words in shown, words
    assert "groups" not in shown
