"""The function behind `fedsim.run`."""

from fedsim.report.run import run as run
