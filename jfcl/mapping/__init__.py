"""How the training of one client becomes that of all clients: the client axis, devices, hosts, memory."""

from jfcl.mapping.axis import (
    Mapping,
    auto,
    chunked,
    client_mesh,
    divide_cpu,
    idle_cores,
    map_reduce,
    num_cores,
    or_auto,
    platform_of,
    pmapped,
    sharded,
    use_all_cores,
)
from jfcl.mapping.placement import held, num_rows, own_rows, place
