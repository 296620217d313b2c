"""How the training of one client becomes that of all clients: the client axis, devices, hosts, memory."""

from jfcl.mapping.axis import (
    BLOCK,
    MOST_CPU_DEVICES,
    Mapping,
    auto,
    chunked,
    client_mesh,
    divide_cpu,
    held,
    idle_cores,
    map_reduce,
    num_cores,
    num_rows,
    or_auto,
    own_rows,
    place,
    platform_of,
    pmapped,
    sharded,
    use_all_cores,
)
