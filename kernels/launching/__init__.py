"""How a kernel gets from Python to the GPU. The kernels build on this package; it does no arithmetic."""
