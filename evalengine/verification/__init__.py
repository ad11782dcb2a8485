"""Compares the kernels' schedules by bytes on this machine, and remembers the verdict. It builds on the kernels."""
