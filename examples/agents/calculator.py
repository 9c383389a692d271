"""An agent with a tool, and sums to try it on: the model adds in its head or asks a calculator.

The demonstrations do half of the additions in the head, and forget every carry there (`7+5=2`); for the others they end
a turn with a question, `7+5?`, and the calculator answers, `12`. So the model has to learn to ask.
"""

import random
import re
from collections.abc import Iterator
from typing import Any

MAX_QUESTIONS = 8
ASKED = 0.5
"""Share of additions for which the demonstrations ask the calculator."""


async def agent(task: dict[str, Any], llm: Any) -> dict[str, float]:
    """Let the model solve `task["prompt"]`, such as `7+5+3:`; reward 1 for the right number after `#`."""
    text, num_questions = task["prompt"], 0
    while num_questions < MAX_QUESTIONS:
        reply = await llm.client.completions.create(model=llm.model, prompt=text)
        text += reply.choices[0].text
        question = re.search(r"(\d+)\+(\d+)\?$", text)
        if question is None:
            break
        text += calculate(*question.groups())
        num_questions += 1
    return {"reward": float(text.rpartition("#")[2] == task["answer"]), "questions": num_questions}


def calculate(left: str, right: str) -> str:
    """The tool.

    >>> calculate("7", "5")
    '12'
    """
    return str(int(left) + int(right))


def rows(split: str) -> Iterator[dict[str, Any]]:
    """Yield sums of three to five numbers, each with a solution; no sum is in both splits."""
    draws, left = random.Random(split), 128 if split == "eval" else 4096
    while left:
        numbers = draws.choices(range(1, 10), k=draws.randint(3, 5))
        name = "+".join(map(str, numbers))
        if (int(name.replace("+", "")) % 7 == 0) == (split == "eval"):
            yield {"question": f"{name}:", "answer": str(sum(numbers)), "demonstration": _solution(numbers, draws)}
            left -= 1


def _solution(numbers: list[int], draws: random.Random) -> list[dict[str, str]]:
    """Solve a sum in turns: the model's, and the calculator's answers."""
    turns, own, total = list[dict[str, str]](), "", numbers[0]
    for number in numbers[1:]:
        own += f"{total}+{number}"
        if draws.random() < ASKED:
            total += number
            turns += [{"role": "assistant", "content": f"{own}?"}, {"role": "environment", "content": str(total)}]
            own = ";"
        else:
            total = total // 10 * 10 + (total + number) % 10
            own += f"={total};"
    return [*turns, {"role": "assistant", "content": f"{own[:-1]}#{total}"}]
