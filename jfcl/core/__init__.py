"""Types, the client axis, parameters, checks and files, on which the rest of the library is built."""

from jfcl.core.checks import (
    INT32_MAX,
    SHOWN,
    check,
    check_choice,
    check_count,
    check_finite,
    check_key,
    is_concrete,
    shown,
)
from jfcl.core.clients import (
    attack_key,
    check_at_most_clients,
    check_clients,
    check_labels,
    check_state,
    client_ids,
    client_keys,
    client_shapes,
    mask,
    max_examples,
    num_clients,
    random_order,
    server_key,
    take_clients,
)
from jfcl.core.parameters import get_parameter, is_finite, named_leaves, num_bytes, path_name, set_parameter
from jfcl.core.platforms import by_platform, platform
from jfcl.core.stacking import aligned_zeros, free_host_memory, stack_clients
from jfcl.core.types import Adversary, Algorithm, Batch, Clients, DenseStart, PyTree, Task, dense_start
