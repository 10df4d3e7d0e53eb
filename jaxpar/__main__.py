"""`python -m jaxpar`: see `cli`."""

import sys

from jaxpar.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
