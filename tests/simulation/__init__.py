"""The pipeline in a world of its own: virtual time, a simulated broker, faults from a seed, and checkers that never look away.

What runs in it is the product: both worker loops, the puller, the leases, the bus down to the client library, the gateway's
replies. What is made up is only what lies below: the clock, chance, the network, the broker, and the engines' models.

    loop.py        virtual time; processes that can be frozen
    wire.py        one process's connection, as the client library shows it to `pipeline.bus`
    broker.py      subjects, interest, the weather between processes, and the broker's own death
    jetstream.py   the JetStream API over `streams.py` (what is stored) and `consumers.py` (who gets it)
    plan.py        what a seed draws: fleet, load, faults
    fleet.py       processes: how they start, are killed, freeze, drain
    clients.py     requests, and what became of them
    checks.py      what must be true at every step, at each end, and at rest
    story.py       a line an event
    world.py       one seed, from its first event to rest
    planted.py     bugs on purpose, to show that they would be found

`headrace simulate --seeds 500` runs seeds; `--trace SEED` tells one of them from the top.
"""
