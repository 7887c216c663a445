"""What lies below torch.distributed: the device and what may be queued on it (`cuda`, `guard`),
digests where the bytes are, native code, memory of other processes, and whether another machine
computes alike."""
