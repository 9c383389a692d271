"""Clients of agent frameworks, as they are, against the endpoint; the newest packages from PyPI and npm."""

from pathlib import Path

import pytest
import try_frameworks


@pytest.mark.frameworks
def test_clients_work_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain answers, streams and loops over tools with the defaults; structured output where constraints are left out.

    Seen failing: tools of both SDKs of Anthropic and of autogen, overflow of litellm.
    """
    monkeypatch.chdir(tmp_path)
    rows = try_frameworks.main(tmp_path)
    assert [row for row in rows for check in try_frameworks.CHECKS if row.get(check, "ok") != "ok"] == []
