"""`headrace up`: the whole stack on one machine, started, watched, restarted and ended as a whole.

plan.py       pure: what runs, with which command, after what, and what falls together
restarts.py   pure: when what has died is started again, and when not
checks.py     what must be true before anything starts
process.py    one child process and all that it has started
folder.py     the folder of a run: logs, endpoints
roster.py     which workers say that they are ready
screen.py     what the user sees
run.py        the life of a stack, on these
"""
