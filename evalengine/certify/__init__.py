"""Evidence that runs the engine: `python -m evalengine verify engine|kernels` certifies the installation at hand."""
