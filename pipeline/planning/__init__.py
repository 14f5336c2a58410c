"""What a fleet needs, before any hardware is asked: `headrace plan`; and the fleet in virtual time, of `headrace bench`.

The plan is arithmetic. `models.py`, `hardware.py` and `transports.py` know sizes and peaks (from `configs/planning`), `rates.py`
what engines do, by data sheet or as `calibration.py` has found; `workload.py` what is asked. `sizing.py` divides; `hits.py` says
what caches will have, `queueing.py` and `replicas.py` how long requests then take, split and aggregated, `closed.py` for a few
clients; `estimate.py` whether that meets the objective, `verdict.py` whether to split. `answer.py` has all of it, `report.py` and
`emit.py` write it down.

The fleet runs. `source.py` holds its rates and all assumptions, `traffic.py` the requests; `events.py` is the clock, `caches.py`,
`processor.py` and `engine.py` a prefill worker, `broker.py` the queues. `fleet.py` puts requests through workers, `pulled.py` as
Headrace does it and `baselines.py` as routers do that push. `seed.py` and `scale.py` are the scenarios.

Nothing here touches a network, a real clock or chance without a seed: the same seed gives the same figures.
"""
