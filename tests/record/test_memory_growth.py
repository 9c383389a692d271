"""Which memory curves are worth a warning."""

import pytest

from areal_lite.record.memory_growth import growth_warning


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
