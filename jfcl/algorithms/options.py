"""Declarations of options that several methods have; an option of one method is declared in its factory."""

from typing import Annotated

from jfcl.algorithms.round import WEIGHTS
from jfcl.core.options import MOST_REPEATED, Excludes, Interval, Needs, OneOf, Range, Real
from jfcl.kernels import OPERATORS
from jfcl.kernels.threshold import QUANTILE_RULES

Rounds = Annotated[int, Range(1, MOST_REPEATED)]  # inside `init` or `step`
PersonalSteps = Annotated[int | None, Range(1, MOST_REPEATED)]
Weights = Annotated[str, OneOf(WEIGHTS)]
Quantile = Annotated[Real | None, Interval("[0, 1]")]
QuantileRule = Annotated[str, OneOf(QUANTILE_RULES), Excludes("radius")]
Privacy = Annotated[str | None, OneOf(OPERATORS)]
PrivacySeed = Annotated[int, Range(0, 2**32 - 1), Needs("privacy")]
