"""The page for Prometheus, read as Prometheus reads it."""

import socket
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from areal_lite.errors import ConfigError
from areal_lite.record.metrics import METRICS
from areal_lite.record.prometheus import PrometheusPage


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def read(port: int) -> dict[tuple[str, str], float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as page:
        families = text_string_to_metric_families(page.read().decode())
    return {(one.name, one.labels.get("part", "")): one.value for family in families for one in family.samples}


def test_the_page_shows_the_last_row_and_keeps_what_a_step_does_not_have() -> None:
    """Seen failing with zero for a figure that a row lacks."""
    port = free_port()
    page = PrometheusPage(METRICS, address="127.0.0.1", port=port)
    try:
        page.show({"step": 1, "reward_mean": 0.5, "eval_reward": 0.25, "eval_by_source": {"a": 0.1, "b": 0.4}}, {})
        page.show({"step": 2, "reward_mean": 0.75, "eval_reward": None}, {})
        assert read(port) == {
            ("areal_lite_step", ""): 2.0,
            ("areal_lite_reward_mean", ""): 0.75,
            ("areal_lite_eval_reward", ""): 0.25,
            ("areal_lite_eval_by_source", "a"): 0.1,
            ("areal_lite_eval_by_source", "b"): 0.4,
        }
        with pytest.raises(ConfigError, match=rf"run\.prometheus_port={port} must be free"):
            PrometheusPage(METRICS, address="127.0.0.1", port=port)
    finally:
        page.close()
    with pytest.raises(OSError, match=r".+"):
        read(port)
