"""The benchmark: shapes, how they are measured, what is reported. `ndsoftmax bench` is its command line."""
