from .device import imagined_device as imagined_device
from .device import missing_guard_reason as missing_guard_reason
from .guard import NoGuardError as NoGuardError
from .guard import guard_loaded as guard_loaded
from .guard import load_guard as load_guard
from .ledger import DeviceLedger as DeviceLedger
from .reading import read_integers as read_integers
from .storages import StorageLedger as StorageLedger
