"""How a kernel gets from Python to the GPU. Below the kernels, and without any arithmetic."""
