"""What a rank's role consists of: what the user tracks, how it is kept, compared, handed over and put back.

`tracked` is the registry, `loader` the position in the data, `record` the small state that a buddy keeps, `manifest` and
`handoff` the way of the whole state to a joiner. No pickle anywhere: every byte that travels has a name, a type and a digest.
"""
