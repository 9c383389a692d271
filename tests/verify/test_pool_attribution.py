"""Which call pays when a process that several of them share is lost, and who is tried again."""

import asyncio
import os
import signal

import pytest
from episode_builders import in_loop
from places import FIXTURES
from pool_builders import make_prompt, replies_of, running_pool

from areal_lite.config.verifier import VerifierSettings
from areal_lite.errors import VerifierError
from areal_lite.verify.protocol import Reply
from areal_lite.verify.quarantine import Quarantine

pytestmark = pytest.mark.deadline

CROWD = FIXTURES / "crowd_verifiers.py"
PATIENCE_S = 60.0


def running(function, **options):
    return running_pool(f"{CROWD}:{function}", within_s=PATIENCE_S, **{"timeout_s": 1.5} | options)


def score(function, completions, *, prompt=None, **options):
    """Return `(reward or failure)` of each, and the gauges."""
    options = {"timeout_s": 1.5, "prompt": prompt or make_prompt(""), **options}
    replies, gauges = replies_of(f"{CROWD}:{function}", completions, **options)
    return [reply.failure or reply.reward for reply in replies], gauges


@pytest.fixture
def log(tmp_path):
    """Where the functions write a word for each of their calls; a prompt's answer."""
    return tmp_path / "log"


# --- several calls in one process ---


def test_calls_of_an_async_function_share_a_process():
    """Each waits until three are there. Seen failing (time-outs) with `max_jobs` always 1."""
    assert score("crowd", ["meet"] * 3, concurrency=3, timeout_s=20.0)[0] == [1.0] * 3


def test_no_more_calls_are_in_flight_than_the_recipe_says():
    """Three could meet, two cannot. Seen failing with three entries in `_free`."""
    assert score("crowd", ["meet"] * 3, concurrency=2)[0][:2] == ["timeout"] * 2


@in_loop
async def test_a_late_call_is_given_up_without_its_neighbours(log):
    """An event loop that still turns lets go of one job. The neighbour is there when the deadline comes.

    Seen failing (the neighbour is called twice) without `_CANCEL_S`.
    """
    async with running("crowd", concurrency=2) as pool:
        late = asyncio.create_task(pool.score(make_prompt(log), ["hang"]))
        await asyncio.sleep(1.3)
        replies = [*await pool.score(make_prompt(log), ["slow"]), *await late]
    assert [reply.failure for reply in replies] == [None, "timeout"]
    assert log.read_text().split() == ["hang", "slow"]


@pytest.mark.parametrize(("bad", "failure"), [("block", "timeout"), ("die", "crashed")])
def test_who_shares_a_process_with_a_bad_call_does_not_pay_for_it(bad, failure):
    """Nobody knows whose fault it was, so each runs alone.

    Seen failing with every call blamed (`len(self._jobs) == 1` left out of `_settle`).
    """
    results, gauges = score("crowd", ["slow", bad, "slow"], concurrency=3)
    assert (results, gauges["failures"]) == ([1.0, failure, 1.0], {failure: 1})


# --- batches ---


def test_a_batch_takes_what_waits_and_waits_for_nothing(log):
    """Five calls, at most three at once: 3 + 2. Seen failing (five of one) with `_take(1)`."""
    prompt = make_prompt(log, bonus=1, verifier="x", workflow="y")
    assert score("many", ["a", "bb", "ccc", "dd", "e"], prompt=prompt)[0] == [2.0, 3.0, 4.0, 3.0, 2.0]
    assert log.read_text().split() == ["a+bb+ccc", "dd+e"]


@pytest.mark.parametrize(("bad", "failure"), [("raise", "exception:ValueError"), ("die", "crashed")])
def test_one_bad_completion_fails_itself_and_not_its_batch(bad, failure, log):
    """Each is tried alone. Seen failing with the batch's failure given to all of it."""
    assert score("many", ["a", bad, "bb"], prompt=make_prompt(log))[0] == [1.0, failure, 2.0]
    assert sorted(log.read_text().split()) == sorted([f"a+{bad}+bb", "a", bad, "bb"])


def test_a_batch_has_the_time_of_all_its_calls(log):
    """Four of 0.3 s with a deadline of 1 s. Seen failing (each called twice) with the deadline of one call."""
    results, gauges = score("slow_batch", ["a", "b", "c", "d"], prompt=make_prompt(log), timeout_s=1.0)
    assert (results, gauges["restarts"]) == ([1.0] * 4, 0)
    assert log.read_text().split() == ["a+b+c+d"]


# --- tries ---


def test_a_service_that_comes_back_is_asked_again(log):
    """Twice in vain. Seen failing (`unavailable`) with VerifierUnavailable an exception like any other."""
    results, gauges = score("service", ["down:2"], prompt=make_prompt(log))
    assert results[0] > 1
    assert gauges["failures"] == {}
    assert len(log.read_text().split()) == 3


def test_a_service_that_stays_away_is_asked_for_a_while(log):
    """At 0, 0.2, 1.0 and 3.0 s: pauses grow, and the last ends when the time is over. Retries have no say in it.

    Seen failing (two calls) with the count of retries in place of the time.
    """
    assert score("service", ["down:9"], prompt=make_prompt(log), unavailable_s=3.0)[0] == ["unavailable"]
    assert len(log.read_text().split()) == 4


