"""The figures of a run's last step as a page that Prometheus reads; off unless `run.prometheus_port` is set."""

from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, start_http_server

from areal_lite.errors import ConfigError
from areal_lite.record.metrics import Metric


class PrometheusPage:
    """`http://address:port/metrics`: `areal_lite_<metric>`, and `areal_lite_<metric>{part=...}` where it has parts."""

    def __init__(self, metrics: Iterable[Metric], *, address: str, port: int) -> None:
        """Serve from a thread until `close`; a `ConfigError` where the port is taken."""
        registry = CollectorRegistry()
        self._step = Gauge("areal_lite_step", "trainer steps completed", registry=registry)
        self._metrics = [metric for metric in metrics if metric.board]
        self._registry, self._gauges = registry, dict[str, Gauge]()
        try:
            self._server, self._thread = start_http_server(port, addr=address, registry=registry)
        except OSError as error:
            raise ConfigError(
                f"run.prometheus_port={port} must be free on {address}, got {error}: choose another port, or null"
            ) from error

    def show(self, row: Mapping[str, Any]) -> None:
        """Take the row of a step; a figure that a step does not have keeps its last value."""
        self._step.set(row["step"])
        for metric in self._metrics:
            if isinstance(value := row.get(metric.name), Mapping):
                for part, number in value.items():
                    self._gauge(metric, "part").labels(part).set(number)
            elif value is not None:
                self._gauge(metric).set(value)

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _gauge(self, metric: Metric, *labels: str) -> Gauge:
        if metric.name not in self._gauges:
            about = f"{metric.about} ({metric.unit})" if metric.unit else metric.about
            self._gauges[metric.name] = Gauge(f"areal_lite_{metric.name}", about, labels, registry=self._registry)
        return self._gauges[metric.name]
