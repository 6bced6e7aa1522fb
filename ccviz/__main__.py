"""``python -m ccviz``."""

import sys

from ccviz.cli import main

sys.exit(main())
