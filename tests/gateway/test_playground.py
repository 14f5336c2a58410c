"""The page at `/`: what is served, and what a browser may do with it."""

import base64
import hashlib
import re
from html.parser import HTMLParser

import pytest

from pipeline.protocol.openai import ErrorDetail, Split, UsageBody
from tests.gateway.stack import CHAT, Stack

pytestmark = pytest.mark.anyio


class Page(HTMLParser):
    """What the page is made of."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.labelled: set[str] = set()
        self.fields: set[str] = set()
        self.attributes: list[tuple[str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Called by the parser."""
        found = {name: value or "" for name, value in attrs}
        self.attributes += found.items()
        if "id" in found:
            self.ids.append(found["id"])
        if tag == "label":
            self.labelled.add(found["for"])
        if tag in ("input", "textarea", "select"):
            self.fields.add(found["id"])


async def test_it_is_one_page_under_a_policy_that_lets_nothing_else_in(served: Stack) -> None:
    response = await served.client.get("/")
    assert (response.status_code, response.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert response.headers["x-frame-options"] == "DENY"
    policy = dict(part.split(" ", 1) for part in response.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert "unsafe" not in str(policy)
    for element in ("script", "style"):
        (content,) = re.findall(f"<{element}>(.*?)</{element}>", response.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert policy[f"{element}-src"] == f"'sha256-{digest}'"


async def test_it_needs_nothing_from_elsewhere_and_keeps_to_its_policy(served: Stack) -> None:
    page = (await served.client.get("/")).text
    assert "http://" not in page
    assert "https://" not in page
    assert len(page) < 20_000
    names = {name for name, _ in Page(page).attributes}
    assert not {name for name in names if name.startswith("on")} | names & {"style", "src"}, "the policy forbids them"
    assert "innerHTML" not in page, "what a model writes is text"


async def test_it_asks_the_right_endpoints_in_fields_that_there_are(served: Stack) -> None:
    page = (await served.client.get("/")).text
    assert set(re.findall(r'fetch\("([^"]+)"', page)) == {CHAT, "/ready"}
    for field in ("hbm_tokens", "decode_cached_tokens", "prefill", "decode"):
        assert f"split.{field}" in page
        assert field in Split.__struct_fields__
    for field in ("prompt_tokens", "completion_tokens", "prompt_tokens_details"):
        assert f"usage.{field}" in page
        assert field in UsageBody.__struct_fields__
    assert {"message", "code"} < set(ErrorDetail.__struct_fields__)


async def test_every_field_has_a_label_and_every_id_that_is_used_exists_once(served: Stack) -> None:
    text = (await served.client.get("/")).text
    page = Page(text)
    assert page.fields
    assert page.fields == page.labelled
    assert len(page.ids) == len(set(page.ids))
    used = set(re.findall(r'\$\("(\w+)"\)', text)) | set(re.findall(r'show\("(\w+)"', text))
    assert used <= set(page.ids)
