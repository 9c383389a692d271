"""Starting and steering a run: Ray, placement, the controller, and the shipped recipes.

Imported as `areal_lite.launch`.
"""
