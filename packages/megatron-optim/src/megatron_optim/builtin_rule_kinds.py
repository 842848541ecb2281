"""The update rules that this package provides. This module does not import torch."""

from megatron_parallel.extensions import Section

from megatron_optim.adafactor_settings import AdafactorSettings
from megatron_optim.muon_settings import MuonSettings
from megatron_optim.rule_registry import UpdateRuleKind
from megatron_optim.rule_settings import AdamSettings, LionSettings

ADAM = UpdateRuleKind(
    name="adam",
    summary="Adam with decoupled weight decay",
    rule="megatron_optim.rules:Adam",
    section=Section("adam", AdamSettings, "Adam"),
)
SGD = UpdateRuleKind(
    name="sgd",
    summary="stochastic gradient descent with momentum",
    rule="megatron_optim.rules:SGD",
)
LION = UpdateRuleKind(
    name="lion",
    summary="steps by the sign of a mean of gradients",
    rule="megatron_optim.lion:Lion",
    section=Section("lion", LionSettings, "Lion"),
)
MUON = UpdateRuleKind(
    name="muon",
    summary="orthogonalized momentum for matrices, AdamW for other parameters",
    rule="megatron_optim.muon:Muon",
    section=Section("muon", MuonSettings, "Muon"),
)
ADAFACTOR = UpdateRuleKind(
    name="adafactor",
    summary="Adam without momentum, with means over rows and columns of squared gradients",
    rule="megatron_optim.adafactor:Adafactor",
    section=Section("adafactor", AdafactorSettings, "Adafactor"),
)
