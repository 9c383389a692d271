"""Everything a recipe can say: its sections, presets, checks, and how files and functions that it names are found."""
