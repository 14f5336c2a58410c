"""The load generator of `headrace bench`: what to send, when, over which connections, and what came back.

`words.py` and `orders.py` make the requests, `template.py` and `replay.py` those of a recorded trace; `arrivals.py` says when.
`connection.py` is the client, `loops.py` drives it. `outcome.py` is one reply as its client saw it, `tally.py` all of them,
`histogram.py` their times, `page.py` the report for people. `session.py` puts a run together. Nothing here prints.
"""
