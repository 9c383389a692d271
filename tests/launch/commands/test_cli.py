"""The command line: what it lists exists, how each command ends, and signals at a command's first moments."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from run_folders import new_run_folder

from areal_lite.config.offline import OfflineConfig, load_any_config
from areal_lite.config.reading import override, shipped_recipes
from areal_lite.config.recipe import Config, load_config
from areal_lite.errors import StallError
from areal_lite.launch.commands import main as cli
from areal_lite.launch.commands.train import SUMMARY_KEYS
from areal_lite.launch.run.controller import Interrupted

COMMANDS = [
    "train", "sft", "reward-model", "dpo", "resume", "scale", "eval", "serve", "replay", "launch",
    "drill", "check-config", "estimate", "simulate", "model", "verify", "bench", "report", "watch", "doctor",
]  # fmt: skip
SUMMARY: dict[str, Any] = dict.fromkeys(SUMMARY_KEYS, 0.5) | {"eval": {"0": 0.21, "50": 0.3, "100": 0.41}}


class FakeTraining:
    """Stands for `areal_lite.launch.run.train.train`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, outcome: dict[str, Any] | BaseException) -> None:
        self.outcome, self.calls = outcome, list[tuple[Config, str]]()
        monkeypatch.setattr("areal_lite.launch.run.train.train", self._train)

    def _train(self, config: Config, *, recipe_name: str, console: Any, take_over: bool, named: Any) -> dict[str, Any]:
        self.calls.append((config, recipe_name))
        self.take_over, self.named = take_over, named
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


def test_help_lists_the_commands_that_exist_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    """Seen failing with a command announced before it is written."""
    assert cli.main(["--help"]) == 0
    output = capsys.readouterr().out
    listed = re.findall(r"^│ ([a-z]\S*)", output, re.MULTILINE)
    assert listed == COMMANDS
    assert all(name in output for name in shipped_recipes())


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name, "--help"]) == 0
    assert f"areal-lite {name} " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "Missing command"),
        (["chek-config"], "Did you mean 'check-config'?"),
        (["train"], "Missing argument 'RECIPE'"),
        (["eval", "model", "--recip", "arith_cpu"], "--recipe"),
    ],
)
def test_bad_usage_ends_with_2(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Seen failing (the nearest command) with `suggest_commands=False`."""
    assert cli.main(words) == 2
    error = capsys.readouterr().err
    assert "Usage: areal-lite" in error
    assert message in error


@pytest.mark.parametrize(
    "words", [["verify", "exact", "--json"], ["estimate", "arith_cpu", "--json"], ["report", "run", "--out"]]
)
def test_a_file_without_a_folder_is_said_before_any_work(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seen failing without the look: a traceback, once all was done."""
    assert cli.main([*words, str(tmp_path / "nowhere" / "out")]) == 2
    assert "expected a path in an existing folder" in capsys.readouterr().err
    assert cli.main([*words, str(tmp_path)]) == 2
    assert "expected a file to write, got the folder" in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["watch", "README.md"], "Not a directory: README.md/writer.json. Fix: name another path"),
        (["simulate", "arith_cpu", "run.steps=3", "--out", "README.md"], "File exists: README.md. Fix: name another"),
        (["simulate", "arith_cpu", "run.steps=1"], "got run.steps=1. Fix: set 2 or more"),
    ],
)
def test_a_bad_path_or_value_is_a_sentence(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Seen failing with tracebacks of Python."""
    assert cli.main(words) == 1
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("words", [["check-config", "arith_cpu"], ["eval", "none", "--recipe", "arith_cpu"]])
def test_caches_that_do_not_fit_into_memory_are_refused(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seen failing without the look at the machine."""
    monkeypatch.setattr("areal_lite.node.memory_bytes", lambda: 100 << 20)
    assert cli.main([*words, "rollout.workers=2"]) == 1
    assert "must fit into the machine's 100 MiB of memory, got " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("output", "code", "error"),
    [(">/dev/full", 1, "No space left on device: an output. Fix: free some space\n"), (">&-", 0, "")],
)
def test_output_that_cannot_be_written(output: str, code: int, error: str) -> None:
    """Seen failing with tracebacks, of a full disk and of an output that the shell has closed."""
    line = f"{sys.executable} -m areal_lite.launch.commands.main check-config arith_cpu {output}"
    done = subprocess.run(["bash", "-c", line], stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, error)


def test_nobody_has_to_read_to_the_end() -> None:
    """`areal-lite check-config arith_cpu | head -1`. Seen failing without the flush: a traceback as Python ended."""
    words = [sys.executable, "-m", "areal_lite.launch.commands.main", "check-config", "arith_cpu"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=300) == 1


