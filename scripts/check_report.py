"""Checks pages of `onnxgc --report` in a headless Chromium.

    python scripts/check_report.py PAGE.html ... [--screenshots FOLDER]

A page has no console messages and no requests. Hover and keyboard show the tensors whose bytes the curve
sums; dragging zooms. Tables sort by their figures. The page fits into windows of 400 and 1600 pixels, has
sufficient contrast in light and dark mode, and is complete without JavaScript. On pages without pictures
(`compare --each`) only tables are checked. Without Chromium the script checks nothing and prints a message.
"""

import argparse
import base64
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate, product
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
MAX_SECONDS = 1.0
"""From the start of loading until a page is interactive."""
MAX_ROWS = 1000
"""Rows of tensors that are compared."""
TEXT_CONTRAST, SHAPE_CONTRAST = 4.5, 3.0
TEXTS = ("body", "figcaption", "dt", "a[href='#assumed']", "thead th", "button", "footer p")
CONNECTED = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Runs a program with the file descriptors of two pipes as 3 and 4."""
CONTRAST = """((selector, key) => {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
  const light = (color) => {
    canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).reduce((sum, value, index) => {
      const part = value / 255;
      const linear = part <= .04045 ? part / 12.92 : ((part + .055) / 1.055) ** 2.4;
      return sum + [.2126, .7152, .0722][index] * linear;
    }, 0);
  };
  const element = document.querySelector(selector);
  if (!element) return null;
  let ground = element;
  const isClear = () => getComputedStyle(ground).backgroundColor === "rgba(0, 0, 0, 0)";
  while (ground.parentElement && isClear()) ground = ground.parentElement;
  const color = getComputedStyle(element)[key].replace(/^url\\([^)]*\\) */, "");
  const [high, low] = [light(color), light(getComputedStyle(ground).backgroundColor)].sort((a, b) => b - a);
  return (high + .05) / (low + .05);
})"""


class Page:
    """A page in a browser, controlled through a pair of pipes."""

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive = send, receive
        self._rest = b""
        self._number = 0
        self._session: str | None = None
        self._box = (0.0, 0.0, 0.0)
        self.events: list[dict[str, Any]] = []
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self._session = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self(f"{domain}.enable")

    def __call__(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            found = os.read(self._receive, 1 << 20)
            assert found, "the browser has ended"
            self._rest += found
        first, self._rest = self._rest.split(b"\0", 1)
        message: dict[str, Any] = json.loads(first)
        return message

    def value(self, expression: str) -> Any:
        found = self("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def open(self, path: Path, width: int, *, dark: bool = False, script: bool = True) -> float:
        """Loads a file; returns the seconds until it is complete and interactive."""
        self.events.clear()
        self("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self("Emulation.setEmulatedMedia", features=[scheme])
        self("Emulation.setScriptExecutionDisabled", value=not script)
        started = time.perf_counter()
        self("Page.navigate", url=path.resolve().as_uri())
        ready = "document.documentElement.dataset.ready === 'yes'" if script else "true"
        wanted = f"document.readyState === 'complete' && location.protocol === 'file:' && {ready}"
        while not self.value(wanted):
            assert time.perf_counter() - started < 30, f"{path}: the page did not become interactive"
            time.sleep(0.01)
        return time.perf_counter() - started

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self("Input.dispatchKeyEvent", type=kind, key=key)
        self.frames()

    def width_in_view(self, selector: str) -> float:
        """Scrolls to an element, to which further positions of the mouse refer; returns its width."""
        self._box = self.value(f"""(() => {{
          const element = document.querySelector("{selector}");
          element.scrollIntoView({{block: "center", behavior: "instant"}});
          const {{x, y, width}} = element.getBoundingClientRect();
          return [x, y, width];
        }})()""")
        return self._box[2]

    def mouse(self, kind: str, share: float, clicks: int = 1) -> None:
        """A mouse event at a share of the element's width, 100 pixels below its top."""
        left, top, width = self._box
        button = {} if kind == "mouseMoved" else {"button": "left", "clickCount": clicks}
        self("Input.dispatchMouseEvent", type=kind, x=left + share * width, y=top + 100, **button)

    def frames(self) -> None:
        self.value("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def screenshot(self, path: Path) -> None:
        width, height = self.value("[innerWidth, document.documentElement.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": width, "height": min(height, 6000), "scale": 1}
        found = self("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(found["data"]))


@contextmanager
def browser(program: str) -> Iterator[Page]:
    """A headless browser with an empty profile, terminated on exit; its pipes are those of Unix."""
    import fcntl

    (from_us, to_it), (to_us, from_it) = os.pipe(), os.pipe()
    # The browser reads from 3 and writes to 4; the pipes must not occupy these descriptors.
    theirs = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (from_us, from_it)]
    os.close(from_us)
    os.close(from_it)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")
        process = subprocess.Popen(
            [
                *(sys.executable, "-c", CONNECTED, *map(str, theirs)),
                *(program, *options, "--remote-debugging-pipe", f"--user-data-dir={profile}"),
            ],
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=theirs,
        )
        for end in theirs:
            os.close(end)
        try:
            yield Page(to_it, to_us)
        finally:
            process.terminate()
            process.wait(20)
            os.close(to_it)
            os.close(to_us)


def data_of(text: str) -> dict[str, Any]:
    """The data of a page's script."""
    found = re.search(r'<script[^>]* id="data">([^<]*)</script>', text)
    assert found is not None
    data: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(found[1])))
    return data


