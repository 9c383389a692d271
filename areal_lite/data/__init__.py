"""Where prompts come from: built-in tasks and files, tokenising, and the seeded walk over one source or several."""
