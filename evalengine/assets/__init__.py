"""Files that ship inside the package: the tiny model `tinymath`, its task data, and the scripts that made both."""
