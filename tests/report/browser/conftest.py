"""A real headless Chromium, driven over its DevTools pipe: no driver and no package is needed."""

import base64
import io
import json
import os
import select
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--remote-debugging-pipe",
)
_PATIENCE = 60.0  # seconds for one answer on a busy machine


class Browser:
    """One Chromium process and the pipe to it."""

    def __init__(self, executable: str, profile: Path) -> None:
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        self._process = os.posix_spawn(
            executable,
            [executable, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
            {**os.environ, "HOME": str(profile)},
            file_actions=[
                (os.POSIX_SPAWN_DUP2, to_browser, 103),
                (os.POSIX_SPAWN_DUP2, from_browser, 104),
                (os.POSIX_SPAWN_DUP2, 103, 3),
                (os.POSIX_SPAWN_DUP2, 104, 4),
                (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
            ],
            setpgroup=0,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer = b""
        self._last = 0
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Send a command and return its result; what happens meanwhile goes to `events`."""
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._last:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    def wait_for(self, method: str, session: str) -> None:
        """Wait for an event, also one that came already."""
        while True:
            for event in self.events:
                if event.get("method") == method and event.get("sessionId") == session:
                    return
            self.events.append(self._read())

    def forget(self, method: str, session: str) -> None:
        """Drop an event that came already."""
        kept = (
            e for e in self.events if (e.get("method"), e.get("sessionId")) != (method, session)
        )
        self.events = list(kept)

    def close(self) -> None:
        """End the process and everything it started."""
        os.killpg(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)
        os.close(self._out)
        os.close(self._in)

    def _read(self) -> dict[str, Any]:
        deadline = time.monotonic() + _PATIENCE
        while b"\0" not in self._buffer:
            if not select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError("Chromium does not answer")
            found = os.read(self._in, 1 << 20)
            if not found:
                raise RuntimeError("Chromium ended")
            self._buffer += found
        message, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(message)


class Page:
    """One page in the browser."""

    def __init__(self, browser: Browser, *, width: int, height: int, dark: bool) -> None:
        self._browser = browser
        target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        found = browser.call("Target.attachToTarget", targetId=target, flatten=True)
        self._target, self._session = target, found["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def resize(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    def open(self, path: Path) -> float:
        """Open a file and return after how many seconds it had loaded."""
        self._browser.forget("Page.loadEventFired", self._session)
        start = time.monotonic()
        self.call("Page.navigate", url=path.as_uri())
        self._browser.wait_for("Page.loadEventFired", self._session)
        return time.monotonic() - start

    def js(self, expression: str) -> Any:
        """Return the value of an expression in the page."""
        found = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in found:
            raise RuntimeError(str(found["exceptionDetails"]))
        return found["result"].get("value")

    def texts(self, selector: str) -> list[str]:
        """Return the texts of all elements that match."""
        return self.js(f"[...document.querySelectorAll({selector!r})].map((e) => e.textContent)")

    def click(self, selector: str) -> None:
        """Click with the mouse on the middle of an element, after scrolling to it."""
        x, y = self.js(
            f"(() => {{ const e = document.querySelector({selector!r});"
            " e.scrollIntoView({block: 'center', behavior: 'instant'});"
            " const b = e.getBoundingClientRect();"
            " return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, selector: str, text: str) -> None:
        """Replace what stands in a field, as by keyboard."""
        field = f"document.querySelector({selector!r})"
        self.js(f"{field}.focus()")
        self.js(f"{field}.select()")
        self.call("Input.insertText", text=text)

    def hover(self, selector: str) -> None:
        """Move the pointer over an element."""
        self.js(f"document.querySelector({selector!r}).scrollIntoView({{behavior: 'instant'}})")
        self.js("new Promise((done) => setTimeout(done, 100))")  # what scrolling sets off
        x, y = self.js(
            f"(() => {{ const b = document.querySelector({selector!r}).getBoundingClientRect();"
            " return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, path: Path, *, full: bool = True) -> Path:
        """Write what is seen, or the whole page, as a PNG."""
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=full)
        path.write_bytes(base64.b64decode(found["data"]))
        return path

    def pixel(self, x: float, y: float) -> list[float]:
        """Return red, green and blue of a pixel of what is seen, 0 to 1."""
        clip = {"x": x, "y": y + self.js("scrollY"), "width": 1, "height": 1, "scale": 1}
        found = self.call("Page.captureScreenshot", format="png", clip=clip)
        picture = imread(io.BytesIO(base64.b64decode(found["data"])))
        return picture[0, 0, :3].tolist()

    def pdf(self) -> bytes:
        """Return the page as it would be printed."""
        return base64.b64decode(self.call("Page.printToPDF", preferCSSPageSize=True)["data"])

    @property
    def complaints(self) -> list[str]:
        """Errors, blocked scripts and messages of the console."""
        found = []
        for event in self._browser.events:
            if event.get("sessionId") != self._session:
                continue
            if event["method"] in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled"):
                found.append(json.dumps(event["params"]))
            if event["method"] == "Log.entryAdded":
                found.append(event["params"]["entry"]["text"])
        return found

    @property
    def requests(self) -> list[str]:
        """Every address that was asked for."""
        return [
            event["params"]["request"]["url"]
            for event in self._browser.events
            if event.get("sessionId") == self._session
            and event["method"] == "Network.requestWillBeSent"
        ]

    def close(self) -> None:
        self._browser.call("Target.closeTarget", targetId=self._target)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Start a Chromium, once for all tests."""
    executable = next((path for name in _NAMES if (path := shutil.which(name))), None)
    if executable is None or not hasattr(os, "posix_spawn"):
        pytest.skip(f"needs one of the browsers {', '.join(_NAMES)} on the PATH")
    found = Browser(executable, tmp_path_factory.mktemp("profile"))
    try:
        found.call("Browser.getVersion")
    except (RuntimeError, TimeoutError) as error:
        found.close()
        pytest.skip(f"{executable} does not start here: {error}")
    yield found
    found.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Return a function that opens an HTML file in a page of its own."""
    pages: list[Page] = []

    def open_(path: Path, *, width: int = 1100, height: int = 900, dark: bool = False) -> Page:
        page = Page(browser, width=width, height=height, dark=dark)
        pages.append(page)
        page.open(path)
        return page

    yield open_
    for page in pages:
        page.close()
