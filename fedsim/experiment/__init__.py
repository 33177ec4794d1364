"""Experiment files: strict loading, typed settings, and errors with file, line and column."""

from fedsim.experiment.errors import ExperimentError as ExperimentError
from fedsim.experiment.errors import Problem as Problem
from fedsim.experiment.load import LoadedExperiment as LoadedExperiment
from fedsim.experiment.load import load_experiment as load_experiment
from fedsim.experiment.load import read_settings as read_settings
from fedsim.experiment.schema import Experiment as Experiment
from fedsim.experiment.schema import ExperimentWithClients as ExperimentWithClients
from fedsim.experiment.schema import dump_experiment as dump_experiment
from fedsim.experiment.schema import json_schema as json_schema
