"""jfcl: clustered federated learning, all clients in one compiled program."""

from jfcl._version import __version__
from jfcl.core import Algorithm, Clients, Task, stack_clients

__all__ = ["Algorithm", "Clients", "Task", "__version__", "stack_clients"]
