"""The update rules that this package provides. This module does not import torch."""

from megatron_parallel.extensions import Section

from megatron_optim.adafactor_settings import AdafactorSettings
from megatron_optim.muon_settings import MuonSettings
from megatron_optim.rule_registry import UpdateRuleKind
from megatron_optim.rule_settings import AdamSettings, LionSettings

_OF_ADAM = ("optimizer.adam_beta1", "optimizer.adam_beta2", "optimizer.adam_eps")

ADAM = UpdateRuleKind(
    name="adam",
    summary="Adam with decoupled weight decay",
    rule="megatron_optim.rules:Adam",
    section=Section("adam", AdamSettings, "Adam"),
    supported_settings=_OF_ADAM,
)
SGD = UpdateRuleKind(
    name="sgd",
    summary="stochastic gradient descent with momentum",
    rule="megatron_optim.rules:SGD",
    supported_settings=("optimizer.sgd_momentum",),
)
LION = UpdateRuleKind(
    name="lion",
    summary="steps by the sign of a mean of gradients",
    rule="megatron_optim.lion:Lion",
    section=Section("lion", LionSettings, "Lion"),
    supported_settings=(),
)
MUON = UpdateRuleKind(
    name="muon",
    summary="orthogonalized momentum for matrices, AdamW for other parameters",
    rule="megatron_optim.muon:Muon",
    section=Section("muon", MuonSettings, "Muon"),
    supported_settings=_OF_ADAM,  # of the rule of the other parameters
)
ADAFACTOR = UpdateRuleKind(
    name="adafactor",
    summary="Adam without momentum, with means over rows and columns of squared gradients",
    rule="megatron_optim.adafactor:Adafactor",
    section=Section("adafactor", AdafactorSettings, "Adafactor"),
    supported_settings=(),
)
