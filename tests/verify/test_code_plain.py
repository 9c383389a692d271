"""What a plain process with limits contains of the programs in code_programs.py: as docs/security.md says."""

import asyncio
import os
import secrets
import tempfile
from pathlib import Path
from typing import Any

import pytest
from code_programs import ATTACKS, ENDLESS, LIMITS, PROCESSES, run_code
from pool_builders import running_pool

from areal_lite.types import Prompt
from areal_lite.verify.descendants import descendants
from areal_lite.verify.guardian import MAX_PROCESSES
from areal_lite.verify.protocol import Reply

pytestmark = pytest.mark.deadline


def attack(name: str, *, token: str = "", expected: str = "contained") -> Any:
    program = ATTACKS[name].replace("@token@", token).replace("@processes@", str(PROCESSES))
    limits = LIMITS | ENDLESS.get(name, {})
    return run_code(program, sandbox="plain", tests=[{"input": "", "output": expected}], **limits)


@pytest.mark.parametrize(
    ("name", "statuses"),
    [
        ("huge output", {"output"}),
        ("sleep", {"timeout"}),
        ("ignores signals", {"timeout"}),
        ("memory hog", {"memory"}),
        ("memory hogs", {"memory"}),
    ],
)
def test_a_hog_meets_its_limit_and_leaves_nothing(name: str, statuses: set[str]) -> None:
    """Seen failing with the tree not looked at (memory hogs) and with `sweeping` emptied (memory hogs)."""
    before = set(descendants(os.getpid()))
    result = attack(name)
    assert result.reward == 0.0
    assert {status for status, share in result.metrics.items() if share} <= statuses
    assert set(descendants(os.getpid())) <= before


def test_a_fork_bomb_never_grows() -> None:
    """In a pool, where users have it: called by hand nobody is asked before forks, and it grew to 8,000 processes.

    Seen failing without `ask_before_forks`, in a control group that allowed 3,000.
    """
    arguments = {"sandbox": "plain", **LIMITS, **ENDLESS["fork bomb"]}
    row = {"tests": [{"input": "", "output": "contained"}]}
    prompt = Prompt(prompt_id="train/0/0", text="p", token_ids=(1,), answer="", row=row)
    before = set(descendants(os.getpid()))

    async def scenario() -> tuple[Reply, int]:
        async with running_pool("code", within_s=120.0, arguments=arguments, timeout_s=30.0) as pool:
            scoring = asyncio.create_task(pool.score(prompt, [ATTACKS["fork bomb"]]))
            most = 0
            while not scoring.done():
                most = max(most, len(descendants(os.getpid())))
                await asyncio.sleep(0.01)
            return (await scoring)[0], most

    reply, most = asyncio.run(scenario())
    if reply.failure is None:
        assert reply.reward == 0.0
        assert {status for status, share in reply.metrics.items() if share} <= {"processes", "timeout"}
    else:
        assert reply.failure == "processes"
    assert most < 2 * MAX_PROCESSES  # a fork that was allowed is seen a moment later
    assert set(descendants(os.getpid())) <= before


@pytest.mark.parametrize("name", ["zombies", "daemon"])
def test_nothing_outlives_its_program(name: str) -> None:
    """Seen failing with `PR_SET_CHILD_SUBREAPER` left out: a daemon then belongs to the system."""
    token = secrets.token_hex(8)
    assert attack(name, token=token).reward == 1.0
    assert token not in "".join(path.read_text(errors="replace") for path in command_lines())


def command_lines() -> list[Path]:
    return [path for path in Path("/proc").glob("[0-9]*/cmdline") if os.access(path, os.R_OK)]


def test_no_file_descriptor_is_handed_on() -> None:
    assert (attack("file descriptors").reward, attack("file descriptors").feedback) == (1.0, "")


def test_its_own_environment_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of its parent can still be read where the system shows it."""
    monkeypatch.setenv("A_SECRET", "hidden")
    program = "import os; print('hidden' in repr(dict(os.environ)))"
    assert run_code(program, sandbox="plain", tests=[{"input": "", "output": "False"}], **LIMITS).reward == 1.0


def test_a_file_is_no_larger_than_allowed_and_its_folder_goes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    program = "open('large', 'wb').write(b'x' * 2 ** 25)"
    assert run_code(program, sandbox="plain", tests=[{"input": "", "output": ""}], **LIMITS).metrics["crash"] == 1.0
    assert list(tmp_path.iterdir()) == []
