"""setup.sh, run for real against a stand-in Python that records what it is asked to install."""

import os
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from places import ROOT

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
TORCH = next(item for item in EXTRAS["cpu"] if item.startswith("torch==")) + "+cpu"
_PIP = "-m pip --disable-pip-version-check --no-input "

# Plays `python3.11`, one built with optimisations, and is copied to .venv/bin/python by its own `-m venv`. It appends
# each pip command to `calls`, and fails those that hold the word in `fail_on`.
STAND_IN = """#!/usr/bin/env bash
case "$*" in
    --version) echo "Python 3.11.0" ;;
    -c*) exit 0 ;;
    "-m venv .venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
    *) echo "$*" >>calls
       echo "WARNING: Location 'file:///nowhere/simple/' is ignored: it is neither a file nor a directory."
       echo "pip says: $*"
       [ ! -s fail_on ] || { [[ "$*" == *"$(cat fail_on)"* ]] && [[ "$*" != *--extra-index-url* ]] && exit 1; }
       exit 0 ;;
esac
"""

TOOLS = ["awk", "bash", "cat", "cp", "cut", "dirname", "env", "mkdir", "rm", "sed", "sha256sum", "sleep", "tail"]
"""What setup.sh and the stand-ins need beside Python."""
OLD = "#!/bin/sh\n[ \"$1\" = --version ] && echo 'Python 3.9.2' && exit\nexit 1\n"
PYTHONS = ["python3.11", "python3.12", "python3.13", "python3"]
PLAIN = STAND_IN.replace("-c*)", "*optimised*) exit 3 ;;\n    -c*)")
"""A Python that was built without optimisations."""


class Checkout:
    """A folder with setup.sh and pyproject.toml, and a search path on which the stand-in is the only Python."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("setup.sh", "pyproject.toml", "examples/toy_games/pyproject.toml"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
        self.commands = folder / "commands"
        self.commands.mkdir()
        self.tools = folder / "tools"
        self.tools.mkdir()
        for name in TOOLS:
            (self.tools / name).symlink_to(shutil.which(name) or name)
        self.command("python3.11", STAND_IN)
        self.command("nvidia-smi", "#!/bin/sh\nexit 9\n")
        self.command("df", "#!/bin/sh\necho header\necho 'disk 9 9 99000000 9% /'\n")
        self.command("uname", '#!/bin/sh\ncase "$1" in -s) echo Linux ;; *) echo x86_64 ;; esac\n')

    def command(self, name: str, text: str) -> None:
        path = self.commands / name
        path.write_text(text)
        path.chmod(0o755)

    def setup(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PATH": f"{self.commands}:{self.tools}"}
        command = ["./setup.sh", *arguments]
        return subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=300, check=False
        )

    def calls(self) -> list[str]:
        """Return the commands since the last call, those of pip without the words they share."""
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return [line.removeprefix(_PIP).replace(" --no-compile", "") for line in lines]


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


@pytest.mark.parametrize(
    ("words", "calls"),
    [
        ([], [
            "install --upgrade pip",
            f"install {TORCH}",
            "install --editable .[cpu,dev] --editable examples/toy_games",
            "install areal-lite[gym]",
            "uninstall --yes torchvision torchaudio torchcodec",
            "-m compileall -q -j 0 .venv/lib",
        ]),
        (["gpu"], [
            "install --upgrade pip",
            "install --editable .[gpu,dev] --editable examples/toy_games",
            "install areal-lite[gym]",
            "-m compileall -q -j 0 .venv/lib",
        ]),
    ],
    ids=["cpu", "gpu"],
)  # fmt: skip
def test_a_build_is_installed_and_another_one_starts_over(checkout, words, calls):
    """Torch for a CPU comes from the configured index first, and without the CUDA builds' parts."""
    done = checkout.setup(*words)
    assert done.returncode == 0, done.stderr
    assert checkout.calls() == calls
    assert checkout.setup().stdout == f"set-up: .venv is ready ({'gpu' if words else 'cpu'})\n"
    assert checkout.calls() == []
    assert "starting over" in checkout.setup("cpu" if words else "gpu").stdout
    assert checkout.calls() != []


