"""Which memory curves and which speeds of publications are worth a warning."""

import pytest

from areal_lite.record.worker_warnings import growth_warning, link_warning


def rows(values: list[float], *, lane: str = "verifier/0") -> list[dict[str, dict[str, float]]]:
    return [{"memory_mb": {"queue": 200.0, lane: value}} for value in values]


@pytest.mark.parametrize(
    ("values", "is_warned"),
    [
        ([1000.0 + 5 * step for step in range(60)], True),
        ([1000.0 + 5 * step + 20 * (step % 2) for step in range(60)], True),  # with noise
        ([1000.0 + 5 * step for step in range(59)], False),  # too early to tell
        ([1000.0] * 10 + [1500.0] * 50, False),  # it has grown once
        ([1000.0 + 1 * step for step in range(60)], False),  # by less than a tenth
        ([100.0 + 1 * step for step in range(60)], False),  # by less than 100 MiB
        ([1000.0 + 50 * (step % 12) for step in range(60)], False),  # it is freed again and again
    ],
)
def test_only_memory_that_grows_steadily_and_by_much_is_warned_of(values: list[float], is_warned: bool) -> None:
    """Seen failing with the first and the last value alone."""
    text = growth_warning(rows(values))
    assert bool(text) == is_warned
    if is_warned:
        assert text.startswith("the memory of verifier/0 grew from 1,0")


def test_a_process_that_was_replaced_is_not_compared_with_its_predecessor() -> None:
    """Rows without its figure, and rows before there was the metric, are skipped."""
    assert growth_warning([{}] * 30 + rows([500.0] * 30)) == ""


def speeds(*mb_s: float, seconds: float = 2.0) -> dict[str, object]:
    return {"publish_s": seconds, "publish_mb_s": {f"rollout/{number}": speed for number, speed in enumerate(mb_s)}}


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ([speeds(90, 10, 100)] * 5, "rollout/1 received the last 5 publications at 10 MB/s, the others at 95"),
        ([speeds(90, 10)] * 5, "rollout/1 "),
        ([speeds(90, 10)] * 4, ""),  # too early to tell
        ([speeds(90, 40)] * 5, ""),  # less than three times
        ([speeds(90, 10)] * 4 + [speeds(90, 80)], ""),  # once only
        ([speeds(90, 10, seconds=0.5)] * 5, ""),  # it costs nothing
        ([speeds(10)] * 5, ""),  # with nothing to compare with
        ([{"publish_s": 2.0, "publish_mb_s": {}}] * 5, ""),  # one group for all: nccl
    ],
)
def test_an_engine_behind_a_slow_link_is_named(rows: list[dict[str, object]], named: str) -> None:
    text = link_warning(rows)
    assert text.startswith(named)
    assert bool(text) == bool(named)
