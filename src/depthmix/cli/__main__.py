"""`python -m depthmix.cli`."""

import sys

from depthmix.cli import main

sys.exit(main())
