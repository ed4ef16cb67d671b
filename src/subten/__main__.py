"""`python -m subten` is the command `subten`."""

import sys

from subten.cli import main

sys.exit(main())
