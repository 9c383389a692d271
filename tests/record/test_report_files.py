"""What the report reads: gaps, half-written files and runs that are still going; shares and settings as they are."""

import json
import sys
from collections import Counter
from pathlib import Path

import pytest
from report_builders import event, make_events, make_offline_run, make_run, write_rows

from areal_lite.errors import DataError
from areal_lite.events import Event
from areal_lite.record.lanes import between_publications, lived
from areal_lite.record.report.charts import Chart
from areal_lite.record.report.curves import age_charts, diagnostics, learning, step_times
from areal_lite.record.report.overview import answers
from areal_lite.record.report.read import RunFiles
from areal_lite.record.report.rewards import reward_charts
from areal_lite.record.report.timeline import timeline
from areal_lite.record.report.times import failure_chart, failure_table, lane_shares, mean_shares
from areal_lite.record.run_folder import changed


def test_a_half_written_line_is_left_out_and_noted(tmp_path: Path) -> None:
    """Rows behind a broken one still count. Seen failing with reading that stops there."""
    run = make_run(tmp_path / "run", steps=3)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join([lines[0], '{"step": 2, "rew', lines[2], "7"]))
    found = RunFiles(run)
    assert [row["step"] for row in found.metrics] == [1, 3]
    assert found.notes == [
        "metrics.jsonl: 2 line(s) cut off or broken, left out",
        "metrics.jsonl has no row of step 2: figures and curves leave them out",
    ]


def test_of_a_long_event_log_one_group_in_so_many_is_kept(tmp_path: Path) -> None:
    """Shares of time need all other events, and the timeline shows the end. Seen failing with all of it in memory."""
    path = make_run(tmp_path / "run", steps=30)
    whole, part = RunFiles(path), RunFiles(path, max_log_bytes=(path / "events.jsonl").stat().st_size // 3)
    count = {run: Counter(event["kind"] for event in run.events) for run in (whole, part)}
    assert count[part]["group"] == count[part]["verify"] == count[whole]["group"] // 4 == 15
    assert lane_shares(part.published) == lane_shares(whole.published)
    assert part.recent == whole.recent[-len(part.recent) :]
    assert len(whole.recent) // 4 < len(part.recent) < len(whole.recent) // 2
    last, groups = "the timeline shows its last 0 MB", "lengths and rewards are those of one group in 4"
    assert part.notes == [f"events.jsonl is long: {last}, {groups}"]


def test_what_is_no_run_is_an_error_that_names_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"expected a run folder, got .*nowhere, no such folder"):
        RunFiles(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"a folder with none of config\.json, metrics\.jsonl, events\.jsonl"):
        RunFiles(tmp_path)


def test_shares_are_of_the_time_between_the_first_and_the_last_publication() -> None:
    """Each second: 0.1 waiting, 0.7 training, 0.2 publishing; engines paused for 0.1.

    Seen failing with the whole log: before the first step the trainer's time would be counted.
    """
    shares = lane_shares(between_publications([event(-50.0, "trainer", "wait"), *make_events(steps=5)]))
    assert list(shares) == ["rollout/0", "rollout/1", "trainer"]
    assert shares["trainer"] == pytest.approx({"waiting": 0.1, "training": 0.7, "publishing": 0.2})
    assert shares["rollout/0"] == pytest.approx({"generating": 0.9, "pausing": 0.1})


def test_time_in_which_a_run_did_not_live_is_cut_out_and_seen(tmp_path: Path) -> None:
    """Three steps, an hour without the run, two steps: six seconds in all but for a tenth.

    A start that failed in between left a second mark at the same time. Seen failing with seconds since the first event,
    with the hour cut out for each mark, and with the time of the second start as `other` of step 4.
    """
    path = make_run(tmp_path / "run", steps=5)
    log, gap = make_events(steps=5), event(3.0, "controller", "gap")
    write_rows(path / "events.jsonl", [row for row in log if row["time"] <= 3.0] + [gap, gap])
    with (path / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(moved(row, 3600)) + "\n" for row in log if row["time"] > 3.0)
    run = RunFiles(path)
    clock = lived(run.recent)
    assert [clock(moment) for moment in (2.0, 3.0, 1800.0, 3604.0)] == pytest.approx([2.0, 3.0, 3.0, 3.9])
    assert timeline(run.recent)["end"] * 1e-4 == pytest.approx(5.9)
    chart = step_times(run)
    assert chart is not None
    assert (chart.data[-1]["name"], chart.data[-1]["y"]) == ("other", [None, 0.0, 0.0, None, 0.0])


def moved(row: Event, by: float) -> Event:
    return {key: value + by if key in ("time", "start", "end") else value for key, value in row.items()}


