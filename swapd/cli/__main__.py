"""``python -m swapd.cli``."""

import sys

from swapd.cli import main

sys.exit(main())
