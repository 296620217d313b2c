"""How a function of one client becomes one of all clients: mappings, several hosts, memory."""
