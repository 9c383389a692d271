"""Typing errors in the names of functions, found before anything starts."""

from pathlib import Path

import pytest

from areal_lite.config.plugin_check import check_plugins
from areal_lite.config.plugins import find_function
from areal_lite.config.recipe import parse_config
from areal_lite.errors import ConfigError

FILE = """
def verify(prompt, completion, answer, **row): ...
async def slowly(prompt, completion, answer, **row): ...
made = lambda *a, **k: 1.0
try:
    from fast import judge
except ImportError:
    def judge(*a, **k): ...
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(FILE)
    return str(tmp_path / "mine.py")


def problems(**sections: object) -> list[str]:
    try:
        check_plugins(parse_config(sections))
    except ConfigError as error:
        return str(error).split("\n")
    return []


@pytest.mark.parametrize("name", ["verify", "slowly", "made", "judge"])
def test_whatever_defines_a_name_counts(file: str, name: str) -> None:
    """What can be called, that is. Seen failing with functions alone."""
    assert problems(verifier={"function": f"{file}:{name}"}) == []


def test_ctrl_c_during_an_import_is_no_error_of_the_plug_in(tmp_path: Path) -> None:
    """Seen failing with a PluginError."""
    (tmp_path / "slow.py").write_text("raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        find_function(f"{tmp_path}/slow.py:verify", kind="verifier")


def test_what_is_missing_is_named_with_its_remedy(file: str) -> None:
    """A line for each. Seen failing with the first alone."""
    named = {"mine": {"function": "nowhere.at_all:verify"}}
    verifier = {"function": f"{file}:verfiy", "eval_function": "no_such.py:verify", "named": named}
    missing, no_file, nowhere = problems(verifier=verifier)
    assert missing.startswith(f"verifier.function: {file} must have a function 'verfiy'")
    assert missing.endswith("did you mean verify?")
    assert no_file.startswith("verifier.eval_function: ")
    assert "there is no file" in no_file
    assert nowhere.startswith("verifier.named.mine.function: ")
    assert "No module named 'nowhere'" in nowhere
    watched = {"verifiers": {"truth": {"function": "no_such.py:verify"}}}
    (problem,) = problems(run={"eval_every": 5}, reward_watch=watched)
    assert problem.startswith("reward_watch.verifiers.truth.function: ")
    (problem,) = problems(rollout={"workflows": {"game": {"function": f"{file}:play"}}})
    assert problem.startswith("rollout.workflows.game.function: ")


@pytest.mark.parametrize(
    ("verifier", "problem"),
    [
        (
            {"named": {"own": {"function": "math", "arguments": {"decimals": "many"}}}},
            "verifier.named.own.arguments.decimals: input should be a valid integer, got 'many'",
        ),
        ({"function": "reward_model"}, "verifier.arguments.model: field required, got {}"),
    ],
)
def test_arguments_are_checked_by_the_functions_own_model(verifier: dict[str, object], problem: str) -> None:
    """Nothing had to start. Seen failing with the arguments of `named` left out."""
    assert problems(verifier=verifier) == [problem]


def test_files_are_imported_in_a_process_of_their_own(tmp_path: Path) -> None:
    """Seen failing with functions of `trl` passed over, and without run.env."""
    raises, ends, good = tmp_path / "raises.py", tmp_path / "ends.py", tmp_path / "good.py"
    raises.write_text("print('words of its own')\nraise RuntimeError('no key')")
    trl = {"function": "trl", "arguments": {"function": f"{raises}:verify"}}
    (problem,) = problems(verifier=trl)
    assert problem.startswith("verifier.arguments.function: the reward function ")
    assert problem.endswith("RuntimeError: no key")
    ends.write_text("import os\nos._exit(7)")
    (problem,) = problems(rollout={"workflow": f"{ends}:step"})
    assert problem.startswith(f"importing {ends}:step ended its process (7)")
    good.write_text("import os\ndef verify(*a, **k): ...\nassert os.environ['TOLD'] == 'yes'")
    assert problems(verifier={"function": f"{good}:verify"}, run={"env": {"TOLD": "yes"}}) == []
