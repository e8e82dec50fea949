# SPDX-License-Identifier: Apache-2.0
"""``python -m fpipe`` is the command ``fpipe``."""

import sys

from .products.command.cli import main

if __name__ == "__main__":
    sys.exit(main())
