"""The function `run`, which trains an experiment; `fedsim.run` calls it."""

from fedsim.report.run import run as run
