"""Chaos on real parts: a real broker, real processes, real signals, while a load runs that knows what each reply must say.

    stack.py      the processes: started, hurt, started again
    mischief.py   what a seed does to them, and when
    load.py       the clients: what each asks, what it must get, what it got
    rest.py       whether anything is left behind when all is quiet
    verdict.py    the report
    run.py        one run: trouble at random, or a rolling restart
    overload.py   ten times more than the fleet can do

The engines are simulated and everything else is the product. The simulated reply is a function of its prompt, so every token can
be checked. `headrace chaos` runs it.
"""
