"""Headless Chromium for tests, through the DevTools protocol on a pipe: no client library, no port, no network.

`--remote-debugging-pipe` reads commands from descriptor 3 and writes answers and events to descriptor 4, each a JSON
text that ends in NUL. https://chromedevtools.github.io/devtools-protocol/
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-extensions", "--mute-audio"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"),
    *("--disable-dev-shm-usage", "--force-color-profile=srgb", "--remote-debugging-pipe", "about:blank"),
)
PATIENCE = 60.0  # seconds allowed for one answer, even on a busy machine


def executable() -> str | None:
    """Chromium's path, or None if it is not installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """A running Chromium. Use it as a context manager."""

    def __init__(self) -> None:
        path = executable()
        assert path is not None, "Chromium is not installed"
        self._profile = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        child_in, self._out = os.pipe()
        self._in, child_out = os.pipe()
        # Descriptors 3 and 4 are made in the child, by the interpreter that then becomes Chromium.
        launcher = "import os,sys; a,b=map(int,sys.argv[1:3]); a,b=os.dup(a),os.dup(b); os.dup2(a,3); os.dup2(b,4)\n"
        launcher += "[os.set_inheritable(fd, True) for fd in (3, 4)]; os.execv(sys.argv[3], sys.argv[3:])"
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-c", launcher, str(child_in), str(child_out), path, *FLAGS,
             f"--user-data-dir={self._profile.name}"],
            pass_fds=(child_in, child_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(child_in)
        os.close(child_out)
        self._buffer, self._number = b"", 0
        self._answers: dict[int, dict[str, Any]] = {}
        self._tabs: dict[str, Tab] = {}

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.call("Browser.close")
            self._process.wait(10)
        except (AssertionError, OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        os.close(self._out)
        self._profile.cleanup()

    def open(self, path: Path, width: int = 1200, height: int = 900, dark: bool = False) -> Tab:
        """Opens the page in a new tab and waits until it is loaded; `tab.loaded` holds how many seconds that took."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = self._tabs[session] = Tab(self, session, target)
        for domain in ("Page", "Runtime", "Log", "Network"):
            tab.call(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 640}
        tab.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        tab.call("Emulation.setEmulatedMedia", features=scheme)
        tab.go(path)
        return tab

    def call(self, method: str, session: str | None = None, **parameters: Any) -> Any:
        """Sends one command and returns its result. Raises `AssertionError` if Chromium refuses or says nothing."""
        self._number += 1
        number = self._number
        command = {"id": number, "method": method, "params": parameters} | ({"sessionId": session} if session else {})
        data = json.dumps(command).encode() + b"\0"
        while data:
            data = data[os.write(self._out, data) :]
        deadline = time.monotonic() + PATIENCE
        while number not in self._answers:
            self.listen(deadline - time.monotonic())
            assert time.monotonic() < deadline, f"{method}: Chromium did not answer in {PATIENCE:.0f} s"
        answer = self._answers.pop(number)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def listen(self, seconds: float) -> None:
        """Takes the messages that have come, and waits for at most `seconds` if none has."""
        if not select.select([self._in], [], [], max(seconds, 0))[0]:
            return
        data = os.read(self._in, 1 << 20)
        assert data, "Chromium ended"
        *messages, self._buffer = (self._buffer + data).split(b"\0")
        for message in map(json.loads, messages):
            if "id" in message:
                self._answers[message["id"]] = message
            elif tab := self._tabs.get(message.get("sessionId", "")):
                tab.event(message["method"], message["params"])


class Tab:
    """One page, with the errors, requests and dialogs that it caused: a quiet page has none."""

    def __init__(self, browser: Browser, session: str, target: str) -> None:
        self._browser, self._session, self._target = browser, session, target
        self.errors: list[str] = []  # console errors and warnings, uncaught exceptions, violations of the page's policy
        self.requests: list[str] = []  # every URL that the page asked for, besides itself
        self.dialogs: list[str] = []  # alert, confirm, prompt
        self.loaded = float("nan")
        self._address, self._finished = "", False

    def call(self, method: str, **parameters: Any) -> Any:
        return self._browser.call(method, self._session, **parameters)

    def go(self, path: Path) -> None:
        """Loads the file and waits for its load event."""
        self._address, self._finished, begin = path.resolve().as_uri(), False, time.monotonic()
        self.call("Page.navigate", url=self._address)
        while not self._finished:
            assert time.monotonic() - begin < PATIENCE, f"{path} did not load in {PATIENCE:.0f} s"
            self._browser.listen(1)
        self.loaded = time.monotonic() - begin

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression (awaited). Raises `AssertionError` for an exception."""
        done = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"].get("exception", {}).get("description")
        return done["result"].get("value")

    def wait(self, condition: str, seconds: float = 20) -> None:
        """Waits until a JavaScript expression is true; one that reads an element which is not there yet (a TypeError)
        is not true yet. Raises `AssertionError` after `seconds`, and at once for any other exception."""
        body = (
            f"try {{ return Boolean({condition}) }} catch (e) {{ if (e instanceof TypeError) return false; throw e }}"
        )
        deadline = time.monotonic() + seconds
        while not self.evaluate(f"(() => {{ {body} }})()"):
            assert time.monotonic() < deadline, f"not true after {seconds} s: {condition}"
            self._browser.listen(0.02)

    def click(self, selector: str) -> None:
        """Clicks with the mouse in the middle of the first element that matches."""
        element = f"document.querySelector({json.dumps(selector)})"
        box = self.evaluate(
            f"(() => {{ const e = {element}; e.scrollIntoView({{block: 'center'}});"
            " const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2] })()"
        )
        at = {"x": box[0], "y": box[1], "button": "left", "clickCount": 1}
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, **at)

    def type(self, text: str) -> None:
        """Types the text into the element that has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        """Presses one key, given by its DOM name ("ArrowDown", "Enter", "Escape")."""
        code = {
            "Backspace": 8,
            "Enter": 13,
            "Escape": 27,
            "ArrowLeft": 37,
            "ArrowUp": 38,
            "ArrowRight": 39,
            "ArrowDown": 40,
        }[key]
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def screenshot(self, path: Path, whole: bool = False) -> None:
        """Writes what is in sight, or the whole page, to a PNG file."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **self._clip(whole))
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        self._browser.call("Target.closeTarget", targetId=self._target)

    def event(self, method: str, params: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self._finished = True
        elif method == "Page.javascriptDialogOpening":
            self.dialogs.append(params["message"])
            self._browser._number += 1  # the answer is not awaited: `listen` is still reading
            answer = {"id": self._browser._number, "method": "Page.handleJavaScriptDialog", "sessionId": self._session}
            os.write(self._browser._out, json.dumps(answer | {"params": {"accept": True}}).encode() + b"\0")
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(" ".join(str(part.get("value", part.get("description"))) for part in params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent" and params["request"]["url"].split("#")[0] != self._address:
            self.requests.append(params["request"]["url"])

    def _clip(self, whole: bool) -> dict[str, Any]:
        if not whole:
            return {}
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}
