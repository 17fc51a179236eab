"""What every process of the stack needs of its machine: child processes, ports, files, memory, shutdown."""
