"""Declarations of options that several methods have; an option of one method is declared in its factory."""

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import jax

from jfcl.core.options import MOST_REPEATED, Excludes, Interval, Needs, OneOf, Range, Real
from jfcl.kernels import OPERATORS
from jfcl.kernels.threshold import QUANTILE_RULES
from jfcl.methods.round import WEIGHTS

Rounds = Annotated[int, Range(1, MOST_REPEATED)]  # inside `init` or `step`
PersonalSteps = Annotated[int | None, Range(1, MOST_REPEATED)]
Weights = Annotated[str | jax.Array, OneOf(WEIGHTS)]  # an array: of one weight per client
Quantile = Annotated[Real | None, Interval("[0, 1]")]
QuantileRule = Annotated[str, OneOf(QUANTILE_RULES), Excludes("radius")]
Privacy = Annotated[str | None, OneOf(OPERATORS)]
PrivacySeed = Annotated[int, Range(0, 2**32 - 1), Needs("privacy")]


def passed_on(to: Callable, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those of the arguments `given` that `to` takes too.

    `given` is the `locals()` of another factory before it sets any: its arguments. An option is declared in the
    signature; what the factory itself decides is passed on by name.

    Example:
      >>> def common(*, weights, cohort=None):
      ...     return weights, cohort
      >>> def method(*, weights="size", cohort=None, momentum=0.9):
      ...     return common(**passed_on(common, locals()))
      >>> method(cohort=3)
      ('size', 3)
    """
    return {name: given[name] for name in inspect.signature(to).parameters if name in given}
