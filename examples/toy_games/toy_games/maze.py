"""Mazes on a square grid: their text, one move, and exact shortest ways.

A maze is written row by row, rows separated by `/`: `S` is the start, `G`
the goal, `#` a wall and `.` free, as in `S.#/.../.#G`.
"""

import random
from collections import deque
from dataclasses import dataclass

MOVES = {"U": (-1, 0), "D": (1, 0), "L": (0, -1), "R": (0, 1)}
"""Rows and columns that a move goes."""

Cell = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Maze:
    """A maze. Example: `read_maze("S./#G")` is one of two rows, whose shortest way is `RD`."""

    rows: tuple[str, ...]

    def __str__(self) -> str:
        return "/".join(self.rows)

    def at(self, cell: Cell) -> str:
        """Return what is in a cell; beyond the border, a wall."""
        row, column = cell
        inside = 0 <= row < len(self.rows) and 0 <= column < len(self.rows[row])
        return self.rows[row][column] if inside else "#"

    def find(self, mark: str) -> Cell:
        """Return the cell with a mark that occurs once."""
        return next((y, x) for y, row in enumerate(self.rows) for x, cell in enumerate(row) if cell == mark)

    def step(self, cell: Cell, move: str) -> tuple[Cell, str]:
        """Return where a move ends, and what is in the cell that it goes to: a wall holds the walker in place."""
        down, right = MOVES[move]
        target = (cell[0] + down, cell[1] + right)
        seen = self.at(target)
        return (cell if seen == "#" else target), seen

    def distances(self) -> dict[Cell, int]:
        """Return the fewest moves to the goal from each cell that reaches it, by breadth-first search from the goal."""
        goal = self.find("G")
        found, queue = {goal: 0}, deque([goal])
        while queue:
            cell = queue.popleft()
            for move in MOVES:
                neighbour, _ = self.step(cell, move)
                if neighbour not in found:
                    found[neighbour] = found[cell] + 1
                    queue.append(neighbour)
        return found

    def shortest_way(self) -> str:
        """Return a shortest way from the start to the goal, which is in reach; of equals the first in U, D, L, R."""
        distances, cell, way = self.distances(), self.find("S"), ""
        while distances[cell]:
            way += next(move for move in MOVES if distances.get(self.step(cell, move)[0]) == distances[cell] - 1)
            cell, _ = self.step(cell, way[-1])
        return way


def read_maze(text: str) -> Maze:
    """Read a maze from its text.

    Raises:
        ValueError: It is none.
    """
    rows = tuple(text.split("/"))
    is_square = all(len(row) == len(rows[0]) for row in rows)
    if not is_square or set(text) - set("SG.#/") or text.count("S") != 1 or text.count("G") != 1:
        raise ValueError(
            f"a maze has rows of equal length, separated by /, of . and #, one S and one G; got {text!r:.80}"
        )
    return Maze(rows)


def draw_maze(rng: random.Random, *, size: int, walls: int) -> Maze:
    """Draw a maze, whose goal may be out of reach.

    Args:
        rng: The source of chance.
        size: Rows and columns.
        walls: Blocked cells, at most `size * size - 2`.
    """
    marks = ["S", "G", *("#" * walls), *("." * (size * size - 2 - walls))]
    rng.shuffle(marks)
    return Maze(tuple("".join(marks[start : start + size]) for start in range(0, size * size, size)))
