"""An experiment's end: its runs seen together, on the terminal, as a picture and as a file."""
