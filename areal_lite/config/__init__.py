"""A recipe: its sections, presets and checks, and how the files and functions that it names are found."""
