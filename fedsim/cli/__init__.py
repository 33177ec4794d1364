"""The `fedsim` command, with one file for each command that is not in `fedsim/tools/`.

Data goes to stdout, messages to stderr. No slow library is imported before a command needs it, so
`--help` answers at once.
"""

from fedsim.cli.main import EXIT_CODES as EXIT_CODES
from fedsim.cli.main import cli as cli
from fedsim.cli.main import main as main