def test_held_out_points_have_bars_where_their_error_is_known(tmp_path: Path) -> None:
    """1.96 standard errors either way, and words about it. Seen failing with the error itself, and without a note.

    Where each row is known, the error is that of the change in pairs: changes of 0, 1, 1 and 0 have a deviation of
    0.5774, and half the interval is 1.96 * 0.5774 / 2 = 0.566. Seen failing without it.
    An evaluation of an older version has no error. Seen failing with one such taking all bars away.
    """
    path, title = make_run(tmp_path / "run"), "held-out accuracy"

    def chart(path: Path) -> Chart:
        (found,) = (chart for chart in learning([RunFiles(path)]) if chart and chart.title == title)
        return found

    assert chart(path).data[0]["error_y"]["array"] == [None, pytest.approx(0.566, abs=1e-3)]
    assert chart(path).note.startswith("bars: 95 % interval of the change since the first point, over the same rows")
    write_rows(path / "events.jsonl", make_events(has_rewards=False))
    assert ("error_y" in chart(path).data[0], chart(path).note) == (False, "")
    rows = [row | {"standard_errors": {"accuracy": 0.1}} for row in make_events(has_rewards=False)]
    write_rows(path / "events.jsonl", rows)
    assert chart(path).data[0]["error_y"]["array"] == pytest.approx([0.196, 0.196])
    assert chart(path).note.startswith("bars: 95 % confidence")
    path = make_offline_run(tmp_path / "dpo")
    evaluation = event(9.0, "controller", "eval", step=4, figures={"accuracy": 0.8}, standard_errors={"accuracy": 0.1})
    (path / "events.jsonl").open("a").write(json.dumps(evaluation) + "\n")
    assert chart(path).data[0]["error_y"]["array"] == [None, pytest.approx(0.196)]


