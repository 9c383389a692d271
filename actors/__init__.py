"""Ray actors: thin shells. Each builds plain objects from the core and passes calls on to them.

Imported as `areal_lite.actors`. The classes are plain; `launch/` wraps them with `ray.remote` where it
spawns them, so that type checkers see them as they are.
"""
