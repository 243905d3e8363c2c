"""This machine: processes, CPU, GPUs, memory, ports, shared memory; imports no other room."""
