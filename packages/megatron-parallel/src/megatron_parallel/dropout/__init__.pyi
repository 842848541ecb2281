from .dropout import DropoutFusion as DropoutFusion
from .dropout import KeptWords as KeptWords
from .dropout import dropout_fusion as dropout_fusion
from .dropout import keep_mask as keep_mask
from .dropout import keyed_dropout as keyed_dropout
from .dropout import keyed_uniform as keyed_uniform
from .key import DropoutKey as DropoutKey