def expected(data: dict[str, Any], course: int, step: int) -> list[tuple[str, int]]:
    """The tensors that are live at a step, from the lifetimes in the page's data."""
    found = data["courses"][course]
    lives = zip(found["first"], found["last"], found["tensor"], found["bytes"], strict=True)
    alive = [(data["texts"][tensor], size) for first, last, tensor, size in lives if first <= step <= last]
    return sorted(alive, key=lambda life: (-life[1], life[0]))


def shown(page: Page) -> tuple[int, int, list[tuple[str, int]]]:
    """Step, sum and rows of the table of tensors."""
    step, total, rows = page.value("""(() => {
      const table = document.getElementById("alive");
      const bytes = (row) => Number(row.querySelector("[data-value]").dataset.value);
      const name = (cell) => (cell.querySelector(".name") ?? cell).textContent;
      return [Number(table.dataset.step), bytes(table.querySelector("tfoot tr")),
        [...table.querySelectorAll("tbody tr")].map((row) => [name(row.cells[0]), bytes(row)])];
    })()""")
    return step, total, [(name, size) for name, size in rows]


def check_step(page: Page, data: dict[str, Any], course: int) -> int:
    """Sums are correct at once, and all tensors appear within seconds."""
    step, total, rows = shown(page)
    wanted = expected(data, course, step)
    assert total == sum(size for _, size in wanted), f"step {step}: the page shows {total} bytes"
    assert sum(size for _, size in rows) == total, f"step {step}: the rows do not add up to their sum"
    until = time.perf_counter() + 5
    while len(rows) < min(len(wanted), MAX_ROWS) and time.perf_counter() < until:
        time.sleep(0.05)
        rows = shown(page)[2]
    listed = rows[:MAX_ROWS]
    assert [size for _, size in listed] == [size for _, size in wanted[:MAX_ROWS]], f"step {step}: wrong sizes"
    if len(wanted) <= MAX_ROWS:
        assert sorted(rows) == sorted(wanted), f"step {step}: wrong tensors"
    return step


def check_interaction(page: Page, data: dict[str, Any]) -> None:
    """Pointer and keyboard on all curves and on the network."""
    figures = page.value("""[...document.querySelectorAll("figure.memory")].map((figure) => {
      const {courses, table} = figure.dataset;
      return [figure.id, courses.split(" ").map(Number), Boolean(table)];
    })""")
    drawn = {place for _, places, _ in figures for place in places}
    assert len(drawn) == len(data["courses"]), f"{len(drawn)} of {len(data['courses'])} curves are drawn"
    for name, places, has_table in figures:
        shown_here = [data["courses"][place] for place in places]
        if has_table:
            check_curves(page, {**data, "courses": shown_here}, name)
        else:
            check_readout(page, shown_here, name)
    if data["network"]["name"]:
        page.value("document.querySelector('#network .handle').focus()")
        page.press("End")
        name = data["texts"][data["network"]["name"][-1]]
        assert name in page.value("document.querySelector('#network .readout').textContent")


def check_curves(page: Page, data: dict[str, Any], name: str) -> None:
    """Curves with a table of tensors."""
    live = [course_totals(course) for course in data["courses"]]
    for course in range(len(live)):
        page.value(f"document.querySelectorAll('#{name} input')[{course}].click()")
        assert live[course][check_step(page, data, course)] == max(live[course]), "the first step is not the peak"
        width = page.width_in_view(f"#{name} svg.plot")
        longest = max(map(len, live))
        for share in (0.0005, 0.13, 0.37, 0.5, 0.71, 0.9, 0.9995):
            page.mouse("mouseMoved", share)
            page.frames()
            step = check_step(page, data, course)
            wanted = min(share * longest, len(live[course]) - 1)
            assert abs(step - wanted) <= 1 + longest / width, f"the pointer is at {wanted}, the page shows {step}"
    page.value(f"document.querySelectorAll('#{name} input')[0].click()")
    page.value(f"document.querySelector('#{name} .handle').focus()")
    peak = check_step(page, data, 0)
    last = len(live[0]) - 1
    for key, step in (
        ("Home", 0), ("ArrowRight", 1), ("ArrowLeft", 0), ("End", last), ("ArrowRight", last),
        ("ArrowLeft", last - 1), ("p", peak), ("+", peak), ("+", peak), ("0", peak),
    ):  # fmt: skip
        page.press(key)
        assert check_step(page, data, 0) == step, f"{key} leads to {shown(page)[0]}"
    time.sleep(0.5)
    spoken = page.value(f"document.querySelector('#{name} [aria-live]').textContent")
    # The page counts steps from 1.
    assert spoken.startswith(f"Step {peak + 1:,} of {last + 1:,}: "), spoken
    check_zoom(page, name)


