"""Clients that others wrote, as they are, against Headrace.

The `openai` SDK is tested here with every other test. The programs that measure servers, and a proxy, each need an environment of
their own, and are run by `python -m tests.clients`.
"""
