"""``python -m rockmate``: see ``rockmate_cli``."""

import sys

from rockmate_cli import main

if __name__ == "__main__":
    sys.exit(main())
