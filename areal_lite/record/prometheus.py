"""The figures of a run's last step as a page that Prometheus reads; off unless `run.prometheus_port` is set."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, start_http_server

from areal_lite.errors import ConfigError
from areal_lite.record.metrics import Metric
from areal_lite.record.trackers import Sample


class PrometheusPage:
    """A tracker: `http://address:port/metrics` has `areal_lite_<metric>`, with a label `part` where it has parts."""

    def __init__(self, metrics: Iterable[Metric], *, address: str, port: int) -> None:
        """Serve from a thread until `close`; a `ConfigError` where the port is taken."""
        registry = CollectorRegistry()
        self._gauges = dict[Metric, Gauge]()
        for metric in metrics:
            if metric.board or metric.name == "step":
                about = f"{metric.about} ({metric.unit})" if metric.unit else metric.about
                self._gauges[metric] = Gauge(f"areal_lite_{metric.name}", about, ["part"], registry=registry)
        try:
            self._server, self._thread = start_http_server(port, addr=address, registry=registry)
        except OSError as error:
            raise ConfigError(
                f"run.prometheus_port={port} must be free on {address}, got {error}: choose another port, or null"
            ) from error

    def show(self, row: Mapping[str, Any], figures: Mapping[str, float]) -> None:
        """Take the row of a step; a figure that a step does not have keeps its last value."""
        for metric, gauge in self._gauges.items():
            for part, number in metric.parts(row).items():
                gauge.labels(part).set(number)

    def show_samples(self, samples: Sequence[Sample]) -> None:
        """Show none: they are no figures."""

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
