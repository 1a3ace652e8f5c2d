"""Every operation of the `tmd` backend against the same one on gloo, on random shapes, types, layouts and sizes."""
