"""What we use of nats-py.

It speaks WebSocket where aiohttp can be imported. We speak TCP and TLS alone, and aiohttp is a fifth of the time that a worker
takes to start, and of the memory that it has then.
"""

from pipeline.imports import without

with without("aiohttp"):
    from nats import errors
    from nats.aio.client import PING_PROTO, Client
    from nats.protocol.command import pub_cmd
    from nats.protocol.parser import STALE_CONNECTION

__all__ = ["PING_PROTO", "STALE_CONNECTION", "Client", "errors", "pub_cmd"]
