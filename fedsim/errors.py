"""The errors that are a person's to mend: the command line prints them without a traceback."""

from fedsim.clients.budget.plan import PrivacyBudgetError as PrivacyBudgetError
from fedsim.clients.budget.plan import PrivacyPlanError
from fedsim.clients.dp_sgd.model_checks.safety import UnsafeModelError
from fedsim.comparison.results import ComparisonError
from fedsim.core.device import DeviceError
from fedsim.core.plugins import PluginError
from fedsim.data import DataError
from fedsim.deployment.errors import DeploymentError
from fedsim.experiment import ExperimentError
from fedsim.federation.secure_setup import SecureSetupError
from fedsim.models.errors import ModelError
from fedsim.runs.directory import RunDirectoryError
from fedsim.simulation.engines import EngineError
from fedsim.tracking.observer import TrackerError

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
