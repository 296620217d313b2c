"""Clustered Federated Learning (Sattler, Müller, Samek 2021) and its Byzantine variant (Sattler et al. 2020).

`method` and `byzantine` hold the two factories and their rules; `rounds` is the round that they share. In it clients
train and send updates, `server` decides on these alone, `splits` carries a split out.
"""

from jfcl.methods.cfl.byzantine import byzantine_cfl
from jfcl.methods.cfl.method import cfl
from jfcl.methods.cfl.state import CFLState, ParameterTree

__all__ = ["CFLState", "ParameterTree", "byzantine_cfl", "cfl"]