def test_a_finished_run_ends_with_0_and_a_summary(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Accuracy is that of the first and the last evaluation; what the run warned of is said once more.

    Seen failing with brackets read as markup.
    """
    training = FakeTraining(monkeypatch, SUMMARY | {"warnings": ["step 10: no [/] spread"]})
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("run: {steps: 5}\n")
    assert cli.main(["train", str(recipe), "run.seed=3"]) == 0
    ((config, name),) = training.calls
    assert (config.run.steps, config.run.seed, name) == (5, 3, "mine")
    output = capsys.readouterr().out
    assert "0.210 → 0.410" in output
    assert "\nstep 10: no [/] spread\n" in output
    assert all(key in output for key in SUMMARY_KEYS)


def test_an_offline_run_ends_with_a_summary_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of each held-out figure the first and the last, and the best, which of a loss is the lowest.

    Seen failing with the largest loss as the best.
    """
    keys = ("wall_s", "trained_tokens", "trained_tokens_per_s", "loss_first", "loss_last")
    evaluations = {
        str(step): {"loss": loss, "accuracy": accuracy}
        for step, loss, accuracy in ((0, 1.0, 0.5), (3, 2.0, 0.75), (6, 0.125, 0.75), (9, 0.25, 0.75))
    }
    training = FakeTraining(monkeypatch, {"steps": 9, **dict.fromkeys(keys, 0.125), "eval": evaluations, "report": "r"})
    assert cli.main(["sft", "rlhf_sft", "run.steps=9"]) == 0
    ((config, name),) = training.calls
    assert (config.run.steps, name) == (9, "rlhf_sft")
    output = capsys.readouterr().out
    held_out = ("held-out loss", "1.000 → 0.250, best 0.125 at step 6", "held-out accuracy", "0.500 → 0.750 ")
    for text in (*held_out, "loss_last", "report: r"):
        assert text in output


def test_a_stopped_run_ends_with_130_and_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command can be pasted, on one line. Seen failing with the words joined by spaces, without quotes.

    What the run has come to stands before it, where there was time to sum it up. Seen failing without.
    """
    FakeTraining(monkeypatch, Interrupted("/runs/my run"))
    assert cli.main(["train", "arith_cpu", "run.seed=3"]) == 130
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "stopped. Resume with:"
    assert lines[1] == "  areal-lite resume '/runs/my run'"
    summary = {"steps": 3, "reward_first": None, "eval": {"0": 0.25, "2": 0.75}, "report": "r/report.html"}
    FakeTraining(monkeypatch, Interrupted("/runs/my run", summary))
    assert cli.main(["train", "arith_cpu"]) == 130
    *before, report, stopped, command = capsys.readouterr().out.splitlines()
    assert (report, [stopped, command]) == ("report: r/report.html", lines)
    shown = " ".join(before).split()
    assert {"0.250", "0.750", "steps", "3"} <= set(shown)
    assert "reward_first" not in shown
    FakeTraining(monkeypatch, Interrupted("/runs/my run", is_resumable=False))
    assert cli.main(["train", "arith_cpu"]) == 130
    assert capsys.readouterr().out == "stopped before there was a checkpoint to resume from\n"
    FakeTraining(monkeypatch, KeyboardInterrupt())  # of a second Ctrl-C
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert cli.main(["train", "arith_cpu"]) == 130
    assert capsys.readouterr().err == "stopped\n"


@pytest.mark.parametrize("options", [[], ["--take-over"]])
def test_resume_reads_the_recipe_in_the_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: list[str]
) -> None:
    """Numbers as they were, overrides on top. Seen failing without the overrides, and with a folder named `x`."""
    training = FakeTraining(monkeypatch, SUMMARY)
    folder = str(tmp_path / 'ü it\'s "x" #3: [b]')
    first = load_config("arith_cpu", ["trainer.lr=0.00001", "run.seed=3", override("run.dir", folder)])
    new_run_folder(first)
    assert cli.main(["resume", folder, "run.steps=400", *options]) == 0
    ((config, _),) = training.calls
    run = {"resume": folder, "steps": 400}
    assert config == first.model_copy(update={"run": first.run.model_copy(update=run)})
    assert (training.take_over, training.named) == (bool(options), ["run.steps"])


def test_resume_of_a_run_of_some_epochs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its folder holds the steps beside them. Seen failing: either of the two may be given."""
    training = FakeTraining(monkeypatch, Interrupted(str(tmp_path)))
    config = load_any_config("rlhf_sft", [f"run.dir={tmp_path}"])
    assert isinstance(config, OfflineConfig)
    new_run_folder(config.model_copy(update={"trainer": config.trainer.model_copy(update={"epochs": 2.0})}))
    assert cli.main(["resume", str(tmp_path)]) == 130
    assert training.calls[0][0].run.resume == str(tmp_path)


@pytest.mark.parametrize("message", ["late: rollout/0 [/usr/lib] and [bold]", "no progress for 120 s"])
def test_our_errors_end_with_1_and_their_message_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], message: str
) -> None:
    """On one line, brackets and all. Seen failing with the message read as markup (`[/usr/lib]` raised)."""
    FakeTraining(monkeypatch, StallError(message * 3))
    assert cli.main(["train", "arith_cpu"]) == 1
    assert capsys.readouterr().err == f"StallError: {message * 3}\n"


@pytest.mark.parametrize("words", [["--help"], *(["check-config", name] for name in ("arith_cpu", "rlhf_sft"))])
def test_help_and_check_config_load_nothing_heavy(words: list[str]) -> None:
    """They answer at once, and the core stays free of Ray and vLLM (I8). Seen failing with a top-level import."""
    program = (
        f"import sys; from areal_lite.launch.commands.main import main; main({words})\n"
        "print([name for name in ('ray', 'vllm', 'torch', 'zmq') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.splitlines()[-1] == "[]"


# --- signals at the first moments of a command ---


PROGRAM = """
import os, signal, sys, types
from areal_lite.launch.commands import entry

class Commands(types.ModuleType):
    def __getattr__(self, name):
        if "{moment}" == "import":
            os.kill(os.getpid(), signal.{number})
        return lambda: os.kill(os.getpid(), signal.{number})

sys.modules["areal_lite.launch.commands.main"] = Commands("main")
sys.exit(entry.main())
"""


@pytest.mark.parametrize("moment", ["import", "command"])
@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT"])
def test_a_signal_ends_the_command_with_130(moment: str, number: str) -> None:
    """While the commands are imported, and later. Seen failing with code -15, and with a traceback."""
    program = PROGRAM.format(moment=moment, number=number)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 130
    assert "Traceback" not in ended.stderr
