"""The command `swapd`, as a script."""

import sys

from swapd.cli import main

sys.exit(main())
