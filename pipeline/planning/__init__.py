"""The fleet in virtual time: what a policy would do to hit rates, balance and first tokens, before any hardware is asked.

`source.py` holds the rates and all assumptions, `traffic.py` the requests; `events.py` is the clock, `caches.py` and `engine.py`
a prefill worker, `broker.py` the queues. `fleet.py` puts requests through workers, `pulled.py` as Headrace does it and
`baselines.py` as routers do that push. `seed.py` and `scale.py` are the scenarios of `headrace bench`.

Nothing here touches a network, a real clock or chance without a seed: the same seed gives the same figures.
"""
