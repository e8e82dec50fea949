"""``python -m fpipe`` is the command ``fpipe``."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
