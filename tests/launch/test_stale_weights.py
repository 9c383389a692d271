"""Runs whose engines miss weights end, though no log-probability shows it; a correct mixture in bfloat16 passes."""

import functools
import io
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from families import save_family
from loop_builders import loop_config, run_loop
from ray import cloudpickle
from rich.console import Console

from areal_lite.actors.rollout import RolloutActor
from areal_lite.errors import HandoverError
from areal_lite.launch.run import cluster, online
from areal_lite.launch.run.train import train

pytestmark = [pytest.mark.loop, pytest.mark.usefixtures("ray_cluster")]


@pytest.fixture(autouse=True)
def _actors_travel_whole() -> Iterator[None]:
    """Ray's processes cannot import what stands beside the tests."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


class DeafRolloutActor(RolloutActor):
    """Loads the first weights that it is sent, and no others."""

    num_loads = 0

    async def finish_weight_update(self) -> None:
        self.num_loads += 1
        if self.num_loads == 1:
            await super().finish_weight_update()


def test_a_run_ends_when_weights_do_not_arrive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a learning rate at which log-probabilities move by less than any limit.

    Seen running to its end without the comparison of parameters.
    """
    monkeypatch.setattr(online, "Cluster", functools.partial(cluster.Cluster, rollout_actor=DeafRolloutActor))
    config = loop_config(tmp_path, run={"steps": 2, "dir": str(tmp_path / "run")}, trainer={"lr": 1e-6})
    missed = r"input_layernorm\.weight \(layers 0, 1\), .*embed_tokens\.weight.*"
    words = rf"at version 1 .* but rollout/0 did not get {missed}\. Fix:"
    with pytest.raises(HandoverError, match=words):
        train(config, recipe_name="test", console=Console(file=io.StringIO()))


def test_a_mixture_in_bfloat16_whose_routers_choose_for_themselves_passes(tmp_path: Path) -> None:
    """Sharp weights, so that another expert is another answer. Seen failing with a limit of 1 nat for the maximum."""
    save_family("Qwen3-MoE", str(tmp_path / "model"))
    config = loop_config(
        tmp_path,
        run={"steps": 3, "dir": str(tmp_path / "run")},
        model={"compute_dtype": "bfloat16"},
        trainer={"lr": 1e-5},
        weights={"parity_sequences": 16},
    )
    summary, folder = run_loop(config)
    assert summary["status"] == "done"
    assert [row["parity_mean_abs_logprob_diff"] > 0 for row in folder.read("metrics.jsonl")] == [True] * 3
