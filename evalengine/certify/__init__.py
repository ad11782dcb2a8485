"""Evidence that runs the engine: `python -m evalengine verify` certifies the installation at hand."""
