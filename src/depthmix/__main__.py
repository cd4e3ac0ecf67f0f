"""`python -m depthmix`, which is what torchrun starts."""

import sys

from depthmix.cli import main

sys.exit(main())
