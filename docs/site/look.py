"""Look at the built site in a browser: three pages, each as wide as a desk's screen and a phone's.

    python docs/site/look.py SITE FOLDER

Screenshots go into FOLDER. A page fails that scrolls sideways, shows an image that did not load, or fetches
anything from elsewhere. Needs chromium (Debian: the package `chromium`).
"""

import functools
import json
import re
import shutil
import subprocess
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PAGES = ("index", "methods", "comparison")
WIDTHS = {"desk": 1280, "phone": 390}
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
# A window is never as narrow as a phone: a frame is, of which this says what it shows.
FRAME = """<!doctype html><body style="margin:0"><iframe id="f" src="/{page}.html" width="{width}"
height="900" style="border:0"></iframe><pre id="seen"></pre><script>
f.onload = () => setTimeout(() => {{
  const d = f.contentDocument, w = f.contentWindow;
  seen.textContent = JSON.stringify({{
    width: d.documentElement.scrollWidth,
    title: d.title,
    broken: [...d.images].filter(i => !i.naturalWidth).map(i => i.src),
    foreign: w.performance.getEntriesByType("resource").map(e => e.name)
      .filter(n => !n.startsWith(w.location.origin)),
  }});
}}, 500);
</script>"""


class Quiet(SimpleHTTPRequestHandler):
    """The site's files, and the frames around its pages; it says nothing of each request."""

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        if match := re.fullmatch(r"/frame/([\w-]+)/(\d+)", self.path):
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(FRAME.format(page=match[1], width=match[2]).encode())
        else:
            super().do_GET()


def main(site: str, out: str) -> None:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit(f"no browser: none of {', '.join(BROWSERS)} is installed")
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=site))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    wrong = []
    for page in PAGES:
        for name, width in WIDTHS.items():
            shot = folder / f"{page}-{name}.png"
            url = f"http://127.0.0.1:{server.server_port}/frame/{page}/{width}"
            command = (
                browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                "--virtual-time-budget=4000", f"--window-size={max(width, 500)},900",
            )  # fmt: skip
            subprocess.run(
                [*command, f"--screenshot={shot}", url], check=True, capture_output=True, timeout=60
            )
            dom = subprocess.run(
                [*command, "--dump-dom", url],
                check=True,
                capture_output=True,
                text=True,
                timeout=60,
            ).stdout
            match = re.search(r'<pre id="seen">(.+?)</pre>', dom)
            seen = json.loads(match[1].replace("&amp;", "&")) if match else {}
            print(f"{page}, {width} wide: {seen}")
            if not seen or seen["width"] > width or seen["broken"] or seen["foreign"]:
                wrong.append(f"{page}, {width} wide")
    server.shutdown()
    if wrong:
        sys.exit(
            f"these scroll sideways, lack an image or fetch from elsewhere: {'; '.join(wrong)}"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
