"""Bytes in and out: segments, and the back ends that hold them."""
