"""``python -m rockmate.demo``: see ``rockmate.demo.compare``."""

from __future__ import annotations

import os
import sys

from rockmate.demo.compare import MALLOC, main
from rockmate.tell import be_silent

if __name__ == "__main__":
    if sys.platform == "linux" and any(os.environ.get(k) != v for k, v in MALLOC.items()):
        os.execve(sys.executable, [sys.executable, "-m", "rockmate.demo", *sys.argv[1:]], os.environ | MALLOC)
    be_silent()  # the table says what lines on plans would
    sys.exit(main())