def test_rewards_are_those_of_all_scored_groups(tmp_path: Path) -> None:
    """Two groups a step: [1, 0, 0], then [1, 1, 0]. Twelve steps: the last ten have four and six of these.

    Of three samples pass@2 is 2/3 with one right, and 1 with two. Seen failing with the failed sample as 0, and with
    1 - (1 - p)**k for pass@k. A run of an older version has no such chart. A broken line moves no step: seen failing
    with steps counted from the first row.
    """
    path = make_run(tmp_path / "run")
    rows = (path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (path / "metrics.jsonl").write_text("".join(["broken\n", *rows[1:]]))
    distribution, spread, passing = (chart.data for chart in reward_charts(RunFiles(path)) if chart)
    shares = {band["name"]: (band["x"][0], band["y"][0], band["y"][-1]) for band in distribution}
    right = (4 * 1 + 6 * 2) / (10 * 3)
    assert shares == {"0": (1, pytest.approx(2 / 3), pytest.approx(1 - right)), "1": (1, pytest.approx(1 / 3), right)}
    assert [curve["y"][0] for curve in spread] == [1.0, pytest.approx(2**0.5 / 3)]
    assert {curve["name"]: curve["y"][0] for curve in passing} == {
        "pass@1": pytest.approx(1 / 3), "pass@2": pytest.approx(2 / 3)
    }  # fmt: skip
    write_rows(path / "events.jsonl", make_events(has_rewards=False))
    assert [chart for chart in reward_charts(RunFiles(path)) if chart] == []


@pytest.mark.parametrize("count", [6, 7])
@pytest.mark.parametrize(("least", "width"), [(0.9, 1e-4), (1000.0, 0.1), (-1e9, 1e-6)])
def test_rewards_that_hardly_differ_have_bands_of_their_own(
    tmp_path: Path, count: int, least: float, width: float
) -> None:
    """Seen failing with three digits of each: bands of equal names overwrote each other."""
    path = make_run(tmp_path / "run", steps=1)
    events = [event(1.0, "trainer", "published", version=1)]
    rewards = [least + width * place for place in range(count)]
    events.append(event(1.5, "verifier/0", "verify", group_id="g", start=1.2, end=1.5, rewards=rewards))
    write_rows(path / "events.jsonl", events)
    distribution, *_ = (chart.data for chart in reward_charts(RunFiles(path)) if chart)
    assert len(distribution) == 6
    assert sum(band["y"][0] for band in distribution) == pytest.approx(1.0)


def test_the_first_screen_answers_five_questions(tmp_path: Path) -> None:
    """From pairs, 0.5 +- 0.566, so that four rows show nothing; and with what went wrong, by count.

    Seen failing with "yes" for every rise, for that of a single row too, with a lost worker that nobody mentions, and
    with "? held-out rows" of an offline run, and with an infinite parity that is left out.
    """
    path = make_run(tmp_path / "run")

    def cards(path: Path) -> dict[str, tuple[str, list[str]]]:
        run = RunFiles(path)
        return {
            one.question: (one.answer, list(one.lines)) for one in answers(run, mean_shares(lane_shares(run.published)))
        }

    found = cards(path)
    assert found["Did it learn?"][0] == "not shown"
    answer, lines = found["How sure is that?"]
    assert (answer, lines[:3]) == (
        "-0.066 to +1.066",
        ["95 % interval of the change of +0.500", "4 held-out rows in pairs", "2 better, 0 worse"],
    )
    assert found["Is it healthy?"][:1] == ("yes",)
    assert found["What limits it?"] == (
        "training",
        ["trainer: 70% training, 20% publishing, 10% waiting", "generators: 90% generating, 10% paused"],
    )
    assert found["What did it cost?"][0] == "0:01:19"
    assert found["What did it cost?"][1][0] == "12 steps, 1,536 samples"
    rows = [row | {"rewards": {str(n): float(row["step"] > 0) for n in range(4)}} if row["kind"] == "eval" else row
            for row in [*make_events(), event(5.0, "controller", "lost", worker="rollout/1")]]  # fmt: skip
    write_rows(path / "events.jsonl", rows)
    found = cards(path)
    assert found["Did it learn?"][0] == "yes"
    assert (found["Is it healthy?"][0], found["Is it healthy?"][1][:2]) == (
        "look at this",
        ["done: 12 of 100 steps", "workers lost: 1"],
    )
    rows = [row | {"rewards": {"a": float(row["step"] > 0)}} if row["kind"] == "eval" else row for row in rows]
    write_rows(path / "events.jsonl", rows)
    assert cards(path)["Did it learn?"][0] == "not measured", "one row may have changed by chance"
    metrics = path / "metrics.jsonl"
    infinite = {"parity_mean_abs_logprob_diff": sys.float_info.max}  # as a recorder writes it
    write_rows(metrics, [json.loads(line) | infinite for line in metrics.read_text().splitlines()])
    assert cards(path)["Is it healthy?"][1][2] == "engine and trainer differ by 2e+308 nats a token"
    path = make_offline_run(tmp_path / "dpo")
    offline = cards(path)
    assert offline["Did it learn?"][0] == "not measured"
    assert list(offline) == ["Did it learn?", "How sure is that?", "Is it healthy?", "What did it cost?"]
    errors = {"standard_errors": {"accuracy": 0.1}}
    rows = [event(0.0, "controller", "eval", step=step, figures={"accuracy": 0.1 * step}, **errors) for step in (0, 4)]
    write_rows(path / "events.jsonl", rows)
    facts = ["95 % interval of the change of +0.400", "one seed: another may differ by more"]
    assert cards(path)["How sure is that?"] == ("+0.123 to +0.677", facts)


def test_failures_are_counted_once(tmp_path: Path) -> None:
    """Rows count since the run's start or its resume. Seen failing with the rows' counts added up, or drawn: 7."""
    run = RunFiles(make_run(tmp_path / "run", steps=3))
    for row, times in zip(run.metrics, (2, 3, 2), strict=True):
        row["verifier_failures"] = {"timeout": times}
    assert failure_table(run) == [{"what": "verifier failed", "reason": "timeout", "times": 5}]
    chart = failure_chart(run)
    assert chart is not None
    assert [(trace["name"], trace["y"]) for trace in chart.data] == [("timeout", [2.0, 1.0, 2.0])]


def test_the_share_of_a_quarter_is_of_all_steps(tmp_path: Path) -> None:
    """3 of 8 and 5 of 8 tokens. Seen failing with the mean of the steps' shares; a run without figures has no chart."""
    run = RunFiles(make_run(tmp_path / "run", steps=2))
    assert "share of the tokens that train" not in [chart.title for chart in age_charts([run]) if chart]
    for row, (tokens, trained) in zip(run.metrics, ((2, 0), (6, 3)), strict=True):
        row["tokens_by_quarter"] = {"65-256": [[tokens] * 4, [trained, trained, tokens, tokens]]}
    (chart,) = [chart for chart in age_charts([run]) if chart and chart.title == "share of the tokens that train"]
    assert [(trace["name"], trace["x"], trace["y"]) for trace in chart.data] == [
        (name, ["65-256"], [share])
        for name, share in (("first quarter", 0.375), ("second", 0.375), ("third", 1.0), ("last", 1.0))
    ]


def test_figures_of_an_own_loss_are_charted(tmp_path: Path) -> None:
    """A curve each, of several runs under their names. Seen failing with the metric undrawn."""
    runs = []
    for name in ("a", "b"):
        folder = make_run(tmp_path / name)
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        write_rows(folder / "metrics.jsonl", (row | {"loss_metrics": {"margin": row["step"] / 10}} for row in rows))
        runs.append(RunFiles(folder))
    for shown, names in ((runs[:1], ["margin"]), (runs, ["a: margin", "b: margin"])):
        (chart,) = (one for one in diagnostics(shown) if one and one.title == "figures of the loss function")
        assert [curve["name"] for curve in chart.data] == names
        assert chart.data[0]["y"][:2] == [0.1, 0.2]


def test_only_settings_that_differ_from_the_defaults_come_first(tmp_path: Path) -> None:
    """Also inside sources that the recipe names. Seen failing with the settings that were given: the file gives all."""
    settings = {"data": {"mix": {"sums": {"arith": {"max_value": 7}}, "more": {"weight": 3.0}}}}
    run = RunFiles(make_run(tmp_path / "run", settings=settings))
    assert changed(run.config) == {"data.mix.sums.arith.max_value": 7, "data.mix.more.weight": 3.0}
    assert changed({"run": {"no_such_key": 1}}) is None