def test_torch_falls_back_to_the_cpu_index(checkout):
    """Seen failing with `&&` for `||` between the two commands."""
    (checkout.folder / "fail_on").write_text("torch==")
    assert checkout.setup().returncode == 0
    _, first, second, *_ = checkout.calls()
    assert first == f"install {TORCH}"
    assert second.startswith("install --extra-index-url https://")
    assert second.endswith(f"/whl/cpu {TORCH}")


@pytest.mark.parametrize("change", ["pins", "ready", "bin/python"])
def test_a_change_of_pins_updates_in_place_and_a_half_made_environment_is_started_over(checkout, change):
    """pip takes a half-unpacked package for a whole one. Seen failing with the `rm -rf .venv` line removed."""
    checkout.setup()
    checkout.calls()
    leftover = checkout.folder / ".venv" / "leftover"
    leftover.touch()
    if change == "pins":
        with (checkout.folder / "pyproject.toml").open("a") as file:
            file.write("# another pin\n")
    else:
        (checkout.folder / ".venv" / change).unlink()
    starts_over = change != "pins"
    assert ("starting over" in checkout.setup().stdout) == starts_over
    assert len(checkout.calls()) == 5 + starts_over
    assert leftover.exists() != starts_over


def test_a_failure_shows_the_end_of_the_log_without_noise_and_leaves_no_stamp(checkout):
    (checkout.folder / "fail_on").write_text("--editable")
    done = checkout.setup()
    assert done.returncode == 1
    assert "pip says: -m pip" in done.stderr
    assert "to do:" in done.stderr
    log = (checkout.folder / ".venv" / "setup.log").read_text()
    assert "is ignored" not in done.stderr + log
    assert not (checkout.folder / ".venv" / "ready").exists()


def test_what_is_optional_may_fail(checkout):
    """Its packages are built with a compiler that may be missing. Seen failing with `step` in place of `try`."""
    (checkout.folder / "fail_on").write_text("gym]")
    done = checkout.setup()
    assert done.returncode == 0, done.stderr
    assert "not installed (why: .venv/setup.log); the rest works without" in done.stdout
    assert (checkout.folder / ".venv" / "ready").exists()


def test_a_newer_pip_is_no_must(checkout):
    """Seen failing without `|| true`."""
    (checkout.folder / "fail_on").write_text("--upgrade pip")
    assert checkout.setup().returncode == 0
    assert (checkout.folder / ".venv" / "ready").exists()


def test_a_shim_that_does_not_run_is_passed_over(checkout):
    """As pyenv's for a version that is not active."""
    checkout.command("python3.12", STAND_IN)
    checkout.command("python3.11", "#!/bin/sh\necho 'command not found' >&2\nexit 127\n")
    done = checkout.setup()
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("first", "second", "chosen"), [(PLAIN, STAND_IN, 1), (PLAIN, PLAIN, 0), (STAND_IN, PLAIN, 0)])
def test_of_several_pythons_the_first_with_optimisations_is_taken(checkout, first, second, chosen):
    """Else the first. A folder further down the search path counts too, as where pyenv hides a distribution's."""
    stand_ins = [(checkout.commands, first, "first"), (checkout.tools, second, "second")]
    for folder, text, name in stand_ins:
        (folder / "python3.11").write_text(text.replace("Python 3.11.0", name))
        (folder / "python3.11").chmod(0o755)
    assert f"environment ({('first', 'second')[chosen]})" in checkout.setup().stdout


@pytest.mark.parametrize(
    ("commands", "text", "words"),
    [
        (["uname"], "#!/bin/sh\necho Darwin\n", ["Linux x86_64", "Darwin", "pinned"]),
        (["df"], "#!/bin/sh\necho header\necho 'disk 9 9 1000000 9% /'\n", ["6 GB of free disk", "1 GB", "free some"]),
        (PYTHONS, OLD, ["Python 3.11, 3.12 or 3.13", "Python 3.9.2"]),
    ],
)
def test_an_unfit_machine_gets_a_message_of_three_parts(checkout, commands, text, words):
    for command in commands:
        checkout.command(command, text)
    done = checkout.setup()
    assert done.returncode == 1
    assert [word for word in words if word not in done.stderr] == []
    assert checkout.calls() == []