def check_zoom(page: Page, name: str) -> None:
    """Dragging zooms to a part of the steps, and a double click shows all of them."""
    marks = f"[...document.querySelectorAll('#{name} text.mark')].map((mark) => mark.textContent)"
    everything = page.value(marks)
    page.mouse("mousePressed", 0.2)
    page.mouse("mouseMoved", 0.7)
    page.mouse("mouseReleased", 0.7)
    assert page.value(marks) != everything, "dragging does not zoom"
    for clicks in (1, 2):
        page.mouse("mousePressed", 0.5, clicks)
        page.mouse("mouseReleased", 0.5, clicks)
    assert page.value(marks) == everything, "a double click does not show everything"


def check_readout(page: Page, courses: list[dict[str, Any]], name: str) -> None:
    """Curves with a line of text: each begins at its peak, and keys move the step."""
    for number, course in enumerate(courses):
        live = course_totals(course)
        page.value(f"document.querySelectorAll('#{name} input')[{number}].click()")
        page.value(f"document.querySelector('#{name} .handle').focus()")
        for key, step in (("p", live.index(max(live))), ("Home", 0), ("End", len(live) - 1)):
            page.press(key)
            text = page.value(f"document.querySelector('#{name} .readout').textContent")
            assert text.startswith(f"Step {step + 1:,} of {len(live):,}: "), text


def check_sorting(page: Page) -> None:
    """A click on a heading sorts a table by the column's figures."""
    unsorted = page.value("""[...document.querySelectorAll("table.sortable")].flatMap((table) =>
      [...table.querySelectorAll("thead th.number")].filter((cell) => {
        cell.querySelector("button").click();
        const cells = [...table.tBodies[0].rows].map((row) => row.cells[cell.cellIndex]);
        const values = cells.map(({dataset}) => Number(dataset.value));
        return values.some((value, index) => Number.isNaN(value) || (index && value > values[index - 1]));
      }).map((cell) => `${cell.textContent} of ${table.caption.textContent}`))""")
    assert not unsorted, f"columns not sorted by figures: {', '.join(unsorted)}"


def course_totals(course: dict[str, Any]) -> list[int]:
    """Live bytes at each step of a curve."""
    change = [0] * (len(course["name"]) + 1)
    for first, last, size in zip(course["first"], course["last"], course["bytes"], strict=True):
        change[first] += size
        change[last + 1] -= size
    return list(accumulate(change))[:-1]


def check_page(page: Page, path: Path, screenshots: Path | None) -> str:
    data = data_of(path.read_text(encoding="ascii"))
    seconds = page.open(path, 1200)
    assert seconds < MAX_SECONDS, f"interactive after {seconds:.2f} s"
    check_interaction(page, data)
    check_sorting(page)
    rows = "#alive tbody tr" if data["courses"] else "table tbody tr"
    for width, dark, script in product((400, 1600), (False, True), (True, False)):
        page.open(path, width, dark=dark, script=script)
        wide = page.value("document.documentElement.scrollWidth")
        assert wide <= width, f"the page is {wide} pixels wide at {width}"
        assert page.value(f"document.querySelectorAll('{rows}').length") > 0
        check_contrast(page)
        if screenshots is not None:
            kind = f"{width}-{'dark' if dark else 'light'}-{'script' if script else 'plain'}"
            page.screenshot(screenshots / f"{path.stem}-{kind}.png")
        complaints(page, path)
    return f"{path}: holds; interactive after {seconds:.2f} s, {path.stat().st_size / 1e6:.2f} MB"


def check_contrast(page: Page) -> None:
    areas = [f".swatch .role-{number}" for number in range(8)]
    wanted = [(text, "color", TEXT_CONTRAST) for text in TEXTS]
    wanted += [(area, "fill", SHAPE_CONTRAST) for area in areas] + [(".budget-label", "fill", TEXT_CONTRAST)]
    wanted += [(".base-label", "fill", TEXT_CONTRAST)]
    for selector, key, least in wanted:
        contrast = page.value(f"{CONTRAST}({json.dumps(selector)}, {json.dumps(key)})")
        assert contrast is None or contrast >= least, f"{selector}: contrast {contrast:.2f}"


def complaints(page: Page, path: Path) -> None:
    """No console messages, and no requests except for the page."""
    time.sleep(0.05)
    page.value("0")
    for event in page.events:
        assert event.get("method") not in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"), (
            event
        )
        if event.get("method") == "Network.requestWillBeSent":
            url = event["params"]["request"]["url"]
            assert url == path.resolve().as_uri() or url == "data:,", f"a request to {url}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument("--screenshots", type=Path)
    arguments = parser.parse_args()
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        print("skipped: this machine has no Chromium; install it to check pages")
        return 0
    with browser(program) as page:
        # The first page of a browser also waits for the browser's processes.
        page.open(arguments.pages[0], 1200)
        for path in arguments.pages:
            print(check_page(page, path, arguments.screenshots))
    return 0


if __name__ == "__main__":
    sys.exit(main())
