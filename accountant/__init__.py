"""Privacy accounting: privacy events, accountants, noise calibration and the privacy ledger.

Apart from fedsim itself, the package needs only numpy and scipy.
"""

if not __name__.startswith("fedsim."):
    raise ImportError(f"import fedsim.{__name__}, not {__name__}")

from fedsim.accountant.accountants import Accountant as Accountant
from fedsim.accountant.accountants import MomentsAccountant as MomentsAccountant
from fedsim.accountant.accountants import PldAccountant as PldAccountant
from fedsim.accountant.accountants import PrivacySpent as PrivacySpent
from fedsim.accountant.accountants import RdpAccountant as RdpAccountant
from fedsim.accountant.accountants import UnsupportedEventError as UnsupportedEventError
from fedsim.accountant.accountants import make_accountant as make_accountant
from fedsim.accountant.calibration import calibrate_noise_multiplier as calibrate_noise_multiplier
from fedsim.accountant.calibration import calibrate_sampling_rate as calibrate_sampling_rate
from fedsim.accountant.calibration import calibrate_steps as calibrate_steps
from fedsim.accountant.composition import zcdp_rho as zcdp_rho
from fedsim.accountant.events import SCHEMA_VERSION as SCHEMA_VERSION
from fedsim.accountant.events import ZCDP as ZCDP
from fedsim.accountant.events import Adjacency as Adjacency
from fedsim.accountant.events import Composed as Composed
from fedsim.accountant.events import EpochShuffled as EpochShuffled
from fedsim.accountant.events import EpsilonDelta as EpsilonDelta
from fedsim.accountant.events import Event as Event
from fedsim.accountant.events import FixedSizeSampled as FixedSizeSampled
from fedsim.accountant.events import Gaussian as Gaussian
from fedsim.accountant.events import JointGaussian as JointGaussian
from fedsim.accountant.events import NonPrivate as NonPrivate
from fedsim.accountant.events import PoissonSampled as PoissonSampled
from fedsim.accountant.events import RandomAllocation as RandomAllocation
from fedsim.accountant.events import RepeatAndSelect as RepeatAndSelect
from fedsim.accountant.events import SelfComposed as SelfComposed
from fedsim.accountant.events import event_from_dict as event_from_dict
from fedsim.accountant.events import to_dict as to_dict
from fedsim.accountant.fleet import FleetAccountant as FleetAccountant
from fedsim.accountant.ledger.privacy_ledger import PrivacyLedger as PrivacyLedger
from fedsim.accountant.privacy_filter import PrivacyFilter as PrivacyFilter
