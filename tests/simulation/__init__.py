"""The pipeline in a world of its own: virtual time, a simulated broker, faults from a seed, and checkers that never look away.

What runs in it is the product: both worker loops, the puller, the leases, the bus down to the client library, the gateway's
replies, the DLQ keeper. What is made up is only what lies below, the clock, chance, the network, the broker and the engines'
models, and who asks: clients of the gateway, producers, and an operator.

    loop.py        virtual time; processes that can be frozen
    wire.py        one process's connection, as the client library shows it to `pipeline.bus`
    broker.py      subjects, interest, the weather between processes, and the broker's own death
    jetstream.py   the JetStream API over `streams.py` (what is stored) and `consumers.py` (who gets it)
    plan.py        what a seed draws: fleet, load, faults
    fleet.py       processes: how they start, are killed, freeze, drain
    engine.py      the engines: poison kills them, and of what they sample no two samplings are alike
    clients.py     requests that come through a gateway, and what became of them
    producers.py   requests of those who publish for themselves
    frames.py      requests and replies in either encoding
    checks.py      what must be true at every step and at rest
    ends.py        what must be true of each end, and of what is kept of it
    story.py       a line an event
    world.py       one seed, from its first event to rest
    planted.py     bugs on purpose, to show that they would be found

`headrace simulate --seeds 500` runs seeds; `--trace SEED` tells one of them from the top.
"""
