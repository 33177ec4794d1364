"""The function that `fedsim.run` calls."""

from fedsim.report.run import run as run
