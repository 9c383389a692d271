"""Controller, placement and shipped recipes."""
