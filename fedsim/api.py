"""The Python interface: what `fedsim.run` is."""

from fedsim.report.run import run as run
