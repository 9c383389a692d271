"""A correct mixture in bfloat16 passes the comparison of engine and trainer."""

from pathlib import Path

import pytest
from families import save_family
from loop_builders import loop_config, run_loop

pytestmark = [pytest.mark.loop, pytest.mark.usefixtures("ray_cluster")]


def test_a_mixture_in_bfloat16_whose_routers_choose_for_themselves_passes(tmp_path: Path) -> None:
    """Sharp weights, so that another expert is another answer. Seen failing with a limit of 1 nat for the maximum."""
    save_family("Qwen3-MoE", str(tmp_path / "model"))
    config = loop_config(
        tmp_path,
        run={"steps": 3, "dir": str(tmp_path / "run")},
        model={"compute_dtype": "bfloat16"},
        trainer={"lr": 1e-5},
    )
    summary, folder = run_loop(config)
    assert summary["status"] == "done"
    assert [row["parity_mean_abs_logprob_diff"] > 0 for row in folder.read("metrics.jsonl")] == [True] * 3
