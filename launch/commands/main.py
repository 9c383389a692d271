"""The command line. Commands import heavy modules inside functions, so that `--help` is quick."""

import errno
import io
import logging
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from areal_lite import __version__
from areal_lite.config.reading import shipped_recipes
from areal_lite.errors import ArealLiteError

COMMANDS = {
    "train": "train:train",
    "sft": "train:sft",
    "reward-model": "train:reward_model",
    "dpo": "train:dpo",
    "resume": "train:resume",
    "scale": "train:scale",
    "eval": "eval:eval_model",
    "serve": "serve:serve",
    "replay": "replay:replay",
    "launch": "launch:launch",
    "drill": "drill:drill",
    "check-config": "check_config:check_config",
    "estimate": "estimate:estimate",
    "simulate": "simulate:simulate_run",
    "model": "model:model",
    "verify": "verify:verify",
    "bench": "bench:bench",
    "report": "report:report",
    "watch": "report:watch",
    "doctor": "doctor:doctor",
}
"""Commands in the order of `--help`: file, and a function that returns the exit code or a group of commands."""


_OF_PATHS = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG}
"""Errors of the operating system that a path which the user named explains."""


class _Commands(TyperGroup):
    """Lists the commands in our order; exits with a command's return value, or with 1 and its error in a sentence."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def invoke(self, ctx: Any) -> Any:
        try:
            code = super().invoke(ctx)
            if sys.stdout is not None:  # the shell may have closed it (`>&-`)
                sys.stdout.flush()  # typer handles a closed pipe only in here (`check-config ... | head`)
        except ArealLiteError as error:
            # As a Text: an error may hold brackets, which rich would read as markup.
            Console(stderr=True).print(Text.assemble((type(error).__name__, "bold red"), f": {error}"), soft_wrap=True)
            code = 1
        except OSError as error:
            is_full = error.errno == errno.ENOSPC
            if not is_full and (error.filename is None or error.errno not in _OF_PATHS):
                raise
            if error.filename is None:
                sys.stdout = io.StringIO()  # as it ends, Python would write the rest
            place, fix = error.filename or "an output", "free some space" if is_full else "name another path"
            Console(stderr=True).print(Text(f"{error.strerror}: {place}. Fix: {fix}"), soft_wrap=True)
            code = 1
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C ends the same way
            Console(stderr=True).print("stopped")
            code = 130
        raise typer.Exit(code or 0)


app = typer.Typer(
    cls=_Commands,
    epilog=f"Shipped recipes: {', '.join(shipped_recipes())}. To start: areal-lite train arith_cpu",
    rich_markup_mode="markdown",  # help texts may hold brackets
    add_completion=False,
    pretty_exceptions_enable=False,
)
for _name, _place in COMMANDS.items():
    _file, _, _function = _place.partition(":")
    _command = getattr(import_module(f"areal_lite.launch.commands.{_file}"), _function)
    if isinstance(_command, typer.Typer):
        app.add_typer(_command, name=_name)
    else:
        # Options after the launched command belong to that command.
        app.command(_name, context_settings={"allow_interspersed_args": _name != "launch"})(_command)


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        print(f"areal-lite {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Asynchronous reinforcement learning for language models."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the process's exit code: 0 done, 1 failed, 2 bad usage, 130 stopped by Ctrl-C."""
    # vLLM warns on a CPU while it is imported, before it sets up its own handler.
    logging.getLogger("vllm").addHandler(logging.NullHandler())
    try:
        app(args=arguments, prog_name="areal-lite")
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
