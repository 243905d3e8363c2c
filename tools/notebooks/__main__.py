"""`python -m tools.notebooks gallery | html | thumbnails`.

gallery [OPTIONS]          serve the notebooks; options of `marimo run`, such as --headless
html [FOLDER] [NAME ...]   export pages that need neither Python nor the network
thumbnails [NAME ...]      draw the pictures of the gallery's cards
"""

from __future__ import annotations

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
    case ["thumbnails", *names]:
        from tools.notebooks.thumbnails import draw

        draw(names or None)
    case _:
        raise SystemExit(__doc__)
