"""``python -m rockmate``: see ``rockmate.cli``."""

import sys

from rockmate.cli import main

if __name__ == "__main__":
    sys.exit(main())
