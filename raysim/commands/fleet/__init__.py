"""Traces of devices: made from the FedScale format, and checked."""
