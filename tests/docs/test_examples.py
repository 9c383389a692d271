"""The scripts of examples/classic reach their known answers. Each asserts its own; here they are run.

Each was seen failing on copies with its rule broken:

- actor_critic: sign of the advantages turned; critic learns advantages
- bandits: UCB without its bonus; explores twice as often
- dqn: no bootstrap; bootstraps past an end; mean in place of max
- evolution_strategy: sign turned; not divided by sigma
- monte_carlo: rows run into one another
- policy_iteration: evaluates with another gamma
- ppo: sign of the advantages turned; advantages of other steps
- q_learning: mean in place of max; SARSA's target
- reinforce: returns left out (surrogate: likelihood); discounted
- sarsa: Q-learning's target
- td0: bootstraps across ends; lambdas swapped
- value_iteration: mean in place of max
"""

import importlib
from collections.abc import Iterator
from io import BytesIO

import pytest
import torch
from places import DOCS, ROOT

FOLDER = ROOT / "examples" / "classic"
PAGE = FOLDER / "README.md"
HELPERS = {"learner", "plotting", "run_all", "worlds"}
SCRIPTS = sorted({path.stem for path in FOLDER.glob("*.py")} - HELPERS)
pytestmark = pytest.mark.examples


@pytest.fixture(autouse=True)
def classic_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The scripts import one another from their own folder; torch's settings are put back."""
    monkeypatch.syspath_prepend(str(FOLDER))
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    yield
    torch.set_num_threads(threads)
    torch.set_rng_state(state)


@pytest.mark.parametrize("name", SCRIPTS)
def test_reaches_its_known_answer_and_draws_it(name: str) -> None:
    figure = importlib.import_module(name).main()
    picture = BytesIO()
    figure.savefig(picture)
    assert len(picture.getvalue()) > 5000
    assert all(axes.has_data() or axes.patches for axes in figure.axes)


def test_every_script_is_run_and_on_the_page() -> None:
    page = PAGE.read_text()
    assert sorted(importlib.import_module("run_all").SCRIPTS) == SCRIPTS
    assert [name for name in SCRIPTS if f"docs/classic/{name}.png)" not in page] == []
    assert sorted(path.stem for path in (DOCS / "classic").glob("*.png")) == SCRIPTS
