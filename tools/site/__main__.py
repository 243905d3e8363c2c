"""Build the documentation site into `site/`: `python -m tools.site`.

With `--serve PORT` it is served from this machine after the build.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

from tools.site.assemble import ROOT, assemble

parser = argparse.ArgumentParser(prog="python -m tools.site", description="Build the site.")
parser.add_argument("--serve", type=int, metavar="PORT", help="serve it on this port afterward")
arguments = parser.parse_args()
assemble(ROOT / "build" / "docs")
command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
if code := subprocess.run(command, cwd=ROOT, check=False).returncode:
    raise SystemExit(code)
print(f"The site is in {ROOT / 'site'}.")
if arguments.serve is not None:
    handler = partial(SimpleHTTPRequestHandler, directory=str(ROOT / "site"))
    with ThreadingHTTPServer(("127.0.0.1", arguments.serve), handler) as server:
        print(f"http://127.0.0.1:{arguments.serve} (Ctrl-C ends it)", flush=True)
        server.serve_forever()
