"""A headless Chromium, driven by the DevTools protocol over one websocket: as much of it as a test of a page needs.

One page at a time. Commands wait for their answer; what the page reports meanwhile is kept: see `Page.complaints`.
"""

import base64
import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from websockets.sync.client import ClientConnection, connect

REMEDY: Final = "There is no chromium on this machine. Install it: apt-get install -y chromium"
START_S: Final = 60.0
ANSWER_S: Final = 30.0
PROBE_S: Final = 0.02
CONTROL: Final = 2
"""The modifier of a key event."""

KEYS: Final = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32}
"""Names of keys that are no text, with their codes."""


def program() -> str | None:
    """Where Chromium is; None where it is not installed."""
    return shutil.which("chromium")


class Page:
    """One tab."""

    def __init__(self, socket: ClientConnection, session: str) -> None:
        self._socket, self._session = socket, session
        self._numbers = itertools.count(1000)
        self.complaints: list[str] = []
        """Uncaught exceptions, console errors and warnings, and what the browser itself says of the page."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol, and its result."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params, "sessionId": self._session}
        self._socket.send(json.dumps(message))
        while True:
            said = json.loads(self._socket.recv(ANSWER_S))
            if said.get("id") == number:
                assert "error" not in said, f"{method}: {said['error']}"
                result: dict[str, Any] = said["result"]
                return result
            self._heard(said)

    def _heard(self, said: dict[str, Any]) -> None:
        params = said.get("params", {})
        match said.get("method"):
            case "Runtime.exceptionThrown":
                self.complaints.append(f"exception: {params['exceptionDetails']}")
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.complaints.append(f"console: {params['args']}")
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.complaints.append(f"{params['entry']['source']}: {params['entry']['text']}")

    def open(self, url: str) -> None:
        """Load a page; returns when its script has run."""
        self.complaints.clear()
        self.call("Page.navigate", url=url)
        self.until(f"document.readyState === 'complete' && location.href.startsWith({json.dumps(url)})")

    def value(self, expression: str) -> Any:
        """What a JavaScript expression is; a promise is awaited."""
        said = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in said, f"{expression}: {said['exceptionDetails']}"
        return said["result"].get("value")

    def text(self, element: str) -> str:
        """What a person reads in the element with this id; empty where it is not shown."""
        return str(self.value(f"document.getElementById('{element}').innerText"))

    def until(self, expression: str, within_s: float = 20.0) -> None:
        """Return when this is true."""
        deadline = time.monotonic() + within_s
        while not self.value(expression):
            assert time.monotonic() < deadline, (
                f"not within {within_s} s: {expression}\n{self.value('document.body.innerText')}"
            )
            time.sleep(PROBE_S)  # between two looks; nothing tells us

    def fill(self, element: str, text: str) -> None:
        """Replace what is in a field, as if typed."""
        self.value(f"(field => {{ field.focus(); field.select(); }})(document.getElementById('{element}'))")
        if not text:
            self.value("document.execCommand('delete')")
        self.call("Input.insertText", text=text)

    def click(self, element: str) -> None:
        """With the mouse, in the middle of the element: it must be there to be hit."""
        where = self.value(
            f"""(element => {{
              element.scrollIntoView({{ block: 'center' }});
              const box = element.getBoundingClientRect();
              const at = {{ x: box.x + box.width / 2, y: box.y + box.height / 2 }};
              return {{ ...at, hit: element.contains(document.elementFromPoint(at.x, at.y)) }};
            }})(document.getElementById('{element}'))"""
        )
        assert where["hit"], f"{element} cannot be reached with the mouse"
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=where["x"], y=where["y"], button="left", clickCount=1)

    def press(self, key: str, modifiers: int = 0) -> None:
        """One key."""
        event = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key], "modifiers": modifiers}
        text = {"Enter": "\r", " ": " "}.get(key, "")
        self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **event)
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def focused(self) -> str:
        """The id of what has the focus, or what it is called."""
        return str(self.value("(at => at.id || at.getAttribute('aria-label') || at.innerText)(document.activeElement)"))

    def look_like(self, width: int, height: int, *, phone: bool = False, dark: bool = False) -> None:
        """A screen of this size in CSS pixels, and the colours that its owner prefers."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self, path: Path) -> None:
        """The whole page, as PNG."""
        said = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(said["data"]))


@contextmanager
def page(folder: Path) -> Iterator[Page]:
    """A page of a browser of its own, whose profile is in `folder`. At its end the browser is gone."""
    found = program()
    assert found is not None, REMEDY
    as_root = ("--no-sandbox",) if os.geteuid() == 0 else ()
    quiet = (
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-sync",
    )
    command = (
        found,
        "--headless=new",
        *as_root,
        *quiet,
        "--remote-debugging-port=0",
        f"--user-data-dir={folder}",
        "about:blank",
    )
    with (folder / "chromium.log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    try:
        with connect(_address(folder, process), max_size=None) as socket:
            yield _attached(socket)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def _address(folder: Path, process: "subprocess.Popen[bytes]") -> str:
    """Where the browser listens: it writes it down."""
    written, deadline = folder / "DevToolsActivePort", time.monotonic() + START_S
    while not (written.exists() and len(lines := written.read_text().splitlines()) == 2):
        assert process.poll() is None, (folder / "chromium.log").read_text()
        assert time.monotonic() < deadline, f"chromium did not start within {START_S} s"
        time.sleep(PROBE_S)  # between two looks; nothing tells us
    return f"ws://127.0.0.1:{lines[0]}{lines[1]}"


def _attached(socket: ClientConnection) -> Page:
    """The one tab that there is."""

    def call(number: int, method: str, **params: Any) -> dict[str, Any]:
        socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while (said := json.loads(socket.recv(ANSWER_S))).get("id") != number:
            pass
        result: dict[str, Any] = said["result"]
        return result

    tabs = call(1, "Target.getTargets")["targetInfos"]
    (tab,) = [tab["targetId"] for tab in tabs if tab["type"] == "page"]
    return Page(socket, call(2, "Target.attachToTarget", targetId=tab, flatten=True)["sessionId"])
