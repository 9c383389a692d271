"""The verifier pool against verify functions that misbehave in every way known."""

import asyncio
import signal
import subprocess
import sys

import psutil
import pytest
from episode_builders import in_loop
from executed_lines import executed_lines
from places import FIXTURES, SUPPORT
from pool_builders import make_prompt, replies_of, running_pool
from user_run import alive, wait_until

from areal_lite.config.verifier import VerifierSettings
from areal_lite.errors import VerifierError
from areal_lite.verify.pool import VerifierPool
from areal_lite.verify.protocol import Reply

pytestmark = pytest.mark.deadline

BEHAVE = f"{FIXTURES / 'verifiers.py'}:behave"
PATIENCE_S = 120.0
"""Only a bound on how long a failing test hangs; nothing is measured with it."""


def running(function=BEHAVE, **options):
    return running_pool(function, within_s=PATIENCE_S, **{"timeout_s": 1.0} | options)


def score(completions, *, function=BEHAVE, **options):
    return replies_of(function, completions, **{"timeout_s": 1.0} | options)[0]


def children():
    """Living children of this process."""
    return {child.pid for child in psutil.Process().children() if alive(child.pid)}


# --- what a call yields ---


def test_rewards_come_back_in_order_over_several_processes(tmp_path):
    """Both processes are there from the first two calls on; then one call is slower than those behind it.

    Seen failing with scores collected in order of completion (`asyncio.as_completed`).
    """
    completions = ["meet", "meet", "slow", "wrong", "right"]
    scores = score(completions, prompt=make_prompt(tmp_path), processes=2, timeout_s=PATIENCE_S / 2)
    assert [item.reward for item in scores] == [1.0, 1.0, 0.5, 0.0, 1.0]


def test_the_function_gets_prompt_answer_and_row():
    assert score(["row"], prompt=make_prompt(level=3, tags=["x"])) == [Reply(1.0)]


FAILURES = {
    "nan": "nan",
    "raise": "exception:KeyError",
    "exit": "exception:SystemExit",
    "input": "exception:EOFError",
    "killed": "crashed",
    "sleep": "timeout",
}


def test_a_failure_is_a_reason_never_a_reward_the_next_call_works_and_gauges_count_it(caplog):
    """I7. The traceback of the second KeyError is not logged again. What harms and hangs: test_pool_misbehaviour.py.

    Seen failing with `except BaseException: return [Reply(0.0)]` in `answer`.
    """
    completions = [completion for bad in FAILURES for completion in (bad, "right")]
    replies, gauges = replies_of(BEHAVE, [*completions, "raise"], timeout_s=3.0)
    expected = [pair for failure in FAILURES.values() for pair in ((None, failure), (1.0, None))]
    assert [(reply.reward, reply.failure) for reply in replies] == [*expected, (None, "exception:KeyError")]
    assert (gauges["calls"], gauges["restarts"], gauges["busy"], gauges["waiting"]) == (13, 3, 0, 0)
    assert gauges["failures"] == {**dict.fromkeys(FAILURES.values(), 1), "exception:KeyError": 2}
    assert 0 < gauges["latency_p50_s"] < gauges["latency_p95_s"]
    assert sum("no such unit" in record.getMessage() for record in caplog.records) == 1


