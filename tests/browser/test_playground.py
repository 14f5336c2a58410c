"""What a person sees and does on the page at `/`, in a real browser, against a gateway with workers behind it."""

import json
import struct
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.browser.chromium import CONTROL, Page
from tests.browser.conftest import KEY

pytestmark = pytest.mark.system

DONE = "!document.getElementById('figures').hidden"
REFUSED = "!document.getElementById('error').hidden"
BUSY = "document.getElementById('suggestion').innerText.length > 20"
IDLE = "!document.getElementById('send').disabled"


ENDLESS = """
const send = window.fetch;
window.fetch = (at, more) => {
  if (more?.body) more.body = JSON.stringify({ ...JSON.parse(more.body), ignore_eos: true });
  return send(at, more);
}"""
"""As long as may be: replies of the simulated engine end by themselves within two seconds."""


def settings(page: Page, creator: str, tokens: int = 40) -> None:
    page.fill("creator", creator)
    page.fill("tokens", str(tokens))


def in_flight(gateway: str) -> float:
    """Requests that the gateway works on, by its own word."""
    with urllib.request.urlopen(f"{gateway}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith("headrace_in_flight ")))


def await_in_flight(gateway: str, count: int) -> None:
    deadline = time.monotonic() + 10
    while in_flight(gateway) != count:
        assert time.monotonic() < deadline, f"{in_flight(gateway)} requests are in flight, not {count}"
        time.sleep(0.05)  # between two looks; nothing tells us


@contextmanager
def occupied(gateway: str, *creators: str) -> Iterator[None]:
    """A long reply for each of these is under way meanwhile."""
    over = threading.Event()

    def ask(creator: str) -> None:
        body = {"messages": [{"role": "user", "content": "Tell me all."}], "user": creator, "max_tokens": 1500,
                "stream": True, "ignore_eos": True}  # fmt: skip
        headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
        request = urllib.request.Request(f"{gateway}/v1/chat/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            while not over.is_set() and answer.readline():
                pass

    await_in_flight(gateway, 0)
    threads = [threading.Thread(target=ask, args=(creator,)) for creator in creators]
    for thread in threads:
        thread.start()
    try:
        await_in_flight(gateway, len(creators))
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(20)
        await_in_flight(gateway, 0)


def test_a_suggestion_streams_in_and_the_page_says_what_it_took(page: Page) -> None:
    page.until("document.getElementById('state').innerText === 'Ready: 1 prefill, 1 decode'")
    settings(page, "ada")
    page.fill("persona", "You are Ada, who builds engines. " * 12)
    page.fill("message", "What did you build today?")
    page.click("send")
    page.until(BUSY)
    begun = page.text("suggestion")
    assert page.value("document.getElementById('suggestion').getAttribute('aria-busy')") == "true"
    assert not page.value(DONE), "it is seen before it is whole"
    page.until(DONE)
    page.until(IDLE)
    whole = page.text("suggestion")
    assert whole.startswith(begun)
    assert len(whole) > len(begun)
    assert page.text("first").endswith(" ms")
    assert page.text("hbm") == page.text("lmcache") == "0 tokens"
    assert (page.text("prefill"), page.text("decode")) == ("prefill-1", "decode-1")
    assert len(page.text("request")) == 32
    prompt, computed, handed = (int(page.text(name).split()[0]) for name in ("prompt", "computed", "handed"))
    assert prompt == computed > 100
    assert handed == prompt // 32 * 32 or handed == prompt - 1
    page.click("send")
    page.until(f"{DONE} && document.getElementById('hbm').innerText !== '0 tokens'")
    assert int(page.text("hbm").split()[0]) >= 96, "the second time the prefix is warm"
    page.until(IDLE)
    assert page.complaints == []


def test_a_suggestion_that_is_used_becomes_history_and_is_sent_with_the_next_message(page: Page) -> None:
    settings(page, "history", 12)
    page.click("send")
    page.until(DONE)
    page.until(IDLE)
    first, said = int(page.text("prompt").split()[0]), page.text("suggestion")
    page.click("use")
    turns = page.value(
        "[...document.querySelectorAll('#turns li')].map(li => [li.children[0].value, li.children[1].value])"
    )
    assert turns[-2:] == [["user", "hey, how was your day?"], ["assistant", said]]
    assert page.focused() == "message"
    page.fill("message", "And tomorrow?")
    page.click("send")
    page.until(f"{DONE} && !document.getElementById('prompt').innerText.startsWith('{first} ')")
    assert int(page.text("prompt").split()[0]) > first
    page.value("document.querySelector('#turns button').click()")
    assert page.value("document.querySelectorAll('#turns li').length") == len(turns) - 1
    page.until(IDLE)
    assert page.complaints == []


def test_stop_ends_the_request_at_the_gateway_and_keeps_what_has_come(page: Page, gateway: str) -> None:
    await_in_flight(gateway, 0)
    settings(page, "stopped", 2000)
    page.value(ENDLESS)
    page.click("send")
    page.until(BUSY)
    assert in_flight(gateway) == 1
    page.click("stop")
    page.until(f"{IDLE} && {REFUSED}")
    assert page.text("error") == "Stopped."
    assert page.value("document.getElementById('error').className") == "note"
    assert len(page.text("suggestion")) > 20, "what has come is kept"
    await_in_flight(gateway, 0)
    assert page.complaints == []


def refused(page: Page) -> str:
    """What the page says of a refusal, and that nothing else is wrong than the refusal itself."""
    page.click("send")
    page.until(f"{REFUSED} && {IDLE}")
    assert [said for said in page.complaints if not said.startswith("network: Failed to load resource")] == []
    assert page.value("getComputedStyle(document.getElementById('error')).color") == "rgb(163, 38, 29)"
    assert not page.value(DONE)
    return page.text("error")


def test_a_creator_and_a_gateway_that_are_busy_are_told_with_when_to_come_back(page: Page, gateway: str) -> None:
    settings(page, "ada")
    with occupied(gateway, "ada"):
        said = refused(page)
        assert said.startswith("This creator has 1 requests")
        assert "(429, creator_queue_full) Try again in " in said
    with occupied(gateway, "grace", "alan"):
        said = refused(page)
        assert "works on 2 requests, as many as it takes" in said
        assert "(503, overloaded) Try again in " in said
    page.click("send")
    page.until(DONE)
    assert not page.value(REFUSED), "the error is gone once it goes on"


def test_a_request_that_cannot_be_served_is_told_which_field_is_wrong(page: Page) -> None:
    settings(page, "ada", 4096)
    said = refused(page)
    assert "The model's context is 4096 tokens" in said
    assert said.endswith("(400, context_length_exceeded)")


def test_without_a_key_it_asks_for_one_where_it_is_to_be_typed(page: Page) -> None:
    page.value("document.getElementById('key').value = ''; document.getElementById('access').open = false")
    assert "A key is needed" in refused(page)
    assert page.focused() == "key"
    assert page.value("document.getElementById('access').open")
    page.call("Input.insertText", text="wrong")
    assert "This key is not known here. (401, invalid_api_key)" in refused(page)


def test_all_of_it_works_with_the_keyboard_alone(page: Page) -> None:
    settings(page, "keys", 12)
    page.value("document.activeElement.blur(); window.scrollTo(0, 0)")
    page.value("document.getElementById('creator').focus()")
    met = [page.focused()]
    for _ in range(15):
        page.press("Tab")
        met.append(page.focused())
    order = [
        "creator",
        "tokens",
        "persona",
        "Who says it",
        "What is said",
        "Remove this turn",
        "add",
        "message",
        "key",
        "send",
    ]
    assert [name for number, name in enumerate(met) if name in order and name not in met[:number]] == order
    page.value("document.getElementById('message').focus()")
    outline = page.value("getComputedStyle(document.getElementById('message')).outlineStyle")
    assert outline == "solid", "one sees where one is"
    page.press("Enter", CONTROL)
    page.until(DONE)
    page.until(IDLE)
    page.value("document.getElementById('add').focus()")
    page.press("Enter")
    assert page.focused() == "What is said"
    page.press("Tab")
    page.press(" ")
    assert page.focused() == "add", "who removes a turn is not lost"
    assert page.complaints == []


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("phone", [False, True])
def test_nothing_is_cut_off_or_unreadable_on_a_wide_and_on_a_narrow_screen(
    page: Page, pictures: Path, *, phone: bool, dark: bool
) -> None:
    page.look_like(390 if phone else 1280, 844 if phone else 900, phone=phone, dark=dark)
    settings(page, "sizes", 24)
    page.click("send")
    page.until(DONE)
    page.until(IDLE)
    assert page.value("document.documentElement.scrollWidth <= innerWidth")
    beyond = (
        "[...document.querySelectorAll('main *')].filter(at => at.getBoundingClientRect().right > innerWidth).length"
    )
    assert page.value(beyond) == 0
    columns = page.value("getComputedStyle(document.querySelector('main')).gridTemplateColumns.split(' ').length")
    assert columns == (1 if phone else 2)
    for element in ("suggestion", "first", "error", "send", "hotkey", "state"):
        assert contrast(page, element) >= 4.5, element
    page.picture(pictures / "page.png")
    width, height = struct.unpack(">II", (pictures / "page.png").read_bytes()[16:24])
    assert (width, height > width) == (780, True) if phone else width >= 1200


def contrast(page: Page, element: str) -> float:
    """Of an element's text with what is behind it, as WCAG counts it."""
    found: list[list[float]] = page.value(
        f"""(element => {{
          const numbers = colour => colour.match(/[\\d.]+/g).map(Number);
          let behind = element;
          while (numbers(getComputedStyle(behind).backgroundColor)[3] === 0) behind = behind.parentElement;
          return [numbers(getComputedStyle(element).color), numbers(getComputedStyle(behind).backgroundColor)];
        }})(document.getElementById('{element}'))"""
    )
    lights = sorted(light(colour) for colour in found)
    return (lights[1] + 0.05) / (lights[0] + 0.05)


def light(colour: list[float]) -> float:
    """The relative luminance of an sRGB colour."""
    parts = [value / 255 for value in colour[:3]]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return float(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
