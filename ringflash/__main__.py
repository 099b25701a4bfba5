"""Entry point of `python -m ringflash`, the command line."""

import sys

from ringflash.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
