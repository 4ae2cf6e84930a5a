"""What the kernels cost on this machine: speed and memory of each op, beside others' where they are installed."""
