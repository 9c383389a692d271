"""Where prompts come from: the built-in task, JSONL files, tokenising, and the seeded cursor over them."""
