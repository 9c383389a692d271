"""A request for other numbers of workers, from the command to the run. The fault tests type it beside a real run."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from areal_lite.config.recipe import parse_config
from areal_lite.errors import ConfigError, StallError
from areal_lite.launch.commands.main import main
from areal_lite.launch.run.scaling import parse_counts, request, take
from areal_lite.record.run_folder import RunFolder


def run_folder(path: Path, **sections: dict[str, object]) -> Path:
    RunFolder(path).begin(parse_config(sections))
    return path


@pytest.mark.parametrize(
    "words", [[], ["rollout"], ["rollout=0"], ["rollout=x"], ["trainer=2"], ["engines=2"], ["rollout=9999999"]]
)
def test_what_is_no_number_of_workers_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Seen failing with a run that made room for so many, and ran out of memory."""
    assert main(["scale", "runs/one", *words]) == 1
    said = f"workers must be given as rollout=N or verifier=N, N from 1 to 1024, got {' '.join(words) or 'nothing'}"
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_run_takes_a_request_up_once(tmp_path: Path) -> None:
    """The command ends when it is taken up. Seen failing with a request that stays for the next resume."""
    counts = parse_counts(["rollout=3", "verifier=2"])
    folder = run_folder(tmp_path / "run")
    with ThreadPoolExecutor() as pool:
        asking = pool.submit(request, folder, counts, timeout_s=60.0)
        taken = take(folder)
        while not taken:
            taken = take(folder)
        asking.result()
    assert taken == counts
    assert take(folder) == {}


def test_where_no_run_goes_on_the_request_is_withdrawn(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    with pytest.raises(StallError, match=r"Fix: wait .* areal-lite resume .*run rollout.workers=3"):
        request(folder, parse_counts(["rollout=3"]), timeout_s=0.0)
    assert take(folder) == {}


def test_engines_that_share_gpus_with_ranks_cannot_be_more(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", weights={"transport": "ipc"}, run={"device": "cuda"})
    with pytest.raises(ConfigError, match=r"on GPUs of their own.*got command: train, weights\.transport=ipc"):
        request(folder, parse_counts(["rollout=2"]), timeout_s=0.0)
