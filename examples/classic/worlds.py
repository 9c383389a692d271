"""Small worlds as arrays, and their exact values. Shared by the tabular scripts; draws nothing and learns nothing.

Shape letters: `S` states (cells, row by row), `A` actions (up, right, down, left).
"""

from dataclasses import dataclass

import numpy as np

MOVES = ((-1, 0), (0, 1), (1, 0), (0, -1))
SMALL = ("...+", ".#.-", "@...")  # Russell & Norvig's 4x3 world
MAZE = ("@..#....", ".#.#.##.", ".#...#..", ".####.#.", "......#.", ".##.-.#.", ".#..##..", "...#...+")
CLIFF = ("............",) * 3 + ("@xxxxxxxxxx+",)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A finite Markov decision process; a final state's row of `chances` is 0, as what follows an end is worth 0."""

    chances_SAS: np.ndarray  # probability of the next state
    rewards_SA: np.ndarray  # expected reward of an action
    shape: tuple[int, int]  # rows and columns of the map
    start: int
    walls_S: np.ndarray  # booleans
    final_S: np.ndarray  # booleans

    def grid(self, values_S: np.ndarray) -> np.ndarray:
        """Return values as a map, NaN at walls."""
        return np.where(self.walls_S, np.nan, values_S).reshape(self.shape)

    def arrows(self, actions_S: np.ndarray) -> np.ndarray:
        """Return actions as a map, -1 where nothing is chosen."""
        return np.where(self.walls_S | self.final_S, -1, actions_S).reshape(self.shape)


def grid_world(cells: tuple[str, ...], *, slip: float = 0.0, step: float, plus: float, minus: float) -> World:
    """Build a world from a drawing: `@` start, `#` wall, `+` and `-` ends worth `plus` and `minus`, `x` the cliff.

    An action goes its way with probability `1 - slip`, else to one of its two sides; into a wall it stays.
    The cliff throws back to the start and costs `minus` instead of `step`.
    """
    drawing = "".join(cells)
    shape = (len(cells), len(cells[0]))
    start, S = drawing.index("@"), len(drawing)
    chances, rewards = np.zeros((S, 4, S)), np.zeros((S, 4))
    for state, action in np.ndindex(S, 4):
        if drawing[state] in "#+-":
            continue
        for turn, chance in ((0, 1 - slip), (1, slip / 2), (-1, slip / 2)):
            place = np.array(divmod(state, shape[1])) + MOVES[(action + turn) % 4]
            inside = bool((place >= 0).all() and (place < shape).all())
            after = int(place[0] * shape[1] + place[1]) if inside else state
            after = state if drawing[after] == "#" else after
            reward = minus if drawing[after] == "x" else step + {"+": plus, "-": minus}.get(drawing[after], 0.0)
            chances[state, action, start if drawing[after] == "x" else after] += chance
            rewards[state, action] += chance * reward
    marks = np.array(list(drawing))
    final, walls = np.isin(marks, ["+", "-"]), np.isin(marks, ["#", "x"])
    return World(chances_SAS=chances, rewards_SA=rewards, shape=shape, start=start, walls_S=walls, final_S=final)


def action_values(world: World, values_S: np.ndarray, *, gamma: float) -> np.ndarray:
    """Return [S, A]: `Q(s, a) = r(s, a) + gamma * sum_s' p(s'|s, a) V(s')`."""
    return world.rewards_SA + gamma * world.chances_SAS @ values_S


def exact_values(world: World, policy_SA: np.ndarray, *, gamma: float) -> np.ndarray:
    """Solve `V = r_pi + gamma * P_pi V` as a linear system: the exact values [S] of a policy of probabilities."""
    chances_SS = np.einsum("sa,sat->st", policy_SA, world.chances_SAS)
    return np.linalg.solve(np.eye(len(chances_SS)) - gamma * chances_SS, (policy_SA * world.rewards_SA).sum(1))


def soft_greedy(values_SA: np.ndarray, *, epsilon: float = 0.0) -> np.ndarray:
    """Return the policy [S, A] that takes the first best action, and any one with probability `epsilon`."""
    return (1 - epsilon) * np.eye(4)[values_SA.argmax(1)] + epsilon / 4


def path(world: World, actions_S: np.ndarray, *, limit: int = 100) -> list[int]:
    """Follow actions from the start of a world without slips, until an end or `limit` steps; return the cells."""
    cells = [world.start]
    while not world.final_S[cells[-1]] and len(cells) <= limit:
        cells.append(int(world.chances_SAS[cells[-1], actions_S[cells[-1]]].argmax()))
    return cells
