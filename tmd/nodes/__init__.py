"""The border to whatever hands out nodes: `base` is the protocol, `local` the implementation on one machine."""
