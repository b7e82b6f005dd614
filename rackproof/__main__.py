"""Run the command from a checkout: `python rackproof VERB` or `python -m rackproof VERB`."""

import sys
from pathlib import Path

if not __package__:  # started as `python rackproof`, so the import path does not yet include the checkout
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from rackproof.main import main

sys.exit(main())
