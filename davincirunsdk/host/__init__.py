"""What this machine itself has: devices, addresses, ports, tools."""
