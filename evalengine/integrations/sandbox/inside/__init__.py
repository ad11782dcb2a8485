"""Code that runs in the programs' processes: it is started by its path and imports the standard library only."""
