"""The `fedsim` command, with a file for each command of the core; a tool has its own command.

Data goes to stdout, messages to stderr. Nothing heavy is imported before a command needs it:
`--help` answers at once.
"""

from fedsim.cli.main import EXIT_CODES as EXIT_CODES
from fedsim.cli.main import cli as cli
from fedsim.cli.main import main as main