def test_files_of_the_working_folder_do_not_shadow_a_library(tmp_path, monkeypatch):
    """A module there is found all the same. Seen failing with a `token.py` in place of the library's."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "token.py").write_text("raise RuntimeError")
    (tmp_path / "my_scores.py").write_text("def half(*_):\n    return 0.5\n")
    assert score(["x"], function="my_scores:half") == [Reply(0.5)]


def test_prints_neither_block_nor_reach_the_channel(capfd):
    """Seen failing with the `os.dup2` loop of `_work` removed."""
    assert score(["flood", "right", "flood"], timeout_s=PATIENCE_S) == [Reply(1.0)] * 3
    assert "xxx" not in "".join(capfd.readouterr())


def test_a_forked_child_that_returns_does_not_answer():
    """Seen failing with the look at `os.getpid()` left out of `packed`: answers of both, shifted by one."""
    scores = score(["fork_return", "wrong", "right"], timeout_s=PATIENCE_S / 2)
    assert [item.reward for item in scores] == [1.0, 0.0, 1.0]


def test_long_texts_and_odd_characters_pass():
    """Larger than any socket buffer; a lone surrogate cannot be encoded as UTF-8."""
    prompt = make_prompt(text="ä\ud800" * 1_000_000, answer="7")
    completions = ["x" * 3_000_000 + "#7", "\udfff 7"]
    scores = score(completions, function="last_number", prompt=prompt, timeout_s=PATIENCE_S / 2)
    assert scores == [Reply(1.0)] * 2


def test_async_functions_are_awaited_in_one_lasting_loop():
    function = f"{FIXTURES / 'verifiers.py'}:behave_async"
    scores = score(["right", "loop", "loop", "raise", "hang", "right"], function=function)
    assert scores[1].reward == scores[2].reward
    assert [item.failure for item in scores] == [None, None, None, "exception:KeyError", "timeout", None]


# --- neighbours, deadlines, processes ---


@in_loop
async def test_a_stuck_verifier_does_not_slow_its_neighbours():
    """Everything else is scored while the stuck call goes on. Seen failing with a lock around `process.call`."""
    async with running(processes=2, timeout_s=600.0) as pool:
        stuck = asyncio.create_task(pool.score(make_prompt(), ["sleep"]))
        while not pool.gauges()["busy"]:
            await asyncio.sleep(0.01)
        scores = await asyncio.gather(*(pool.score(make_prompt(), ["right"] * 8) for _ in range(20)))
        assert not stuck.done()
        stuck.cancel()
    assert scores == [[Reply(1.0)] * 8] * 20


def test_importing_is_not_charged_to_a_call(tmp_path):
    """The import takes longer than the deadline, also after a crash. Seen failing with deadlines begun at `score`."""
    (tmp_path / "slow.py").write_text(
        "import os, time\ntime.sleep(1.0)\ndef verify(p, completion, a):\n"
        "    return os._exit(1) if completion == 'die' else 1.0\n"
    )
    scores = score(["right", "die", "right"], function=f"{tmp_path / 'slow.py'}:verify", timeout_s=0.8)
    assert [item.failure for item in scores] == [None, "crashed", None]


@pytest.mark.parametrize("stage", ["not started", "at once", "idle", "busy", "twice"])
@in_loop
async def test_close_ends_promptly_and_leaves_no_process(stage):
    """Seen failing with each server killing its own process in a `finally`, as the only one to do so: a server
    cancelled before its first step never did (`at once`, `twice`).
    """
    before = children()
    pool = VerifierPool(VerifierSettings(function=BEHAVE, processes=2, timeout_s=600.0))
    if stage != "not started":
        await pool.start()
    if stage == "idle":
        await pool.score(make_prompt(), ["right"])
    if stage == "busy":
        waiting = asyncio.create_task(pool.score(make_prompt(), ["sleep"] * 5))
        while pool.gauges()["busy"] < 2:
            await asyncio.sleep(0.01)
    await pool.close()
    if stage == "twice":
        await pool.close()
    if stage == "busy":
        with pytest.raises(VerifierError, match="closed"):
            await waiting
    with pytest.raises(VerifierError, match="closed"):
        await pool.score(make_prompt(), ["right"])
    assert children() <= before


def test_a_killed_parent_leaves_no_orphan(tmp_path):
    """Neither the worker nor what it started, in a session of its own too. Seen failing without `die_with_parent`."""
    program = (
        "import sys; from pool_builders import make_prompt, replies_of\n"
        "replies_of(sys.argv[1], ['fork_hang'], prompt=make_prompt(sys.argv[2]), timeout_s=600)"
    )
    pid_file = tmp_path / "pid"
    parent = subprocess.Popen([sys.executable, "-c", program, BEHAVE, str(pid_file)], cwd=SUPPORT)
    try:
        wait_until(lambda: pid_file.exists() and pid_file.read_text(), "call")
    finally:
        parent.kill()
        parent.wait()
    assert parent.returncode == -signal.SIGKILL
    wait_until(lambda: not any(map(alive, map(int, pid_file.read_text().split()))), "end of its processes")


@in_loop
async def test_a_cancelled_caller_does_not_wedge_the_pool():
    async with running() as pool:
        task = asyncio.create_task(pool.score(make_prompt(), ["sleep", "sleep", "sleep"]))
        while not pool.gauges()["busy"]:
            await asyncio.sleep(0.01)
        task.cancel()
        assert await pool.score(make_prompt(), ["right"]) == [Reply(1.0)]
        assert pool.gauges()["calls"] == 2


@in_loop
async def test_a_call_costs_the_same_with_many_waiting():
    """Counted in executed lines, not in time. Seen failing with the backlog sorted at each finished call."""

    async def lines_per_call(number):
        async with running(processes=2, timeout_s=PATIENCE_S) as pool:
            with executed_lines("verify") as lines:
                await pool.score(make_prompt(), ["right"] * number)
        return lines.total() / number

    few = await lines_per_call(64)
    assert await lines_per_call(640) <= 1.2 * few


# --- start-up ---


@pytest.mark.parametrize(
    ("source", "function", "message"),
    [
        ("import not_installed_anywhere", "verify", "No module named 'not_installed_anywhere'"),
        ("def f(:", "verify", "SyntaxError"),
        ("raise SystemExit(3)", "verify", "SystemExit: 3"),
        ("def verified(): ...", "verify", "no.* did you mean verified"),
        ("import os; os._exit(7)", "verify", "ended its process .exit code 7"),
        ("import time; time.sleep(600)", "verify", "must load within 0.5 s"),
    ],
)
def test_a_function_that_cannot_be_loaded_fails_the_start_with_the_reason(tmp_path, source, function, message):
    (tmp_path / "v.py").write_text(source)
    seconds = 0.5 if "sleep" in source else PATIENCE_S
    settings = VerifierSettings(function=f"{tmp_path / 'v.py'}:{function}", processes=2)
    pool = VerifierPool(settings, start_timeout_s=seconds)
    before = children()
    with pytest.raises(VerifierError, match=f"(?s){message}"):
        asyncio.run(pool.start())
    assert children() <= before


def test_a_file_may_import_its_neighbours(tmp_path):
    (tmp_path / "unusual_neighbour.py").write_text("REWARD = 0.5")
    (tmp_path / "v.py").write_text("from unusual_neighbour import REWARD\ndef verify(*_, **row): return REWARD")
    assert score(["x"], function=f"{tmp_path / 'v.py'}:verify") == [Reply(0.5)]


@in_loop
async def test_a_pool_that_cannot_restart_is_broken_not_spinning(tmp_path):
    """The file is broken after the start. Seen hanging with `_give_up` removed from `_serve`."""
    file = tmp_path / "v.py"
    file.write_text("import os\ndef verify(*_): os._exit(1)")
    async with running(f"{file}:verify") as pool:
        file.write_text("raise OSError('disk gone')")
        with pytest.raises(VerifierError, match=r"(?s)3 times in a row.*disk gone"):
            await pool.score(make_prompt(), ["x", "x"])
        with pytest.raises(VerifierError, match="3 times in a row"):
            await pool.score(make_prompt(), ["x"])
