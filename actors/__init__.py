"""Ray actors: thin shells. Each builds plain objects from the core and passes calls on to them.

Imported as `areal_lite.actors`. The classes are plain; `launch/` wraps them with `ray.remote` where it
spawns them, so that type checkers see them as they are.
"""

import gc

# Python looks through young objects after 700 of them: a fifth of the time in which torch and vLLM are imported.
gc.set_threshold(10_000)
