"""Run every script of this folder, in the order to read them, and save their pictures: `make examples`."""

import argparse
import importlib
import time
from pathlib import Path

from plotting import save

SCRIPTS = (
    "bandits", "value_iteration", "policy_iteration", "monte_carlo", "td0", "q_learning", "sarsa", "dqn", "reinforce",
    "actor_critic", "ppo", "evolution_strategy",
)  # fmt: skip


def main() -> None:
    """Run them all; the first wrong answer ends it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(), help="folder for the pictures (default: here)")
    parser.add_argument("names", nargs="*", default=SCRIPTS, metavar="NAME", help="only these scripts")
    arguments = parser.parse_args()
    for name in arguments.names:
        print(f"\n{name}")
        began = time.perf_counter()
        save(importlib.import_module(name).main(), arguments.out / f"{name}.png")
        print(f"{time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()
