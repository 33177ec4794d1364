"""The privacy statement of a run: sentences that can only be built from facts that support them.

`read_facts` turns `privacy.json` and facts from the run's other files into typed facts.
`statement_of` returns all sentences that those facts support. Building any other sentence raises
`UnsupportedClaimError`, so no caller can print a claim that does not hold.
"""

from fedsim.core.formatting import clients_text as clients_text
from fedsim.statement.attack import AttackBound as AttackBound
from fedsim.statement.attack import Profile as Profile
from fedsim.statement.attack import profile_of as profile_of
from fedsim.statement.facts import ClientFacts as ClientFacts
from fedsim.statement.facts import Facts as Facts
from fedsim.statement.facts import MechanismFacts as MechanismFacts
from fedsim.statement.facts import RunFacts as RunFacts
from fedsim.statement.privacy_file import read_facts as read_facts
from fedsim.statement.sentence import Sentence as Sentence
from fedsim.statement.sentence import UnsupportedClaimError as UnsupportedClaimError
from fedsim.statement.statement import in_words as in_words
from fedsim.statement.statement import statement_of as statement_of
from fedsim.statement.statement import to_json as to_json
