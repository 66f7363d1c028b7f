"""``python -m rockmate.demo``: see ``rockmate.demo.compare``."""

from __future__ import annotations

import os
import sys

from rockmate.demo.compare import MALLOC, main

if __name__ == "__main__":
    if sys.platform == "linux" and any(os.environ.get(k) != v for k, v in MALLOC.items()):
        os.execve(sys.executable, [sys.executable, "-m", "rockmate.demo", *sys.argv[1:]], os.environ | MALLOC)
    sys.exit(main())
