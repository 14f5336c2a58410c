"""`/`: a page on which a person can try the pipeline, made for suggesting replies.

It is one file without a build step, and loads nothing from anywhere. Its policy lets a browser run that script and that style,
talk to this gateway, and nothing else: what a model writes can be shown, but not do anything.
"""

import base64
import functools
import hashlib
import re
from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

PAGE: Final = Path(__file__).with_name("playground.html")


async def playground(request: Request) -> Response:
    """The page."""
    page, policy = page_and_policy()
    headers = {"content-security-policy": policy, "x-frame-options": "DENY", "cache-control": "no-cache"}
    return Response(page, media_type="text/html", headers=headers)


@functools.cache
def page_and_policy() -> tuple[str, str]:
    """The page, and the content security policy that fits it."""
    page = PAGE.read_text("utf-8")
    allowed = {
        "default-src": "'none'",
        "script-src": _hash_of(page, "script"),
        "style-src": _hash_of(page, "style"),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return page, "; ".join(f"{name} {value}" for name, value in allowed.items())


def _hash_of(page: str, element: str) -> str:
    """The only one of its kind that may run, by its content."""
    (content,) = re.findall(f"<{element}>(.*?)</{element}>", page, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
