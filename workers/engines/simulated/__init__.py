"""An engine without a model: time, caches and failures, all from a seed.

`words.py` reads prompts, `reply.py` makes replies, `blocks.py` is the HBM cache, `tier.py` LMCache, `model.py` puts them
under one clock that is an argument, and `engine.py` runs that model on an event loop. Only it and the shared tier do I/O.
"""

from workers.engines.simulated.engine import SimulatedEngine

__all__ = ["SimulatedEngine"]
