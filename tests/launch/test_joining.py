"""A Ray cluster that cannot be joined ends in a sentence of our own, with what to do."""

import socket
from typing import Any

import pytest
import ray

from areal_lite.errors import ConfigError
from areal_lite.launch.run import train
from areal_lite.launch.run.train import _say_briefly, ray_session


@pytest.fixture(autouse=True)
def joins(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Addresses that are joined, whichever Ray there is; nothing is started or ended."""
    asked = list[str]()
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda address, **_: asked.append(address))
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(train, "maybe_enable_token_auth_if_token_available", lambda **_: asked.append("token"))
    return asked


def failing(error: Exception) -> Any:
    def fail(**_: Any) -> None:
        raise error

    return fail


def test_the_token_is_shown_to_a_cluster_that_is_joined_and_a_private_one_makes_its_own(
    joins: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen failing without: a token file that an earlier start left behind switched the head's check on, not ours."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with ray_session():
        assert joins == ["local"]
    with socket.create_server(("127.0.0.1", 0)) as head:
        monkeypatch.setenv("RAY_ADDRESS", address := f"127.0.0.1:{head.getsockname()[1]}")
        with ray_session():
            assert joins == ["local", "token", address]


@pytest.mark.parametrize("error", [ray.exceptions.AuthenticationError("no token"), ConnectionError("failed")])
def test_a_token_that_is_refused_is_a_sentence(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray 2.60 has either error for it (seen with a real head). Seen failing with Ray's traceback."""
    monkeypatch.setattr(ray, "init", failing(error))
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        message = (
            rf"Ray at {address} must let this machine in, got: (no token|failed).*; where it asks for a token, copy"
        )
        with pytest.raises(ConfigError, match=message), ray_session():
            pass


def test_an_address_that_nobody_answers_is_named_at_once(joins: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen failing with Ray's own attempt, which took more than 45 s."""
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"at 127\.0\.0\.1:1 \(RAY_ADDRESS\), nobody does; correct it"), ray_session():
        pass
    assert joins == ["token"]


def test_ray_says_what_it_has_to_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Ray finds the function by its name. Seen failing with forty lines of raylet log over the progress display."""
    assert "print_to_stdstream" in ray._private.worker.listen_error_messages.__code__.co_names
    _say_briefly(
        {"lines": [f"\nRaylet is terminated. {'Or so. ' * 40}\n  [log]\n"], "pid": "raylet"}, ignore_prefix=False
    )
    said = capsys.readouterr().out
    assert said.startswith("(raylet) Raylet is terminated. Or so. ")
    assert said.endswith("Or so. ...\n")
    assert len(said) < 180
    _say_briefly({"lines": [], "pid": "raylet"})
