"""`raysim fleet`: convert traces of devices from FedScale's format, and check them."""
