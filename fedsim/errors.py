"""The errors that are a person's to mend: the command line prints them without a traceback."""

from fedsim.clients.plan import PrivacyBudgetError as PrivacyBudgetError
from fedsim.clients.plan import PrivacyPlanError
from fedsim.clients.safety import UnsafeModelError
from fedsim.comparison.results import ComparisonError
from fedsim.data import DataError
from fedsim.deployment.errors import DeploymentError
from fedsim.experiment import ExperimentError
from fedsim.federation.secure_setup import SecureSetupError
from fedsim.models.errors import ModelError
from fedsim.plugins import PluginError
from fedsim.runs.directory import RunDirectoryError
from fedsim.simulation.device import DeviceError
from fedsim.simulation.engines import EngineError
from fedsim.tracking.observing import TrackerError

USER_ERRORS: tuple[type[Exception], ...] = (
    ComparisonError,
    DataError,
    DeploymentError,
    DeviceError,
    EngineError,
    ExperimentError,
    ModelError,
    PluginError,
    PrivacyPlanError,
    RunDirectoryError,
    SecureSetupError,
    TrackerError,
    UnsafeModelError,
)
