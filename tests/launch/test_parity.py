"""Engines compared with the trainer after each publication (I4): what is compared when, and what ends the run."""

import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_ray import Reference, fake_time

from areal_lite.config.recipe import parse_config
from areal_lite.errors import HandoverError
from areal_lite.launch.run.parity import Difference, ParityCheck

SEQUENCES = [([3], list(range(100)))]
"""One, of 100 tokens."""
UP, NORM = "model.layers.0.mlp.up_proj.weight", "model.norm.weight"


class Engine:
    """A rollout actor: some of 100 tokens have log-probabilities that are off by `difference` nats."""

    def __init__(self, difference: float = 0.0, *, tokens: int = 2) -> None:
        self.off = np.repeat([difference, 0.0], [tokens, 100 - tokens])
        self.held = {UP: 4, NORM: 1}
        self.asked: list[str] = []

    def __getattr__(self, method: str) -> Any:
        def remote(*_: Any) -> Reference:
            self.asked.append(method)
            answers = {"score": [(self.off, SimpleNamespace(nats=self.off))], "parameter_squares": [(self.held, {})]}
            return Reference(lambda: answers[method])

        return SimpleNamespace(remote=remote)


class Trainer:
    """The ranks, whose log-probabilities are all 0, or those of the routes they replay; and the check of a run."""

    def __init__(self, *engines: Engine, replay_routes: bool = False, **weights: Any) -> None:
        self.values = {UP: 4, NORM: 1}
        self.handles = {f"rollout/{number}": engine for number, engine in enumerate(engines)}
        self.reported: list[Difference] = []
        self.publications = 0
        model = {"rollout": {"replay_routes": True}, "model": {"path": "mixture"}} if replay_routes else {}
        config = parse_config({"weights": {"parity_every": 1} | weights} | model)
        self._check = ParityCheck(config, model_folder=Path("none"), ask=self._answer, report=self.reported.append)

    def _answer(self, method: str, *arguments: Any, waiting_for: str) -> list[Any]:
        if method == "squares":
            return [dict(self.values)]
        routes = arguments[1:]
        return [[routes[0][0].nats if routes else np.zeros(100)]]

    def publish(self, *engines: Engine, version: int | None = None) -> None:
        """Give every parameter another value, which these engines get; check."""
        self.values = {name: value + 1 for name, value in self.values.items()}
        for engine in engines:
            engine.held = dict(self.values)
        self.check(version=version)

    def check(self, *, version: int | None = None) -> None:
        """Compare the engines with the trainer."""
        number, self.publications = self.publications, self.publications + 1
        version = number if version is None else version
        self._check.after_publication(number, version=version, handles=self.handles, sequences=SEQUENCES)


@pytest.fixture(autouse=True)
def _answers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_time(monkeypatch)


@pytest.mark.parametrize(
    ("limit", "difference", "tokens"),
    [("auto", 0.022, 2), ("auto", 0.0031, 100), (0.5, 3.6, 2), (0.5, 0.51, 100), ("auto", math.inf, 1)],
)
def test_an_engine_too_far_from_the_trainer_is_an_error(limit: Any, difference: float, tokens: int) -> None:
    """By the mean over its tokens, or by their 99th percentile; with figures and the parameters that differ.

    Seen failing with a figure alone, and with a NaN that is no larger than any limit.
    """
    bad = Engine(difference, tokens=tokens)
    bad.held[UP] = 7
    trainer = Trainer(Engine(), bad, parity_limit=limit)
    words = r"at version 0 .* log-probabilities of rollout/1 are off by .*parity_limit=\S+, .* in mlp\.up_proj\.weight "
    with pytest.raises(HandoverError, match=words + r"\(layer 0\)\. Fix"):
        trainer.check()
    assert trainer.reported[0].max == min(difference, sys.float_info.max)


@pytest.mark.parametrize(("limit", "difference"), [(0, 50.0), (None, 50.0), (0.7, 0.6), (0.7, 4.8)])
def test_without_a_limit_or_within_it_differences_are_only_reported(
    caplog: pytest.LogCaptureFixture, limit: Any, difference: float
) -> None:
    """Missing parameters likewise. Seen failing with the largest difference compared with the limit."""
    engine = Engine(difference)
    trainer = Trainer(engine, parity_limit=limit)
    trainer.publish(engine)
    if not limit:
        trainer.publish()
        assert "rollout/0 did not get mlp.up_proj.weight (layer 0), norm.weight" in caplog.text
    assert trainer.reported[0].max == difference
    assert trainer.reported[0].mean == pytest.approx(difference / 50)


def test_checks_come_with_the_first_publications_and_then_as_often_as_the_recipe_asks() -> None:
    """In a resumed run as well; parameters for one publication longer. Seen failing with the modulo alone."""
    engine, asked = Engine(), []
    trainer = Trainer(engine, parity_every=8)
    for version in range(2, 9):
        engine.asked.clear()
        trainer.publish(engine, version=version)
        asked.append((version, "+".join(engine.asked)))
    both = "score+parameter_squares"
    assert asked == [(2, both), (3, both), (4, "parameter_squares"), (5, ""), (6, ""), (7, ""), (8, both)]
    never = Trainer(engine, parity_every=0)
    engine.asked.clear()
    never.publish(engine)
    assert engine.asked == []


@pytest.mark.parametrize("arrived", [[], [NORM]])
def test_parameters_that_do_not_arrive_are_an_error_though_no_log_probability_shows_it(arrived: list[str]) -> None:
    """At a publication without a comparison of log-probabilities. Seen passing without the fingerprints."""
    good, stale = Engine(), Engine()
    trainer = Trainer(good, stale, parity_every=100)
    trainer.publish(good, stale, version=1)
    trainer.publish(good, stale, version=2)
    stale.held |= {name: trainer.values[name] + 1 for name in arrived}
    names = "mlp.up_proj.weight (layer 0)" + ("" if arrived else ", norm.weight")
    with pytest.raises(HandoverError) as error:
        trainer.publish(good, version=3)
    assert f"at version 3 the engines must hold the trainer's weights, but rollout/1 did not get {names}." in str(
        error.value
    )


def test_the_trainer_scores_with_the_experts_that_each_engine_chose() -> None:
    """If routes are replayed. Seen failing with one score of the trainer for all engines."""
    engines = [Engine(), Engine(0.5, tokens=100)]
    trainer = Trainer(*engines, replay_routes=True, parity_limit=1e-3)
    trainer.publish(*engines)
    assert trainer.reported[0].max == 0.0