def test_a_service_that_says_when_to_come_back_is_not_asked_before(log):
    """Twice in all, the second time when it said. Seen failing (thrice) with `retry_after_s` not looked at."""
    prompt = make_prompt(log, after_s=1.0)
    assert score("service", ["down:1"], prompt=prompt)[1]["failures"] == {}
    assert score("service", ["down:9"], prompt=prompt, unavailable_s=0.9)[0] == ["unavailable"]
    assert len(log.read_text().split()) == 2 + 2


@in_loop
async def test_a_call_that_is_never_answered_ends_though_others_are(log):
    """Seen hanging with `_away_since` alone."""
    async with running("service", unavailable_s=1.0) as pool:
        refused = asyncio.create_task(pool.score(make_prompt(log), ["down:99"]))
        while not refused.done():
            await pool.score(make_prompt(""), ["ok"])
    assert refused.result()[0].failure == "unavailable"


@in_loop
async def test_once_a_service_has_been_away_that_long_nobody_waits_anew(log):
    """The second call is asked once. Seen failing with the call's own `away_since` alone."""
    async with running("service", unavailable_s=0.6) as pool:
        await pool.score(make_prompt(log), ["down:99"])
        num_before = len(log.read_text().split())
        (reply,) = await pool.score(make_prompt(log), ["down:99"])
    assert reply.failure == "unavailable"
    assert len(log.read_text().split()) == num_before + 1


@pytest.mark.parametrize(
    ("completion", "failure", "tries"),
    [("raise", "exception:KeyError", 1), ("hang", "timeout", 1), ("die", "crashed", 2)],
)
def test_a_calls_own_failure_is_final(completion, failure, tries, log):
    """A crash is a call's own when it happens twice. Seen failing with every failure tried again, and with none."""
    assert score("service", [completion], prompt=make_prompt(log))[0] == [failure]
    assert len(log.read_text().split()) == tries


@in_loop
async def test_a_process_killed_while_idle_is_replaced_unnoticed():
    async with running("service") as pool:
        (reply,) = await pool.score(make_prompt(""), ["ok"])
        os.kill(int(reply.reward), signal.SIGKILL)
        (reply,) = await pool.score(make_prompt(""), ["ok"])
        assert (reply.failure, pool.gauges()["failures"]) == (None, {})


def test_a_row_that_cannot_be_sent_fails_alone():
    results, _ = score("service", ["ok"], prompt=make_prompt("", n=2**70))
    assert results == ["bad_row"]


# --- quarantine ---


def quarantine_of(name, **settings):
    return Quarantine(name, VerifierSettings(function=name, **settings))


def add(quarantine, failures):
    return [quarantine.add(Reply(None, failure=failure, detail="  x\nKeyError: 'kg'")) for failure in failures][-1]


def test_a_verifier_is_not_trusted_once_it_fails_too_often():
    """12 of 20 = 0.6 > 0.5; the 20th call is the first that may tell. Seen failing with `_FEWEST = 10`."""
    quarantine = quarantine_of("math", max_failure_share=0.5)
    assert add(quarantine, ["timeout"] * 9 + [None] * 8 + ["exception:KeyError"] * 2) is None
    error = add(quarantine, ["exception:KeyError"])
    assert isinstance(error, VerifierError)
    assert str(error).startswith(
        "the verifier math cannot be trusted: it failed in 12 of its last 20 calls (timeout 9, exception:KeyError 3), "
        "more than max_failure_share=0.5 allows"
    )
    assert "last error: KeyError: 'kg'" in str(error)
    assert "areal-lite verify math --data FILE" in str(error)


def test_only_the_last_fifty_calls_count_and_the_share_itself_is_allowed():
    """25 of 50 is 0.5, not above. Seen failing with `>=`, and with a window of 100."""
    quarantine = quarantine_of("math", max_failure_share=0.5)
    assert add(quarantine, [None] * 60 + ["nan"] * 25) is None
    assert add(quarantine, ["nan"]) is not None


def test_an_absent_service_is_no_failure_of_the_verifier():
    """45 of 65 calls. Seen failing with `NOT_ITS_OWN` empty."""
    quarantine = quarantine_of("judge", max_failure_share=0.5)
    assert add(quarantine, (["unavailable"] * 15 + [None] * 10) * 3) is None


def test_a_service_that_answers_nobody_ends_the_run():
    """19, an answer, 19 more: not yet. Seen failing with the answer not looked at, without `_away`, without --data."""
    quarantine = quarantine_of("judge", max_failure_share=0.5, unavailable_s=120.0)
    assert add(quarantine, ["unavailable"] * 19 + [None] + ["unavailable"] * 19) is None
    error = str(add(quarantine, ["unavailable"]))
    assert "the verifier judge cannot be trusted: its service did not answer the last 20 calls" in error
    assert "unavailable_s=120 s" in error
    assert "areal-lite verify judge --data FILE" in error
    assert "raise unavailable_s" in error


@in_loop
async def test_a_pool_in_quarantine_raises_from_then_on():
    """Whoever waits learns it, and whoever comes later. Seen hanging without `_give_up` in `_count`."""
    async with running("service", max_failure_share=0.5) as pool:
        with pytest.raises(VerifierError, match=r"failed in 20 of its last 20 calls \(exception:KeyError 20\)"):
            await pool.score(make_prompt(""), ["raise"] * 30)
        with pytest.raises(VerifierError, match="failed in 20 of"):
            await pool.score(make_prompt(""), ["ok"])
