"""What a plain process with limits contains of the programs in code_programs.py: as docs/verifiers.md says."""

import os
import secrets
import tempfile
from pathlib import Path
from typing import Any

import pytest
from code_programs import ATTACKS, ENDLESS, LIMITS, PROCESSES, processes_with, run_code

from areal_lite.verify.descendants import descendants

pytestmark = pytest.mark.deadline


def attack(name: str, *, token: str = "") -> Any:
    program = ATTACKS[name].replace("@token@", token).replace("@processes@", str(PROCESSES))
    limits = LIMITS | ENDLESS.get(name, {})
    return run_code(program, sandbox="plain", tests=[{"input": "", "output": "contained"}], **limits)


@pytest.mark.parametrize(("name", "status"), [("ignores signals", "timeout"), ("memory hogs", "memory")])
def test_a_hog_meets_its_limit_and_leaves_nothing(name: str, status: str) -> None:
    """Seen failing with the tree not looked at (memory hogs) and with `sweeping` emptied (memory hogs)."""
    before = set(descendants(os.getpid()))
    result = attack(name)
    assert result.reward == 0.0
    assert {name for name, share in result.metrics.items() if share} <= {status}
    assert set(descendants(os.getpid())) <= before


@pytest.mark.parametrize("name", ["zombies", "daemon", "hidden memory", "file descriptors"])
def test_an_attack_fails_and_nothing_outlives_it(name: str) -> None:
    """Seen failing without `refuse_hidden_memory` (hidden memory), and with `PR_SET_CHILD_SUBREAPER` left out: a daemon
    then belongs to the system.
    """
    token = secrets.token_hex(8)
    result = attack(name, token=token)
    assert (result.reward, result.feedback) == (1.0, "")
    assert processes_with(token) == []


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
