"""Options that several methods have, declared once; an option of one method is declared in its factory."""

import functools
import inspect
import textwrap
import typing
from collections.abc import Callable
from typing import Annotated, Any, TypedDict, TypeVar

import jax
import optax

from jfcl.core import Adversary, Clients, PyTree
from jfcl.core.names import option_hint
from jfcl.core.options import MOST_REPEATED, OneOf, Range, argument_texts, check_options
from jfcl.mapping.axis import Mapping, or_auto
from jfcl.methods.round import WEIGHTS, check_weights
from jfcl.robust.aggregate import clients_check
from jfcl.robust.privacy import GaussianDP
from jfcl.training.local import check_parts

Factory = TypeVar("Factory", bound=Callable[..., Any])

Count = Annotated[int, Range(1)]
Rounds = Annotated[int, Range(1, MOST_REPEATED)]  # inside `init` or `step`


class Options(TypedDict, total=False):
    """Options of methods in which clients send updates to be averaged. `SENDING` and `AVERAGING` are common parts.

    Attributes:
      weights: the weight of a client in a mean: `"size"`, its number of examples, or `"equal"`. An array `[N]` has
        the weight of each client, by its id.
      shared: takes a parameter's path, such as `"Dense_0/kernel"`; true for those that are averaged over all clients
        instead of those of a cluster (weight sharing, section 4.3 of IFCA).
      personal: takes a parameter's path; true for those that each client keeps and trains, and neither sends nor
        compares. `jfcl.fedper`, `fedrep`, `fedbn` and `lg_fedavg` are such choices.
      personal_steps: local steps in each round on the personal parameters alone; the others are then trained with
        these fixed. Default: all parameters are trained at once.
      server_optimizer: takes the mean update as a descent direction, and the mean training loss of the round where it
        needs it (`value`): `optax.sgd(1.0, momentum=0.9)` is FedAvgM, `optax.adam(1e-2, b2=0.99, eps=1e-3)` FedAdam,
        with Adam's bias correction. Default: the mean of the clients' models.
      cohort: clients per round, drawn without replacement. Default: all.
      init_params: a model to start from, or one for each cluster or client, stacked. Default: random.
      adversary: hostile clients: `Adversary(attack, malicious)` with an attack of `jfcl.attacks`.
      aggregator: `(updates [N, ...], mask=[N]) -> [...]`, a robust one of `jfcl.kernels` in place of the mean; one with
        an argument `key` gets another key in every round. Clients then have equal weights, statistics keep the mean,
        and a round holds all updates: `O(N D)` memory.
      dp: differential privacy of each client, such as `jfcl.privacy.GaussianDP(clip=1.0, noise=1.0)`, with
        `weights="equal"`: clipped updates and Gaussian noise on their sums.
      client_axis: `jax.vmap`, `jfcl.chunked(size)`, ... Default: `jfcl.mapping.auto()`.
    """

    weights: Annotated[str | jax.Array, OneOf(WEIGHTS)]
    shared: Callable[[str], bool] | None
    personal: Callable[[str], bool] | None
    personal_steps: Annotated[int | None, Range(1, MOST_REPEATED)]
    server_optimizer: optax.GradientTransformation | None
    cohort: Annotated[int | None, Range(1)]
    init_params: PyTree | None
    adversary: Adversary | None
    aggregator: Callable[..., PyTree] | None
    dp: GaussianDP | None
    client_axis: Mapping | None


SCOPES = ("shared", "personal", "personal_steps")
SENDING = ("weights", "init_params", "adversary", "client_axis")
AVERAGING = (*SENDING, "server_optimizer", "cohort", "aggregator")


def factory(*names: str, **defaults: Any) -> Callable[[Factory], Factory]:
    """Returns the decorator of a method's factory, whose last parameter is `**options: Unpack[Options]`, or a subclass.

    The factory's signature and docstring then have these options beside its own, as if they were written there. A call
    is checked as by `check_options`; `TypeError` names the nearest argument for an unknown one. Inside, `options` has
    all of `names`, with a mapping for `client_axis`. `Algorithm.check` gets the check that there is an entry of
    `weights` and of the adversary's `malicious` for each client, before the method's own.

    Args:
      names: the options that the method has, except those that the factory declares itself.
      defaults: of these, other than None, and other than `"size"` for `weights`.

    Example:
      >>> from typing import Unpack
      >>> @factory("cohort", "weights", weights="equal")
      ... def method(task, training, *, beta: float = 0.9, **options: Unpack[Options]):
      ...     return beta, options
      >>> list(inspect.signature(method).parameters), inspect.signature(method).parameters["weights"].default
      (['task', 'training', 'beta', 'weights', 'cohort'], 'equal')
    """
    defaults = {"weights": "size"} | defaults

    def decorate(make: Factory) -> Factory:
        (declared,) = typing.get_args(typing.get_type_hints(make).get("options")) or (Options,)
        hints = typing.get_type_hints(declared, include_extras=True)
        texts = argument_texts(Options) | argument_texts(declared)
        signature = inspect.signature(make)
        common = [name for name in hints if name in names and name not in signature.parameters]
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD] + [
            inspect.Parameter(name, keyword, default=defaults.get(name), annotation=hints[name]) for name in common
        ]

        @functools.wraps(make)
        def build(*args, **kwargs):
            for name in kwargs.keys() - build.__signature__.parameters.keys():
                hint = option_hint(name, [p.name for p in parameters if p.kind is keyword])
                raise TypeError(f"{make.__name__} has no argument {name!r}{hint}")
            try:
                call = build.__signature__.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{make.__name__}: {error}") from None
            call.apply_defaults()
            check_options(build, call.arguments)
            check_parts(call.arguments["task"], call.arguments["training"])
            weights = call.arguments.get("weights", "size")
            check_weights(weights)
            check_entries = clients_check(call.arguments.get("adversary"), weights)
            if "client_axis" in common:
                call.arguments["client_axis"] = or_auto(call.arguments["client_axis"])
            algorithm = make(*call.args, **call.kwargs)
            if check_entries is None:
                return algorithm

            def check_all(clients: Clients) -> None:
                check_entries(clients)
                if algorithm.check is not None:
                    algorithm.check(clients)

            return algorithm._replace(check=check_all)

        build.__signature__ = signature.replace(parameters=parameters)
        build.__annotations__ = {p.name: p.annotation for p in parameters if p.annotation is not p.empty}
        build.__doc__ = _with_entries(make.__doc__, {name: texts.get(name, "") for name in common})
        return typing.cast(Factory, build)

    return decorate


def _with_entries(documented: str | None, texts: dict[str, str]) -> str | None:
    """Returns a docstring with further entries at the end of its `Args` section, except those that it has."""
    if documented is None:  # python -OO
        return None
    documented = inspect.cleandoc(documented) + "\n\n"
    if "\nArgs:\n" not in documented:
        summary, returns, tail = documented.partition("\n\nReturns:\n")
        documented = f"{summary.rstrip()}\n\nArgs:\n" + (returns + tail)[1:] if returns else f"{documented}Args:\n\n"
    begin = documented.index("\nArgs:\n")
    end = documented.index("\n\n", begin)
    arguments = documented[begin:end]
    entries = [_entry(name, text) for name, text in texts.items() if f"\n  {name}: " not in arguments]
    return ("\n".join([documented[:end].rstrip(), *entries]) + documented[end:]).rstrip()


@functools.cache  # of the same few options for every method
def _entry(name: str, text: str) -> str:
    return textwrap.fill(f"{name}: {text}", 118, initial_indent="  ", subsequent_indent="    ")
