"""Whether the kernels' free schedules agree on this machine: compared by bytes, and remembered. Above the kernels."""
