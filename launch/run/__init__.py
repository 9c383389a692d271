"""One run from start to end: the controller, the places of its actors, the terminal view."""
