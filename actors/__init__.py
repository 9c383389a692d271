"""Ray actors: thin shells. Each builds plain objects from the core and passes calls on to them.

Imported as `areal_lite.actors`. The classes are plain; `launch/` wraps them with `ray.remote` where it
spawns them, so that type checkers see them as they are.

An actor serves one run at a time. Its constructor calls `begin`; after `release`, which ends what that run has in the
process, `begin` may be called again for another run: imports are paid once, and an engine stays loaded.
"""
