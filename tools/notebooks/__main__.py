"""`python -m tools.notebooks gallery | html | wasm | thumbnails`.

gallery [OPTIONS]          serve the notebooks; options of `marimo run`, such as --headless
html [FOLDER] [NAME ...]   export pages that need neither Python nor the network
wasm [FOLDER] [--pyodide URL] [--index URL]
                           export pages whose Python runs in the browser; the addresses are those
                           of mirrors of Pyodide's distribution and of PyPI
thumbnails [NAME ...]      draw the pictures of the gallery's cards
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

match sys.argv[1:]:
    case ["gallery", *options]:
        from tools.notebooks.gallery import serve

        serve(options)
    case ["html", *rest]:
        from tools.notebooks.export import export

        folder = Path(rest[0]) if rest else Path("build/notebooks")
        pages = export(folder, rest[1:] or None)
        print(f"{len(pages)} pages in {folder}; open them with:")
        print(f"  python -m http.server --bind 127.0.0.1 --directory {folder} 8000")
    case ["wasm", *rest]:
        from tools.notebooks import wasm

        parser = argparse.ArgumentParser(prog="python -m tools.notebooks wasm")
        parser.add_argument("folder", nargs="?", type=Path, default=Path("build/wasm"))
        parser.add_argument("--pyodide", metavar="URL", help="a mirror of Pyodide's full/ folder")
        parser.add_argument("--index", metavar="URL", help="a mirror of PyPI")
        chosen = parser.parse_args(rest)
        try:
            pages = wasm.export(chosen.folder, pyodide=chosen.pyodide, index=chosen.index)
        except RuntimeError as error:
            raise SystemExit(str(error)) from error
        print(f"{len(pages)} pages in {chosen.folder}; open them with:")
        print(f"  python -m http.server --bind 127.0.0.1 --directory {chosen.folder} 8000")
    case ["thumbnails", *names]:
        from tools.notebooks.thumbnails import draw

        draw(names or None)
    case _:
        raise SystemExit(__doc__)
