"""Chat templates of several kinds, a tokenizer with one, and prompts made with it."""

from typing import Any

from areal_lite.data.demonstrations import PRINTABLE
from areal_lite.data.tokenizer import build_char_tokenizer
from areal_lite.rollout.engine import Sampling
from areal_lite.types import Prompt

CHATML = (
    "{%- if messages[0].role != 'system' %}{{- '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{%- endif %}"
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
"""As Qwen's: a system message of its own, every message between two marks."""


PLAIN = (
    "{% for m in messages %}{% if m.role == 'user' %}Q{{ loop.index }}: {{ m.content }} A:{% else %}{{ m.content }}"
    "<|im_end|> {% endif %}{% endfor %}"
)
"""Small, without a generation prompt of its own; it numbers the messages."""


THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content if m.role == 'user' or loop.last else m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Cuts the thoughts of earlier turns, as templates of thinking models do."""


ENDLESS = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
"""Writes no end-of-sequence token."""


def make_tokenizer(template: str) -> Any:
    tokenizer = build_char_tokenizer(PRINTABLE)
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = template
    return tokenizer


def make_chat_prompt(tokenizer: Any, text: str) -> Prompt:
    """As `data.chat=true` makes it."""
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    return Prompt(
        prompt_id="chat/0/0",
        text=rendered,
        token_ids=tuple(ids),
        answer="",
        row={"prompt_messages": [{"role": "user", "content": text}]},
    )


LONG = Sampling(max_new_tokens=1000, temperature=1.0)
