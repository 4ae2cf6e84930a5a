"""``python -m zoo``: the command ``zoo``."""

import sys

from zoo.cli import main

sys.exit(main())
