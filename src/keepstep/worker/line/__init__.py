"""Talking. `channel` is the line to the own agent, `page` the memory shared with it, `blobs` and
`ahead` bring side state to a buddy, `peers` makes every connection between nodes. `process` is
what a worker is before it is a rank."""
